/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "image.h"
#include "json_output.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "snapshot_list.h"
#include "unfinished.h"

struct snapshot_request {
    int action;                                /* 'c', 'l', 'a', 'd', RENAME or UNPIN */
    const char *format, *name, *new_name;
    bool json, tree, quiet, force_share;
};

enum { RENAME = 256, UNPIN, OUTPUT, TREE };

static int show_list(pcow_image *image, const struct snapshot_request *request,
                     struct pcow_error *error)
{
    json_object *array;
    int r;

    if (!request->json) {
        return request->tree ? snapshot_tree_print(image, error)
                             : snapshot_list_print(image, error);
    }
    r = snapshot_list_json(image, &array, error);
    if (!r && json_print(array)) {
        exit(EXIT_FAILURE);
    }
    return r;
}

static int delete_snapshot(pcow_image *image, const struct snapshot_request *request,
                           struct pcow_error *error)
{
    char text[SIZE_TEXT_LENGTH];
    uint64_t freed;
    int r = pcow_snapshot_delete(image, request->name, NULL, error);

    /* What the pool gets back, and not what it was told it would get. */
    if (!r) {
        r = pcow_reclaim(image, &freed, error);
    }
    if (!r && request->json) {
        json_object *object = json_object_new_object();

        json_put_size(object, "freed", freed);
        return json_print(object) ? fail(error, -EIO, "could not write the output") : 0;
    }
    if (!r && !request->quiet) {
        fputs("Snapshot '", stdout);
        print_text(request->name);
        printf("' deleted, %s given back to the pool.\n", format_size(freed, text));
    }
    return r;
}

/* Who holds the image may be a VM, and then there is a way. */
static int say_who_can(const struct snapshot_request *request, struct pcow_error *error)
{
    struct pcow_error busy = *error;
    const char *command = request->action == 'a'   ? "revert --reset"
                          : request->action == 'c' ? "create"
                          : request->action == 'd' ? "delete"
                                                   : "rename";

    return fail(
        error, busy.code,
        "%s; if it is a VM: 'pcowctl snapshot %s --domain DOMAIN'%s QEMU do it while it runs",
        busy.message, command, request->action == RENAME ? " has" : " or virsh have");
}

/*
 * Creating and applying; the revert that ended halfway itself may be gone on with, as
 * etc/libvirt/bin/qemu-img does.
 */
static int check_may_change(pcow_image *image, const struct snapshot_request *request,
                            struct pcow_error *error)
{
    bool goes_on = request->action == 'a'
                   && !strncmp(request->name, UNFINISHED_REVERT, strlen(UNFINISHED_REVERT));

    return (request->action == 'a' || request->action == 'c') && !goes_on
               ? check_no_revert(image, error)
               : 0;
}

static int act(const char *path, const struct snapshot_request *request, struct pcow_error *error)
{
    bool list = request->action == 'l';
    /*
     * snapshots are a matter of this file alone, but a writer must not change an image whose base
     * is gone unnoticed
     */
    unsigned flags = list ? PCOW_OPEN_NO_BASE | (request->force_share ? PCOW_OPEN_FORCE_SHARE : 0)
                          : PCOW_OPEN_WRITE;
    pcow_image *image;
    int r;

    if (request->action == UNPIN) {
        /* not as a writer: there may be one */
        return pcow_snapshot_unpin(path, request->name, error);
    }
    r = img_open(path, request->format, flags, NULL, &image, error);
    if (r) {
        return r == -EBUSY && !list ? say_who_can(request, error) : r;
    }
    r = check_may_change(image, request, error);
    if (r) {
        pcow_close(image);
        return r;
    }
    switch (request->action) {
    case 'c': r = pcow_snapshot_create(image, request->name, error); break;
    case 'a': r = pcow_snapshot_revert(image, request->name, error); break;
    case 'd': r = delete_snapshot(image, request, error); break;
    case RENAME: r = pcow_snapshot_rename(image, request->name, request->new_name, error); break;
    default: r = show_list(image, request, error); break;
    }
    return img_close(image, r, error);
}

static bool choose(struct snapshot_request *request, int action, const char *name)
{
    if (request->action) {
        report("snapshot: give only one of -l, -c, -a, -d, --rename and --unpin");
        return false;
    }
    request->action = action;
    request->name = name;
    return true;
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"rename", required_argument, NULL, RENAME},
        {"unpin", required_argument, NULL, UNPIN},
        {"tree", no_argument, NULL, TREE},
        {"force-share", no_argument, NULL, 'U'},
        END_OF_OPTIONS,
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
        case 'l': case 'c': case 'a': case 'd': case RENAME: case UNPIN:
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
        case TREE: request.tree = true; break;
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
    if (request.tree && (request.json || request.action != 'l')) {
        report("snapshot: --tree goes with -l, and not with JSON, where parent-id tells");
        return EXIT_FAILURE;
    }
    path = only_operand(&snapshot_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    return act(path, &request, &error) ? report_error(&error) : EXIT_SUCCESS;
}

const struct command snapshot_command = {
    .name = "snapshot",
    .arguments = "[-q] [-U] [-f FMT] [-l [--tree] [--output human|json] | -c NAME | -a NAME | -d "
                 "NAME | --rename OLD NEW | "
                 "--unpin NAME] FILE",
    .summary = "List, create, apply, delete or rename snapshots inside an image",
    .help = "  -l                         list them (default)\n"
            "  --tree                     of -l: each below the one that it descends from\n"
            "  -c NAME                    create one of the present state\n"
            "  -a NAME                    apply: go back to it; other snapshots stay\n"
            "  -d NAME                    delete it, and say what space that gave back\n"
            "  --rename OLD NEW           give it another name\n"
            "  --unpin NAME               images stood on it: look that none does any more; also "
            "while FILE is in use\n"
            "  --output human|json        of -l and -d; default: human\n"
            "  -U, --force-share          of -l: take no lock\n"
            "  -f FMT                     pcow (default) or, for -l, pcow1\n"
            "  -q                         print nothing on success\n"
            "Columns of the list: VM SIZE, the state of a VM; OWN, pages that this snapshot holds; "
            "SHARED, pages that it shows and\n"
            "an older one holds; FREES, what deleting it now gives back; '*': the present state "
            "stands on it; 'p': an image does.\n",
    .run = run,
};
