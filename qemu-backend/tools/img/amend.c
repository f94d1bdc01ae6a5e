/* SPDX-License-Identifier: BSD-3-Clause */
/* amend: change what an image was created with, as far as that is possible. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "image.h"
#include "losses.h"
#include "options.h"
#include "report.h"

struct amend_request {
    const char *format;
    bool quiet, mirror, copy_on_read, copy_on_read_given;
};

static int apply_options(char *list, struct amend_request *request, struct pcow_error *error)
{
    char *key, *value;
    int more;

    while ((more = next_key_value(&list, &key, &value, error)) > 0) {
        if (strcmp(key, "copy_on_read") == 0) {
            if (!parse_switch(key, value, &request->copy_on_read, error)) {
                return -EINVAL;
            }
            request->copy_on_read_given = true;
        } else if (strcmp(key, "mirror") == 0) {
            if (!parse_switch(key, value, &request->mirror, error)) {
                return -EINVAL;
            }
            if (!request->mirror) {
                return fail(error, -EINVAL, "the mirror of the metadata cannot be taken off");
            }
        } else {
            return fail(error, -EINVAL,
                        "amend option '%s' is not known; there are copy_on_read and mirror", key);
        }
    }
    return more;
}

/* What a mirror is made of counts as whole from then on. */
static int add_mirror(const char *path, struct pcow_error *error)
{
    struct pcow_check_result result;
    int r = pcow_check_losses(path, 0, NULL, NULL, NULL, &result, error);

    if (!r && result.corruptions) {
        r = fail(error, -EBADMSG,
                 "%s is damaged, and with a mirror it would count as whole: see pcow-img check, "
                 "and repair it before",
                 path);
    }
    r = r ? r : losses_judge(path, &result, error);
    return r ? r : pcow_add_mirror(path, error);
}

static int amend(const char *path, const struct amend_request *request, struct pcow_error *error)
{
    pcow_image *image;
    int r = request->mirror ? add_mirror(path, error) : 0;

    if (r || !request->copy_on_read_given) {
        return r;
    }
    r = img_open(path, request->format, PCOW_OPEN_WRITE, NULL, &image, error);
    if (r) {
        return r;
    }
    r = pcow_set_copy_on_read(image, request->copy_on_read, error);
    return img_close(image, r, error);
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {HELP_OPTION, END_OF_OPTIONS};
    struct amend_request request = {0};
    struct pcow_error error;
    const char *path;
    int option;

    while ((option = next_option(argc, argv, ":hqf:o:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&amend_command, stdout);
        case 'q': request.quiet = true; break;
        case 'f': request.format = optarg; break;
        case 'o':
            if (apply_options(optarg, &request, &error)) {
                return report_error(&error);
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(&amend_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    if (!request.mirror && !request.copy_on_read_given) {
        report("amend: expecting -o copy_on_read=on, -o copy_on_read=off or -o mirror=on");
        return EXIT_FAILURE;
    }
    return amend(path, &request, &error) ? report_error(&error) : EXIT_SUCCESS;
}

const struct command amend_command = {
    .name = "amend",
    .arguments = "[-q] [-f pcow] -o OPTIONS FILE",
    .summary = "Change an option that an image was created with",
    .help =
        "  -o mirror=on               give an image of an older version the second copy of its "
        "metadata, with checksums;\n"
        "                             what is interrupted is finished by running it again\n"
        "  -o copy_on_read=on|off     have data that a VM reads from older layers copied into the "
        "newest one\n"
        "  -q                         accepted for qemu-img's sake; success prints nothing anyway\n"
        "  -f pcow                    the format (there is no other)\n",
    .run = run,
};
