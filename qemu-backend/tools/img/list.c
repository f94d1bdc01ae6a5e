/* SPDX-License-Identifier: BSD-3-Clause */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "command.h"
#include "json_output.h"
#include "list_bases.h"
#include "list_cache.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "uuid.h"

#define SUFFIX ".pcow"

/* All that is asked of a file of which enough is known already, in one call. */
static bool is_image(int directory, const char *name, struct statx *stx)
{
    size_t length = strlen(name);

    return name[0] != '.' && length > strlen(SUFFIX)
           && !strcmp(name + length - strlen(SUFFIX), SUFFIX)
           && statx(directory, name, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, stx) == 0
           && S_ISREG(stx->stx_mode);
}

/* What list_cache compares, and what is said of a file. */
static struct stat as_stat(const struct statx *stx)
{
    return (struct stat){
        .st_dev = makedev(stx->stx_dev_major, stx->stx_dev_minor),
        .st_ino = stx->stx_ino,
        .st_mode = stx->stx_mode,
        .st_size = (off_t)stx->stx_size,
        .st_blocks = (blkcnt_t)stx->stx_blocks,
        .st_mtim = {stx->stx_mtime.tv_sec, stx->stx_mtime.tv_nsec},
        .st_ctim = {stx->stx_ctime.tv_sec, stx->stx_ctime.tv_nsec},
    };
}

static void put_summary(json_object *object, const struct pcow_summary *summary)
{
    char uuid[UUID_TEXT_LENGTH];

    json_put_text(object, "uuid", format_uuid(summary->uuid, uuid));
    json_put_size(object, "virtual-size", summary->virtual_size);
    json_put_size(object, "actual-size", summary->allocated_size);
    json_put_size(object, "may-grow", summary->may_grow);
    json_put_size(object, "may-grow-frozen", summary->may_grow_frozen);
    json_put_bool(object, "sealed", summary->sealed);
    json_put_size(object, "snapshots", summary->snapshots);
    if (summary->has_base) {
        json_put_text(object, "base", summary->base_name);
        json_put_text(object, "base-uuid", format_uuid(summary->base_uuid, uuid));
        json_put_size(object, "base-snapshot-id", summary->base_layer);
    }
}

/* What is wanted, and of many what was found until now. */
struct list {
    int directory;
    const char *base;                           /* UUID; NULL: whatever they stand on */
    bool json, total;
    struct list_cache cache;
    struct list_bases bases;
    json_object *array;
    uint64_t images, sealed, unreadable;
    /* of those that are not sealed, and of the unreadable ones that were not */
    uint64_t allocated, may_grow, may_grow_frozen;
};

static bool stands_on(const struct pcow_summary *summary, const char *base)
{
    char uuid[UUID_TEXT_LENGTH];

    return summary->has_base && !strcmp(format_uuid(summary->base_uuid, uuid), base);
}

/*
 * By the header alone. Of one that cannot be read counts what it stood on when it could be; if that
 * is not known, it may stand on anything.
 */
static bool may_stand_on(int directory, const char *name, const char *base,
                         const struct image_base *known)
{
    struct pcow_summary summary;
    struct pcow_error error;
    char uuid[UUID_TEXT_LENGTH];

    if (!pcow_summarize(directory, name, true, &summary, &error)) {
        return stands_on(&summary, base);
    }
    return !known || (known->has_base && !strcmp(format_uuid(known->uuid, uuid), base));
}

/* summary NULL: it cannot be read. */
static void put_json(json_object *array, const char *name, const struct stat *st,
                     const struct pcow_summary *summary, const struct pcow_error *error)
{
    json_object *object = json_object_new_object();

    json_put_text(object, "name", name);
    json_put_size(object, "inode", st->st_ino);
    if (summary) {
        put_summary(object, summary);
    } else {
        json_put_text(object, "error", error->message);
    }
    json_object_array_add(array, object);
}

static void put_text(const char *name, const struct pcow_summary *summary,
                     const struct pcow_error *error)
{
    char text[SIZE_TEXT_LENGTH];

    print_text(name);
    if (!summary) {
        fputs(": ", stdout);
        print_text(error->message);
    } else {
        printf(": %s%s", format_size(summary->virtual_size, text),
               summary->sealed ? ", sealed" : "");
        printf(", disk size %s", format_size(summary->allocated_size, text));
        if (summary->has_base) {
            fputs(", on ", stdout);
            print_text(summary->base_name);
        }
    }
    putchar('\n');
}

/* What was promised to its guest stays promised: it may be repaired, and it may be forged. */
static void add_unreadable(struct list *list, const struct stat *st, const struct image_base *known)
{
    uint64_t allocated = (uint64_t)st->st_blocks * 512;

    list->unreadable++;
    if (known && !known->sealed) {
        list->allocated += allocated;
        list->may_grow += known->virtual_size > allocated ? known->virtual_size - allocated : 0;
        list->may_grow_frozen += known->virtual_size;
    }
}

static void add_to_total(struct list *list, const struct stat *st,
                         const struct pcow_summary *summary, const struct image_base *known)
{
    list->images++;
    if (!summary) {
        add_unreadable(list, st, known);
    } else if (summary->sealed) {
        list->sealed++;
    } else {
        list->allocated += summary->allocated_size;
        list->may_grow += summary->may_grow;
        list->may_grow_frozen += summary->may_grow_frozen;
    }
}

static void list_one(struct list *list, const char *name, const struct statx *stx)
{
    struct stat st = as_stat(stx);
    const struct pcow_summary *summary = list_cache_find(&list->cache, &st);
    const struct image_base *known = NULL;
    struct image_base born;
    bool is_born = list_bases_born(&list->bases, stx, &born);
    struct pcow_summary found;
    struct pcow_error error = {0};
    int r = 0;

    if (!summary) {
        /* what is to be remembered is looked at as a whole */
        if (list->base && !list_cache_is_used(&list->cache)
            && !may_stand_on(list->directory, name, list->base, NULL)) {
            return;
        }
        r = pcow_summarize(list->directory, name, false, &found, &error);
        if (!r) {
            list_cache_add(&list->cache, &found);
            summary = &found;
        } else {
            known = is_born ? list_bases_find(&list->bases, &born) : NULL;
            if (list->base && !may_stand_on(list->directory, name, list->base, known)) {
                return;
            }
        }
    }
    if (summary && is_born) {
        list_bases_add(&list->bases, &born, summary);
    }
    if (list->base && summary && !stands_on(summary, list->base)) {
        return;
    }
    if (list->total) {
        if (r != -ENOENT) {                     /* deleted meanwhile */
            add_to_total(list, &st, summary, known);
        }
    } else if (list->json) {
        put_json(list->array, name, &st, summary, &error);
    } else {
        put_text(name, summary, &error);
    }
}

/* 0, or errno. */
static int list_all(struct list *list, DIR *entries)
{
    struct dirent *entry;
    struct statx stx;

    while (errno = 0, (entry = readdir(entries))) {
        if (is_image(list->directory, entry->d_name, &stx)) {
            list_one(list, entry->d_name, &stx);
        }
    }
    return errno;
}

static void list_named(struct list *list, char **names)
{
    struct statx stx;

    for (; *names; names++) {
        if (!strchr(*names, '/') && is_image(list->directory, *names, &stx)) {
            list_one(list, *names, &stx);
        }
    }
}

static int print_total(const struct list *list)
{
    char text[3][SIZE_TEXT_LENGTH];
    json_object *object;

    if (!list->json) {
        printf("%" PRIu64 " images, %" PRIu64 " of them sealed, %" PRIu64 " cannot be read\n"
               "of those that are not sealed: disk size %s, may grow by %s, and by %s after "
               "snapshots\n",
               list->images, list->sealed, list->unreadable, format_size(list->allocated, text[0]),
               format_size(list->may_grow, text[1]), format_size(list->may_grow_frozen, text[2]));
        return EXIT_SUCCESS;
    }
    object = json_object_new_object();
    json_put_size(object, "images", list->images);
    json_put_size(object, "sealed", list->sealed);
    json_put_size(object, "unreadable", list->unreadable);
    json_put_size(object, "actual-size", list->allocated);
    json_put_size(object, "may-grow", list->may_grow);
    json_put_size(object, "may-grow-frozen", list->may_grow_frozen);
    return json_print(object);
}

/* names: of files in it, up to a NULL; all of them, if there is none. */
static int list_directory(struct list *list, const char *path, const char *cache, char **names)
{
    DIR *entries = opendir(path);
    int failed = 0;

    if (!entries) {
        report("%s cannot be listed: %s", path, strerror(errno));
        return EXIT_FAILURE;
    }
    list->directory = dirfd(entries);
    list->array = list->json && !list->total ? json_object_new_array() : NULL;
    list_cache_open(&list->cache, *names ? NULL : cache, list->directory);
    list_bases_open(&list->bases, cache, list->directory);
    if (*names) {
        list_named(list, names);
    } else {
        failed = list_all(list, entries);
    }
    list_cache_close(&list->cache, !failed);
    list_bases_close(&list->bases, !failed && !*names);
    closedir(entries);
    if (failed) {
        report("%s cannot be listed: %s", path, strerror(failed));
        json_object_put(list->array);
        return EXIT_FAILURE;
    }
    if (list->total) {
        return print_total(list);
    }
    return list->json ? json_print(list->array) : EXIT_SUCCESS;
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256, BASE_UUID, CACHE, TOTAL };
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"base-uuid", required_argument, NULL, BASE_UUID},
        {"cache", required_argument, NULL, CACHE},
        {"total", no_argument, NULL, TOTAL},
        END_OF_OPTIONS,
    };
    struct list wanted = {0};
    const char *cache = NULL;
    int option;

    while ((option = next_option(argc, argv, ":h", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&list_command, stdout);
        case BASE_UUID: wanted.base = optarg; break;
        case CACHE: cache = optarg; break;
        case TOTAL: wanted.total = true; break;
        case OUTPUT:
            if (!parse_output(optarg, &wanted.json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (!check_operands(argc, argv, 1, INT_MAX, "DIRECTORY")) {
        return EXIT_FAILURE;
    }
    return list_directory(&wanted, argv[optind], cache, argv + optind + 1);
}

const struct command list_command = {
    .name = "list",
    .arguments = "[--output human|json] [--base-uuid UUID] [--total] [--cache FILE] DIRECTORY "
                 "[NAME...]",
    .summary = "Show the images (*.pcow) in a directory: sizes and bases",
    .help = "  --output human|json        default: human\n"
            "  --base-uuid UUID           only those that stand on this image, or cannot be read "
            "and may\n"
            "  --total                    only how many there are, and the sums\n"
            "  --cache FILE               remember there what is found, and look only at what has "
            "changed;\n"
            "                             not where several hosts may share the directory; in "
            "FILE" LIST_BASES ", what\n"
            "                             images stand on, for when they cannot be read\n"
            "  NAME                       only these files of it\n"
            "No lock is taken and no base is opened; one that cannot be read is listed with the "
            "reason.\n",
    .run = run,
};
