/* SPDX-License-Identifier: BSD-3-Clause */
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "progress.h"
#include "report.h"
#include "unfinished.h"

static int commit(const char *path, const char *format, bool show_progress,
                  struct pcow_error *error)
{
    struct progress progress;
    pcow_image *image;
    int r = img_open(path, format, PCOW_OPEN_WRITE, NULL, &image, error);

    if (r) {
        return r;
    }
    r = pcow_base(image) ? check_no_revert(pcow_base(image), error) : 0;
    if (r) {
        pcow_close(image);
        return r;
    }
    progress_begin(&progress, show_progress);
    r = pcow_commit(image, progress_update, &progress, error);
    progress_end(&progress, r == 0);
    return img_close(image, r, error);
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {HELP_OPTION, END_OF_OPTIONS};
    bool quiet = false, show_progress = false;
    const char *path, *format = NULL;
    struct pcow_error error;
    int option;

    while ((option = next_option(argc, argv, ":hqpf:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&commit_command, stdout);
        case 'q': quiet = true; break;
        case 'p': show_progress = true; break;
        case 'f': format = optarg; break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(&commit_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    if (commit(path, format, show_progress && !quiet, &error)) {
        return report_error(&error);
    }
    if (!quiet) {
        puts("Image committed.");
    }
    return EXIT_SUCCESS;
}

const struct command commit_command = {
    .name = "commit",
    .arguments = "[-p] [-q] [-f pcow] FILE",
    .summary = "Write the content of an image into its base and empty the image",
    .help = "  -p                         show progress\n"
            "  -q                         print nothing on success\n"
            "  -f pcow                    the format (there is no other)\n",
    .run = run,
};
