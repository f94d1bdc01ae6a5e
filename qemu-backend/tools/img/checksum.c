/* SPDX-License-Identifier: BSD-3-Clause */
/* checksum: of the data of snapshots, which is final. */
#include <errno.h>
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "pace.h"
#include "report.h"

/* VM or tool: somebody has the image open for writing. */
static int beside_writer(const char *path, const char *snapshot, struct pace *pace,
                         struct pcow_error *error)
{
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_NO_BASE, snapshot, &image, error);

    if (r) {
        return r;
    }
    pace->begun = 0;
    progress_begin(&pace->progress, pace->progress.enabled);
    r = pcow_checksum_beside_writer(image, pace_update, pace, error);
    progress_end(&pace->progress, r == 0);
    pcow_close(image);
    return r;
}

/* One that is deleted, or not made yet, needs none. */
static int all_beside_writer(const char *path, struct pace *pace, struct pcow_error *error)
{
    struct pcow_snapshot *list = NULL;
    size_t count = 0;
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_NO_BASE | PCOW_OPEN_FORCE_SHARE, NULL, &image, error);

    if (r) {
        return r;
    }
    r = pcow_snapshot_list(image, &list, &count, error);
    pcow_close(image);
    for (size_t i = 0; i < count && !r; i++) {
        r = beside_writer(path, list[i].name, pace, error);
        if (r == -ENOENT || (r == -EBUSY && i + 1 < count)) {
            r = 0;
        }
    }
    free(list);
    return r;
}

static int checksum(const char *path, const char *snapshot, struct pace *pace,
                    struct pcow_error *error)
{
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE, NULL, &image, error);

    if (r == -EBUSY) {
        return snapshot ? beside_writer(path, snapshot, pace, error)
                        : all_beside_writer(path, pace, error);
    }
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
            "Without SNAPSHOT: of all of them. What has a checksum keeps it. A VM may use the image "
            "meanwhile; then\n"
            "VM state gets none, and the snapshot cannot be deleted until this is done.\n",
    .run = run,
};
