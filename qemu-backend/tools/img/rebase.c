/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "progress.h"
#include "report.h"

struct rebase_request {
    const char *format, *base, *base_format, *base_snapshot;
    bool unsafe, quiet, progress;
};

static int apply_options(char *list, struct rebase_request *request, struct pcow_error *error)
{
    char *key, *value;
    int more;

    while ((more = next_key_value(&list, &key, &value, error)) > 0) {
        if (strcmp(key, "base_snapshot")) {
            return fail(error, -EINVAL, "rebase option '%s' is not known; there is base_snapshot",
                        key);
        }
        request->base_snapshot = value;
    }
    return more;
}

static int rebase(const char *path, const struct rebase_request *request, struct pcow_error *error)
{
    /* an unsafe rebase mends an image whose old base is gone, so it must not ask for it */
    unsigned flags = PCOW_OPEN_WRITE | (request->unsafe ? PCOW_OPEN_NO_BASE : 0);
    const char *base = NULL;
    char path_of_base[PATH_MAX];
    struct progress progress;
    pcow_image *image;
    int r = check_base_format(request->base_format, error);

    if (!r && *request->base) {
        r = base_path(path, request->base, path_of_base, error);
        base = path_of_base;
    } else if (!r && request->base_snapshot) {
        r = fail(error, -EINVAL, "%s: base_snapshot needs a base: give one with -b", path);
    }
    if (!r) {
        r = img_open(path, request->format, flags, NULL, &image, error);
    }
    if (r) {
        return r;
    }
    progress_begin(&progress, request->progress && !request->quiet);
    r = pcow_rebase(image, base, request->base_snapshot, request->unsafe, progress_update,
                    &progress, error);
    progress_end(&progress, r == 0);
    return img_close(image, r, error);
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {HELP_OPTION, END_OF_OPTIONS};
    struct rebase_request request = {0};
    struct pcow_error error;
    const char *path;
    int option;

    while ((option = next_option(argc, argv, ":hqpuf:b:F:o:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&rebase_command, stdout);
        case 'q': request.quiet = true; break;
        case 'p': request.progress = true; break;
        case 'u': request.unsafe = true; break;
        case 'f': request.format = optarg; break;
        case 'b': request.base = optarg; break;
        case 'F': request.base_format = optarg; break;
        case 'o':
            if (apply_options(optarg, &request, &error)) {
                return report_error(&error);
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(&rebase_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    if (!request.base) {
        report("rebase: give the new base with -b BASE, or -b '' for none");
        return EXIT_FAILURE;
    }
    return rebase(path, &request, &error) ? report_error(&error) : EXIT_SUCCESS;
}

const struct command rebase_command = {
    .name = "rebase",
    .arguments = "[-p] [-q] [-u] [-f pcow] -b BASE [-F FMT] [-o base_snapshot=NAME] FILE",
    .summary = "Put an image on another base; the guest sees no change",
    .help = "  -b BASE                    the new base, in the directory of FILE; '': none\n"
            "  -F FMT                     format of BASE: pcow (default) or pcow1\n"
            "  -o base_snapshot=NAME      stand on this snapshot of BASE\n"
            "  -u                         only change the name of the base: right only if its "
            "content is the same\n"
            "  -p                         show progress\n"
            "  -q                         print nothing on success\n"
            "  -f pcow                    the format (there is no other)\n",
    .run = run,
};
