/* SPDX-License-Identifier: BSD-3-Clause */
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "json_output.h"
#include "options.h"
#include "report.h"
#include "snapshot_list.h"

struct snapshot_request {
    int action;                                /* 'c', 'l', 'a', 'd' or RENAME */
    const char *format, *name, *new_name;
    bool json, quiet, force_share;
};

enum { RENAME = 256, OUTPUT };

static int show_list(pcow_image *image, bool json, struct pcow_error *error)
{
    json_object *array;
    int r;

    if (!json) {
        return snapshot_list_print(image, error);
    }
    r = snapshot_list_json(image, &array, error);
    if (!r && json_print(array)) {
        exit(EXIT_FAILURE);
    }
    return r;
}

static int delete_snapshot(pcow_image *image, const struct snapshot_request *request, struct pcow_error *error)
{
    uint64_t freed;

    return pcow_snapshot_delete(image, request->name, &freed, error);
}

static int act(const char *path, const struct snapshot_request *request, struct pcow_error *error)
{
    bool list = request->action == 'l';
    /* snapshots are a matter of this file alone, but a writer must not change an image whose base is gone unnoticed */
    unsigned flags = list ? PCOW_OPEN_NO_BASE | (request->force_share ? PCOW_OPEN_FORCE_SHARE : 0) : PCOW_OPEN_WRITE;
    pcow_image *image;
    int r = image_open(path, request->format, flags, NULL, &image, error);

    if (r) {
        return r;
    }
    switch (request->action) {
    case 'c': r = pcow_snapshot_create(image, request->name, error); break;
    case 'a': r = pcow_snapshot_revert(image, request->name, error); break;
    case 'd': r = delete_snapshot(image, request, error); break;
    case RENAME: r = pcow_snapshot_rename(image, request->name, request->new_name, error); break;
    default: r = show_list(image, request->json, error); break;
    }
    pcow_close(image);
    return r;
}

static bool choose(struct snapshot_request *request, int action, const char *name)
{
    if (request->action) {
        report("snapshot: give only one of -l, -c, -a, -d and --rename");
        return false;
    }
    request->action = action;
    request->name = name;
    return true;
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {
        HELP_OPTION, {"output", required_argument, NULL, OUTPUT}, {"rename", required_argument, NULL, RENAME},
        {"force-share", no_argument, NULL, 'U'}, END_OF_OPTIONS,
    };
    struct snapshot_request request = {0};
    struct pcow_error error;
    const char *path;
    int option;

    while ((option = next_option(argc, argv, ":hqUf:lc:a:d:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&snapshot_command, stdout);
        case 'q': request.quiet = true; break;
        case 'U': request.force_share = true; break;
        case 'f': request.format = optarg; break;
        case 'l': case 'c': case 'a': case 'd': case RENAME:
            if (!choose(&request, option, option == 'l' ? NULL : optarg)) {
                return EXIT_FAILURE;
            }
            if (option == RENAME) {
                if (optind >= argc) {
                    report("snapshot: --rename needs the old and the new name");
                    return EXIT_FAILURE;
                }
                request.new_name = argv[optind++];
            }
            break;
        case OUTPUT:
            if (!parse_output(optarg, &request.json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (!request.action) {
        request.action = 'l';                  /* as qemu-img */
    }
    path = only_operand(&snapshot_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    return act(path, &request, &error) ? report_error(&error) : EXIT_SUCCESS;
}

const struct command snapshot_command = {
    .name = "snapshot",
    .arguments = "[-q] [-U] [-f FMT] [-l [--output human|json] | -c NAME | -a NAME | -d NAME | --rename OLD NEW] FILE",
    .summary = "List, create, apply, delete or rename snapshots inside an image",
    .help = "  -l                         list them (default)\n"
            "  -c NAME                    create one of the present state\n"
            "  -a NAME                    apply: go back to it; other snapshots stay\n"
            "  -d NAME                    delete it\n"
            "  --rename OLD NEW           give it another name\n"
            "  --output human|json        of -l; default: human\n"
            "  -U, --force-share          of -l: take no lock\n"
            "  -f FMT                     pcow (default) or, for -l, pcow1\n"
            "  -q                         accepted for qemu-img's sake; success prints nothing anyway\n",
    .run = run,
};
