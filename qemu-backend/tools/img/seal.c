/* SPDX-License-Identifier: BSD-3-Clause */
/* seal, unseal: a sealed image is a template, no writer may open it. */
#include <stdlib.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "report.h"

static int seal(const char *path, struct pcow_error *error)
{
    pcow_image *image;
    int r = pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, error);

    if (r) {
        return r;
    }
    r = pcow_seal(image, error);
    pcow_close(image);
    return r;
}

static int run(const struct command *command, int (*change)(const char *, struct pcow_error *),
               int argc, char **argv)
{
    static const struct option names[] = {HELP_OPTION, END_OF_OPTIONS};
    bool quiet = false;
    struct pcow_error error;
    const char *path;
    int option;

    while ((option = next_option(argc, argv, ":hq", names)) != -1) {
        switch (option) {
        case 'h': return command_help(command, stdout);
        case 'q': quiet = true; break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    if (change(path, &error)) {
        return report_error(&error);
    }
    if (!quiet) {
        printf("Image %sed.\n", command->name);
    }
    return EXIT_SUCCESS;
}

static int run_seal(int argc, char **argv)
{
    return run(&seal_command, seal, argc, argv);
}

static int run_unseal(int argc, char **argv)
{
    return run(&unseal_command, pcow_unseal, argc, argv);
}

const struct command seal_command = {
    .name = "seal",
    .arguments = "[-q] FILE",
    .summary = "Make an image a template that nobody can change",
    .help = "  -q                         print nothing on success\n",
    .run = run_seal,
};

const struct command unseal_command = {
    .name = "unseal",
    .arguments = "[-q] FILE",
    .summary = "Allow writers again; images that stand on it are invalid after a change",
    .help = "  -q                         print nothing on success\n",
    .run = run_unseal,
};
