/* SPDX-License-Identifier: BSD-3-Clause */
/* checksum: of the data of snapshots, which is final. */
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "pace.h"
#include "report.h"

static int checksum(const char *path, const char *snapshot, struct pace *pace,
                    struct pcow_error *error)
{
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE, NULL, &image, error);

    if (r) {
        return r;
    }
    progress_begin(&pace->progress, pace->progress.enabled);
    r = pcow_checksum(image, snapshot, false, pace_update, pace, error);
    progress_end(&pace->progress, r == 0);
    return img_close(image, r, error);
}

static int run(int argc, char **argv)
{
    enum { RATE = 256 };
    static const struct option names[] = {
        HELP_OPTION, {"rate", required_argument, NULL, RATE}, END_OF_OPTIONS};
    bool quiet = false, show_progress = false;
    struct pcow_error error;
    struct pace pace = {0};
    int option;

    while ((option = next_option(argc, argv, ":hqp", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&checksum_command, stdout);
        case 'q': quiet = true; break;
        case 'p': show_progress = true; break;
        case RATE:
            if (!parse_size_option("rate", optarg, &pace.rate)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (optind >= argc || optind + 2 < argc) {
        report("checksum: expecting an image file name, and perhaps a snapshot; usage: pcow-img "
               "checksum %s",
               checksum_command.arguments);
        return EXIT_FAILURE;
    }
    pace.progress.enabled = show_progress && !quiet;
    if (checksum(argv[optind], argv[optind + 1], &pace, &error)) {
        return report_error(&error);
    }
    if (!quiet) {
        puts("Checksums made.");
    }
    return EXIT_SUCCESS;
}

const struct command checksum_command = {
    .name = "checksum",
    .arguments = "[-p] [-q] [--rate BYTES] FILE [SNAPSHOT]",
    .summary = "Make checksums of the data of snapshots, for 'check --data'",
    .help = "  --rate BYTES               look at no more a second\n"
            "  -p                         show progress\n"
            "  -q                         print nothing on success\n"
            "Without SNAPSHOT: of all of them. What has a checksum keeps it. Nobody may use the "
            "image meanwhile.\n",
    .run = run,
};
