/* SPDX-License-Identifier: BSD-3-Clause */
/* checksum: of the data of snapshots, which is final. */
#include <errno.h>
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "report.h"
#include "sums.h"

/* VM or tool: somebody has the image open for writing. */
static int beside_writer(const char *path, const char *snapshot, struct sums *sums,
                         struct pcow_error *error)
{
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_NO_BASE, snapshot, &image, error);

    if (r) {
        return r;
    }
    sums->pace.begun = 0;
    progress_begin(&sums->pace.progress, sums->pace.progress.enabled);
    r = pcow_checksum_beside_writer(image, sums->flags, sums_finding, sums_progress, sums, error);
    progress_end(&sums->pace.progress, r == 0);
    pcow_close(image);
    return r;
}

/* One that is deleted, or not made yet, needs none. What is damaged holds up none of the others. */
static int all_beside_writer(const char *path, struct sums *sums, struct pcow_error *error)
{
    struct pcow_snapshot *list = NULL;
    size_t count = 0;
    struct pcow_error damage;
    bool damaged = false;
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_NO_BASE | PCOW_OPEN_FORCE_SHARE, NULL, &image, error);

    if (r) {
        return r;
    }
    r = pcow_snapshot_list(image, &list, &count, error);
    pcow_close(image);
    sums->flags |= PCOW_CHECKSUM_COMPARE_OWN;
    for (size_t i = 0; i < count && !r; i++) {
        r = beside_writer(path, list[i].name, sums, error);
        if (r == -EUCLEAN) {
            damage = damaged ? damage : *error;
            damaged = true;
            r = 0;
        }
        if (r == -ENOENT || (r == -EBUSY && i + 1 < count)) {
            r = 0;
        }
    }
    free(list);
    if (!r && damaged) {
        *error = damage;
        r = -EUCLEAN;
    }
    return r;
}

static int checksum(const char *path, const char *snapshot, struct sums *sums,
                    struct pcow_error *error)
{
    pcow_image *image;
    int r = img_open(path, NULL, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE, NULL, &image, error);

    if (r == -EBUSY) {
        return snapshot ? beside_writer(path, snapshot, sums, error)
                        : all_beside_writer(path, sums, error);
    }
    if (r) {
        return r;
    }
    progress_begin(&sums->pace.progress, sums->pace.progress.enabled);
    r = pcow_checksum(image, snapshot, sums->flags, sums_finding, sums_progress, sums, error);
    progress_end(&sums->pace.progress, r == 0);
    return img_close(image, r, error);
}

static int run(int argc, char **argv)
{
    enum { RATE = 256, ACCEPT_DAMAGE };
    static const struct option names[] = {HELP_OPTION,
                                          {"rate", required_argument, NULL, RATE},
                                          {"accept-damage", no_argument, NULL, ACCEPT_DAMAGE},
                                          END_OF_OPTIONS};
    bool show_progress = false;
    struct pcow_error error;
    struct sums sums = {0};
    int option, r;

    while ((option = next_option(argc, argv, ":hqp", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&checksum_command, stdout);
        case 'q': sums.quiet = true; break;
        case 'p': show_progress = true; break;
        case RATE:
            if (!parse_size_option("rate", optarg, &sums.pace.rate)) {
                return EXIT_FAILURE;
            }
            break;
        case ACCEPT_DAMAGE: sums.flags |= PCOW_CHECKSUM_ACCEPT_DAMAGE; break;
        default: return EXIT_FAILURE;
        }
    }
    if (optind >= argc || optind + 2 < argc) {
        report("checksum: expecting an image file name, and perhaps a snapshot; usage: pcow-img "
               "checksum %s",
               checksum_command.arguments);
        return EXIT_FAILURE;
    }
    sums.pace.progress.enabled = show_progress && !sums.quiet;
    r = checksum(argv[optind], argv[optind + 1], &sums, &error);
    if (r) {
        return sums_failed(r, &error);
    }
    if (!sums.quiet) {
        puts("Checksums made.");
    }
    return EXIT_SUCCESS;
}

const struct command checksum_command = {
    .name = "checksum",
    .arguments = "[-p] [-q] [--rate BYTES] [--accept-damage] FILE [SNAPSHOT]",
    .summary = "Make checksums of the data of snapshots, for 'check --data'",
    .help = "  --rate BYTES               look at no more a second\n"
            "  --accept-damage            make them also of what is known to be damaged, as it is\n"
            "  -p                         show progress\n"
            "  -q                         print nothing on success\n"
            "Exit code: 0 all made, 1 not done, 2 some of it is damaged, and got none.\n"
            "Without SNAPSHOT: of all of them. What has a checksum keeps it, and is compared. A VM "
            "may use the image meanwhile; then\n"
            "VM state gets none, and the snapshot cannot be deleted until this is done.\n",
    .run = run,
};
