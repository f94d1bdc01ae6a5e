/* SPDX-License-Identifier: BSD-3-Clause */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "command.h"
#include "json_output.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "uuid.h"

#define SUFFIX ".pcow"

static bool is_image(int directory, const char *name, struct stat *st)
{
    size_t length = strlen(name);

    return name[0] != '.' && length > strlen(SUFFIX)
           && !strcmp(name + length - strlen(SUFFIX), SUFFIX)
           && fstatat(directory, name, st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st->st_mode);
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

/* One that cannot be read may stand on anything. */
static bool may_stand_on(int directory, const char *name, const char *base)
{
    char uuid[UUID_TEXT_LENGTH];
    struct pcow_summary summary;
    struct pcow_error error;

    return pcow_summarize(directory, name, true, &summary, &error)
        || (summary.has_base && !strcmp(format_uuid(summary.base_uuid, uuid), base));
}

static json_object *list_one_json(int directory, const char *name, uint64_t inode)
{
    json_object *object = json_object_new_object();
    struct pcow_summary summary;
    struct pcow_error error;

    json_put_text(object, "name", name);
    json_put_size(object, "inode", inode);
    if (pcow_summarize(directory, name, false, &summary, &error)) {
        json_put_text(object, "error", error.message);
    } else {
        put_summary(object, &summary);
    }
    return object;
}

static void list_one(int directory, const char *name)
{
    char text[SIZE_TEXT_LENGTH];
    struct pcow_summary summary;
    struct pcow_error error;

    print_text(name);
    if (pcow_summarize(directory, name, false, &summary, &error)) {
        fputs(": ", stdout);
        print_text(error.message);
    } else {
        printf(": %s%s", format_size(summary.virtual_size, text), summary.sealed ? ", sealed" : "");
        printf(", disk size %s", format_size(summary.allocated_size, text));
        if (summary.has_base) {
            fputs(", on ", stdout);
            print_text(summary.base_name);
        }
    }
    putchar('\n');
}

static int list(const char *path, const char *base, bool json)
{
    DIR *entries = opendir(path);
    json_object *array = json ? json_object_new_array() : NULL;
    struct dirent *entry;
    struct stat st;
    int failed = 0;

    if (!entries) {
        report("%s cannot be listed: %s", path, strerror(errno));
        json_object_put(array);
        return EXIT_FAILURE;
    }
    while (errno = 0, (entry = readdir(entries))) {
        if (!is_image(dirfd(entries), entry->d_name, &st)
            || (base && !may_stand_on(dirfd(entries), entry->d_name, base))) {
            continue;
        }
        if (json) {
            json_object_array_add(array, list_one_json(dirfd(entries), entry->d_name, st.st_ino));
        } else {
            list_one(dirfd(entries), entry->d_name);
        }
    }
    failed = errno;
    closedir(entries);
    if (failed) {
        report("%s cannot be listed: %s", path, strerror(failed));
        json_object_put(array);
        return EXIT_FAILURE;
    }
    return json ? json_print(array) : EXIT_SUCCESS;
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256, BASE_UUID };
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"base-uuid", required_argument, NULL, BASE_UUID},
        END_OF_OPTIONS,
    };
    const char *base = NULL;
    bool json = false;
    int option;

    while ((option = next_option(argc, argv, ":h", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&list_command, stdout);
        case BASE_UUID: base = optarg; break;
        case OUTPUT:
            if (!parse_output(optarg, &json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (optind != argc - 1) {
        report("list: expecting one directory; usage: pcow-img list %s", list_command.arguments);
        return EXIT_FAILURE;
    }
    return list(argv[optind], base, json);
}

const struct command list_command = {
    .name = "list",
    .arguments = "[--output human|json] [--base-uuid UUID] DIRECTORY",
    .summary = "Show the images (*.pcow) in a directory: sizes and bases",
    .help = "  --output human|json        default: human\n"
            "  --base-uuid UUID           only those that stand on this image, and those that "
            "cannot be read\n"
            "No lock is taken and no base is opened; one that cannot be read is listed with the "
            "reason.\n",
    .run = run,
};
