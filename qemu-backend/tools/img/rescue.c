/* SPDX-License-Identifier: BSD-3-Clause */
/* What a repair has dropped: list it, and take it out again. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "command.h"
#include "json_output.h"
#include "options.h"
#include "report.h"
#include "rescue_file.h"

/* In JSON, of layers and of ranges; a table is printed as it is read. */
#define MOST_IN_JSON 1000

struct listing {
    const char *path;
    int directory; /* to take the content out to; -1: not to */
    int fd; /* of the range; -1: none */
    char name[96]; /* of its file; "": none */
    uint64_t count, kept; /* ranges; of this one, bytes */
    uint64_t layers, told; /* ranges that its end tells of */
    json_object *lost; /* the range, NULL: none yet */
    json_object *result; /* NULL: print a table */
    bool whole, repaired;
};

/* Words are those that are known, and numbers made anew: a file may come from anywhere. */
static const char *kind_of(json_object *lost)
{
    static const char *const kinds[] = {"data", "state", "snapshot"};
    const char *kind = rescue_text(lost, "lost");

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (kind && !strcmp(kind, kinds[i])) {
            return kinds[i];
        }
    }
    return "unknown";
}

static void put_text(json_object *object, const char *key, json_object *from)
{
    if (rescue_text(from, key)) {
        json_put_text(object, key, rescue_text(from, key));
    }
}

static void put_number(json_object *object, const char *key, json_object *from)
{
    json_put_size(object, key, rescue_number(from, key));
}

/* Of a list of the result; what is too many is counted only. */
static void put_item(struct listing *listing, const char *key, json_object *item)
{
    json_object *array;

    json_object_object_get_ex(listing->result, key, &array);
    json_object_array_add(array, item);
}

static void put_layer(struct listing *listing, json_object *from)
{
    json_object *layer;

    listing->layers++;
    if (!listing->result || listing->layers > MOST_IN_JSON) {
        return;
    }
    layer = json_object_new_object();
    put_number(layer, "layer", from);
    put_number(layer, "parent", from);
    put_number(layer, "size", from);
    put_text(layer, "snapshot", from);
    put_item(listing, "layers", layer);
}

static void put_range(struct listing *listing, json_object *from)
{
    json_object *lost;

    if (listing->count > MOST_IN_JSON) {
        return;
    }
    lost = json_object_new_object();
    json_put_text(lost, "lost", kind_of(from));
    put_number(lost, "layer", from);
    put_text(lost, "snapshot", from);
    if (rescue_text(from, "guest-offset")) {
        put_number(lost, "guest-offset", from);
    }
    put_number(lost, "length", from);
    put_number(lost, "there", from);
    json_put_size(lost, "kept", listing->kept);
    if (listing->name[0]) {
        json_put_text(lost, "file", listing->name);
    }
    put_item(listing, "lost", lost);
}

/* The number is made anew, too. */
static void print_range(const struct listing *listing, json_object *lost)
{
    const char *snapshot = rescue_text(lost, "snapshot");
    char offset[24] = "-";

    if (rescue_text(lost, "guest-offset")) {
        snprintf(offset, sizeof(offset), "%" PRIu64, rescue_number(lost, "guest-offset"));
    }
    printf("%-5" PRIu64 "%-9s %5" PRIu64 "  %16s %14" PRIu64 " %14" PRIu64 "  ", listing->count,
           kind_of(lost), rescue_number(lost, "layer"), offset,
           rescue_number(lost, "length"), listing->kept);
    print_text(snapshot ? snapshot : "");
    putchar('\n');
}

static int finish_range(struct listing *listing, struct pcow_error *error)
{
    json_object *lost = listing->lost;

    if (!lost) {
        return 0;
    }
    if (listing->fd >= 0 && close(listing->fd)) {
        listing->fd = -1;
        return fail(error, -errno, "cannot write %s: %s", listing->name, strerror(errno));
    }
    listing->fd = -1;
    if (listing->result) {
        put_range(listing, lost);
    } else {
        print_range(listing, lost);
    }
    listing->lost = NULL;
    json_object_put(lost);
    return 0;
}

static void name_range(struct listing *listing)
{
    int used = snprintf(listing->name, sizeof(listing->name), "%04" PRIu64 "-%s-layer-%" PRIu64,
                        listing->count, kind_of(listing->lost),
                        rescue_number(listing->lost, "layer"));

    if (rescue_text(listing->lost, "guest-offset")) {
        snprintf(listing->name + used, sizeof(listing->name) - (size_t)used, "-at-%" PRIu64,
                 rescue_number(listing->lost, "guest-offset"));
    }
}

static int begin_range(struct listing *listing, json_object *object, struct pcow_error *error)
{
    uint64_t there = rescue_number(object, "there");

    listing->lost = json_object_get(object);
    listing->count++;
    listing->kept = there;
    listing->name[0] = '\0';
    if (listing->directory < 0 || there == 0) {
        return 0;
    }
    name_range(listing);
    listing->fd = openat(listing->directory, listing->name,
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    /* What is not in the file of the repair was zeros. */
    if (listing->fd < 0 || ftruncate(listing->fd, (off_t)there)) {
        return fail(error, -errno, "cannot write %s: %s", listing->name, strerror(errno));
    }
    return 0;
}

static int take_out(struct listing *listing, struct rescue_file *file, json_object *object,
                    struct pcow_error *error)
{
    uint64_t at = rescue_number(object, "at");
    char buffer[65536];
    int64_t got = 0;

    if (!listing->lost || at > listing->kept
        || rescue_number(object, "bytes") > listing->kept - at) {
        return fail(error, -EBADMSG, "%s: range %" PRIu64 " has content outside of it",
                    listing->path, listing->count);
    }
    while (listing->fd >= 0 && (got = rescue_read(file, buffer, sizeof(buffer), error)) > 0) {
        errno = 0;
        if (pwrite(listing->fd, buffer, (size_t)got, (off_t)at) != got) {
            return fail(error, errno ? -errno : -EIO, "cannot write %s", listing->name);
        }
        at += (uint64_t)got;
    }
    return (int)got;
}

static void begin_list(struct listing *listing, json_object *header)
{
    time_t date = (time_t)rescue_number(header, "date");
    struct tm tm;
    char text[32] = "?";

    if (listing->result) {
        json_put_text(listing->result, "uuid",
                      rescue_text(header, "uuid") ? rescue_text(header, "uuid") : "");
        json_put_size(listing->result, "date", rescue_number(header, "date"));
        json_object_object_add(listing->result, "layers", json_object_new_array());
        json_object_object_add(listing->result, "lost", json_object_new_array());
        return;
    }
    if (gmtime_r(&date, &tm)) {
        strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &tm);
    }
    printf("Dropped from image ");
    print_text(rescue_text(header, "uuid") ? rescue_text(header, "uuid") : "?");
    printf(" by a repair on %s UTC\n%-5s%-9s %5s  %16s %14s %14s  %s\n", text, "No.", "Kind",
           "Layer", "Guest offset", "Length", "Kept", "Snapshot");
}

static int take_line(struct listing *listing, struct rescue_file *file, enum rescue_line kind,
                     json_object *object, struct pcow_error *error)
{
    int r = kind == RESCUE_CONTENT || kind == RESCUE_UNREAD ? 0 : finish_range(listing, error);

    if (r) {
        return r;
    }
    switch (kind) {
    case RESCUE_HEADER: begin_list(listing, object); break;
    case RESCUE_LAYER: put_layer(listing, object); break;
    case RESCUE_LOST: return begin_range(listing, object, error);
    case RESCUE_CONTENT: return take_out(listing, file, object, error);
    case RESCUE_UNREAD:
        listing->kept -= rescue_number(object, "unread") < listing->kept
                             ? rescue_number(object, "unread")
                             : listing->kept;
        break;
    case RESCUE_END:
        listing->whole = true;
        listing->told = rescue_number(object, "end");
        break;
    case RESCUE_REPAIRED: listing->repaired = true; break;
    case RESCUE_END_OF_FILE: break;
    }
    return 0;
}

static int list(struct listing *listing, struct pcow_error *error)
{
    struct rescue_file *file;
    json_object *object;
    int kind, r = rescue_open(listing->path, &file, error);

    if (r) {
        return r;
    }
    while (!r && (kind = rescue_next(file, &object, error)) != RESCUE_END_OF_FILE) {
        r = kind < 0 ? kind : take_line(listing, file, (enum rescue_line)kind, object, error);
    }
    json_object_put(listing->lost);
    if (listing->fd >= 0) {
        close(listing->fd);
    }
    rescue_close(file);
    if (!r && !listing->whole) {
        return fail(error, -EBADMSG,
                    "%s: its end is missing: the repair that wrote it was interrupted before it "
                    "changed anything, so all of this is in the image still",
                    listing->path);
    }
    if (!r && listing->told != listing->count) {
        return fail(error, -EBADMSG,
                    "%s has %" PRIu64 " ranges, and its end tells of %" PRIu64
                    ": something was taken out of it, or put into it",
                    listing->path, listing->count, listing->told);
    }
    return r;
}

static void put_left_out(json_object *object, const char *key, uint64_t count)
{
    json_put_size(object, key, count > MOST_IN_JSON ? count - MOST_IN_JSON : 0);
}

static int show(struct listing *listing, bool json)
{
    struct pcow_error error;
    int r;

    listing->result = json ? json_object_new_object() : NULL;
    r = list(listing, &error);
    if (json && !r) {
        put_left_out(listing->result, "layers-left-out", listing->layers);
        put_left_out(listing->result, "lost-left-out", listing->count);
        json_put_bool(listing->result, "repaired", listing->repaired);
        return json_print(listing->result);
    }
    json_object_put(listing->result);
    if (!r && !listing->repaired) {
        puts("The repair was interrupted: run it again.");
    }
    return r ? report_error(&error) : EXIT_SUCCESS;
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256 };
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"extract", required_argument, NULL, 'x'},
        END_OF_OPTIONS,
    };
    /* The one that was made, and not what somebody has put in its place. */
    const int new_directory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    struct listing listing = {.directory = -1, .fd = -1};
    const char *directory = NULL;
    bool json = false;
    int option, r;

    while ((option = next_option(argc, argv, ":hx:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&rescue_command, stdout);
        case 'x': directory = optarg; break;
        case OUTPUT:
            if (!parse_output(optarg, &json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    listing.path = only_operand(&rescue_command, argc, argv);
    if (!listing.path) {
        return EXIT_FAILURE;
    }
    if (directory
        && (mkdir(directory, 0700)
            || (listing.directory = open(directory, new_directory)) < 0)) {
        report("cannot make the directory %s: %s", directory, strerror(errno));
        return EXIT_FAILURE;
    }
    r = show(&listing, json);
    if (listing.directory >= 0) {
        close(listing.directory);
    }
    return r;
}

const struct command rescue_command = {
    .name = "rescue",
    .arguments = "[--output human|json] [-x DIRECTORY] FILE.rescue",
    .summary = "List what a repair has dropped from an image, and take it out",
    .help =
        "  -x, --extract DIRECTORY    write each range to a file of its own in this new directory\n"
        "  --output human|json        default: human\n",
    .run = run,
};
