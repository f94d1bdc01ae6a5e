/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "image.h"
#include "json_output.h"
#include "options.h"
#include "report.h"

struct map_request {
    const char *format, *snapshot;
    uint64_t start, length;
    bool json, force_share;
};

static bool continues(const struct pcow_extent *a, const struct pcow_extent *b)
{
    return a->present == b->present && a->zero == b->zero && a->data == b->data
           && a->depth == b->depth
           && (!a->present || (a->path == b->path && a->file_offset + a->length == b->file_offset));
}

/* One object a line, written as it is found: an image may have very many extents. */
static void print_json(const struct pcow_extent *extent, bool first)
{
    json_object *object = json_object_new_object();

    json_put_size(object, "start", extent->offset);
    json_put_size(object, "length", extent->length);
    json_put_size(object, "depth", extent->depth);
    json_put_bool(object, "present", extent->present);
    json_put_bool(object, "zero", extent->zero);
    json_put_bool(object, "data", extent->data);
    if (extent->present) {
        json_put_size(object, "offset", extent->file_offset);
        json_put_text(object, "filename", extent->path);
    }
    printf("%s%s", first ? "[" : ",\n",
           json_object_to_json_string_ext(object, JSON_C_TO_STRING_SPACED
                                                      | JSON_C_TO_STRING_NOSLASHESCAPE));
    json_object_put(object);
}

static void print_human(const struct pcow_extent *extent, bool first)
{
    if (first) {
        printf("%-16s%-16s%-16s%s\n", "Offset", "Length", "Mapped to", "File");
    }
    if (extent->data && !extent->zero) {
        printf("%#-16" PRIx64 "%#-16" PRIx64 "%#-16" PRIx64, extent->offset, extent->length,
               extent->file_offset);
        print_text(extent->path);
        putchar('\n');
    }
}

static int map_range(pcow_image *image, const struct map_request *request, struct pcow_error *error)
{
    void (*print)(const struct pcow_extent *, bool) = request->json ? print_json : print_human;
    uint64_t size = pcow_size(image), end, offset = request->start;
    struct pcow_extent pending = {0}, extent;
    bool first = true;

    if (offset >= size) {
        return fail(error, -EINVAL,
                    "%s: the start %" PRIu64 " is not below the image size %" PRIu64,
                    pcow_path(image), offset, size);
    }
    end = request->length < size - offset ? offset + request->length : size;
    while (offset < end) {
        int r = pcow_get_extent(image, offset, end - offset, &extent, error);

        if (r) {
            return r;
        }
        offset += extent.length;
        if (pending.length && continues(&pending, &extent)) {
            pending.length += extent.length;
            continue;
        }
        if (pending.length) {
            print(&pending, first);
            first = false;
        }
        pending = extent;
    }
    if (pending.length) {
        print(&pending, first);
    }
    if (request->json) {
        puts("]");
    }
    return fflush(stdout) ? fail(error, -errno, "could not write the output") : 0;
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256 };
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"start-offset", required_argument, NULL, 's'},
        {"max-length", required_argument, NULL, 'l'},
        {"force-share", no_argument, NULL, 'U'},
        END_OF_OPTIONS,
    };
    struct map_request request = {.length = UINT64_MAX};
    struct pcow_error error;
    pcow_image *image;
    const char *path;
    int option, r;

    while ((option = next_option(argc, argv, ":hUf:s:l:S:", names)) != -1) {
        bool ok = true;

        switch (option) {
        case 'h': return command_help(&map_command, stdout);
        case 'U': request.force_share = true; break;
        case 'f': request.format = optarg; break;
        case 'S': request.snapshot = optarg; break;
        case 's': ok = parse_size_option("start offset", optarg, &request.start); break;
        case 'l': ok = parse_size_option("length", optarg, &request.length); break;
        case OUTPUT: ok = parse_output(optarg, &request.json); break;
        default: return EXIT_FAILURE;
        }
        if (!ok) {
            return EXIT_FAILURE;
        }
    }
    path = only_operand(&map_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    r = img_open(path, request.format, request.force_share ? PCOW_OPEN_FORCE_SHARE : 0,
                 request.snapshot, &image, &error);
    if (r) {
        return report_error(&error);
    }
    r = map_range(image, &request, &error);
    pcow_close(image);
    return r ? report_error(&error) : EXIT_SUCCESS;
}

const struct command map_command = {
    .name = "map",
    .arguments = "[-U] [-f FMT] [--output human|json] [-s OFFSET] [-l LENGTH] [-S SNAPSHOT] FILE",
    .summary = "Show where the data of an image lies, in its own file and in its bases",
    .help = "  -f FMT                     pcow (default) or pcow1\n"
            "  -s, --start-offset OFFSET  begin here\n"
            "  -l, --max-length LENGTH    and end after this\n"
            "  -S SNAPSHOT                the map of a snapshot\n"
            "  -U, --force-share          take no lock: also while the image is in use\n"
            "  --output human|json        human (default) lists data only, json everything\n",
    .run = run,
};
