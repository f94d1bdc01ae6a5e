/* SPDX-License-Identifier: BSD-3-Clause */
/* seal, unseal: a sealed image is a template, no writer may open it. */
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "report.h"
#include "sums.h"

struct seal_request {
    bool checksums;
    struct sums sums;
};

static int seal(const char *path, struct seal_request *request, struct pcow_error *error)
{
    pcow_image *image;
    int r = pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, error);

    if (r) {
        return r;
    }
    if (request->checksums) {
        progress_begin(&request->sums.pace.progress,
                       request->sums.pace.progress.enabled && !request->sums.quiet);
        r = pcow_checksum(image, NULL, request->sums.flags, sums_finding, sums_progress,
                          &request->sums, error);
        progress_end(&request->sums.pace.progress, r == 0);
    }
    r = r ? r : pcow_seal(image, error);
    return img_close(image, r, error);
}

static int run_seal(int argc, char **argv)
{
    enum { CHECKSUMS = 256, NO_CHECKSUMS, RATE, ACCEPT_DAMAGE };
    static const struct option names[] = {
        HELP_OPTION,
        {"checksums", no_argument, NULL, CHECKSUMS},
        {"no-checksums", no_argument, NULL, NO_CHECKSUMS},
        {"rate", required_argument, NULL, RATE},
        {"accept-damage", no_argument, NULL, ACCEPT_DAMAGE},
        END_OF_OPTIONS,
    };
    struct seal_request request = {.sums.flags = PCOW_CHECKSUM_ACTIVE};
    struct pcow_error error;
    const char *path;
    int option, r;

    while ((option = next_option(argc, argv, ":hqp", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&seal_command, stdout);
        case 'q': request.sums.quiet = true; break;
        case 'p': request.sums.pace.progress.enabled = true; break;
        case CHECKSUMS: request.checksums = true; break;
        case NO_CHECKSUMS: request.checksums = false; break;
        case RATE:
            if (!parse_size_option("rate", optarg, &request.sums.pace.rate)) {
                return EXIT_FAILURE;
            }
            break;
        case ACCEPT_DAMAGE: request.sums.flags |= PCOW_CHECKSUM_ACCEPT_DAMAGE; break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(&seal_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    r = seal(path, &request, &error);
    if (r) {
        return sums_failed(r, &error);
    }
    if (!request.sums.quiet) {
        puts(request.checksums ? "Image sealed, with checksums." : "Image sealed.");
    }
    return EXIT_SUCCESS;
}

static int run_unseal(int argc, char **argv)
{
    static const struct option names[] = {HELP_OPTION, END_OF_OPTIONS};
    bool quiet = false;
    struct pcow_error error;
    const char *path;
    int option;

    while ((option = next_option(argc, argv, ":hq", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&unseal_command, stdout);
        case 'q': quiet = true; break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(&unseal_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    if (pcow_unseal(path, &error)) {
        return report_error(&error);
    }
    if (!quiet) {
        puts("Image unsealed.");
    }
    return EXIT_SUCCESS;
}

const struct command seal_command = {
    .name = "seal",
    .arguments = "[-p] [-q] [--checksums [--rate BYTES] [--accept-damage] | --no-checksums] FILE",
    .summary = "Make an image a template that nobody can change",
    .help = "  --checksums                make checksums of all its data before, for "
            "'check --data'\n"
            "  --no-checksums             make none (default)\n"
            "  --rate BYTES               look at no more a second\n"
            "  --accept-damage            make them also of what is known to be damaged, as it is\n"
            "  -p                         show progress\n"
            "  -q                         print nothing on success\n"
            "Exit code: 0 sealed, 1 not done, 2 not sealed, as some of it is damaged.\n",
    .run = run_seal,
};

const struct command unseal_command = {
    .name = "unseal",
    .arguments = "[-q] FILE",
    .summary = "Allow writers again; images that stand on it are invalid after a change",
    .help = "  -q                         print nothing on success\n",
    .run = run_unseal,
};
