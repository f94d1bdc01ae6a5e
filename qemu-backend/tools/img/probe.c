/* SPDX-License-Identifier: BSD-3-Clause */
#include <stdlib.h>

#include "command.h"
#include "json_output.h"
#include "options.h"
#include "report.h"

static int show(const char *path, enum pcow_persistence persistence, bool json)
{
    json_object *object;

    if (!json) {
        printf("persistence: %s\n", pcow_persistence_name(persistence));
        return EXIT_SUCCESS;
    }
    object = json_object_new_object();
    json_put_text(object, "filename", path);
    json_put_text(object, "persistence", pcow_persistence_name(persistence));
    return json_print(object);
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256 };
    static const struct option names[] = {
        HELP_OPTION, {"output", required_argument, NULL, OUTPUT}, END_OF_OPTIONS};
    enum pcow_persistence persistence;
    struct pcow_error error;
    bool json = false;
    int option;

    while ((option = next_option(argc, argv, ":h", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&probe_command, stdout);
        case OUTPUT:
            if (!parse_output(optarg, &json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (!check_operands(argc, argv, 1, 1, "DIRECTORY")) {
        return EXIT_FAILURE;
    }
    if (pcow_probe_persistence(argv[optind], &persistence, &error)) {
        return report_error(&error);
    }
    return show(argv[optind], persistence, json);
}

const struct command probe_command = {
    .name = "probe",
    .arguments = "[--output human|json] DIRECTORY",
    .summary = "Say what images in a directory survive: volatile, page-cache or pmem",
    .help = "  --output human|json        default: human\n"
            "volatile: a process that ends; page-cache: power loss, after a flush; pmem: power "
            "loss, at memory speed.\n",
    .run = run,
};
