/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "image.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "unfinished.h"

struct resize_request {
    const char *format;
    uint64_t size;
    char sign;                                 /* '+', '-' or 0: absolute */
    bool shrink, quiet;
};

static int new_size(const struct resize_request *request, const char *path, uint64_t old,
                    uint64_t *size, struct pcow_error *error)
{
    *size = request->size;
    if (request->sign == '-') {
        if (request->size >= old) {
            return fail(error, -EINVAL,
                        "%s: the new image size would be zero or less; the image has %" PRIu64
                        " bytes",
                        path, old);
        }
        *size = old - request->size;
    } else if (request->sign == '+') {
        *size = request->size > PCOW_MAX_VIRTUAL_SIZE ? request->size : old + request->size;
    }
    return round_virtual_size(size, request->quiet, error);
}

static int resize_image(const char *path, const struct resize_request *request,
                        struct pcow_error *error)
{
    uint64_t size;
    pcow_image *image;
    int r = img_open(path, request->format, PCOW_OPEN_WRITE, NULL, &image, error);

    if (r) {
        return r;
    }
    r = check_no_revert(image, error);
    r = r ? r : new_size(request, path, pcow_size(image), &size, error);
    if (!r && size < pcow_size(image) && !request->shrink) {
        report("warning: shrinking an image deletes all data beyond its new end; make sure that "
               "nothing important is there");
        r = fail(error, -EINVAL, "%s: use the --shrink option to perform a shrink operation", path);
    }
    if (!r) {
        r = pcow_resize(image, size, request->shrink, error);
    }
    return img_close(image, r, error);
}

static bool parse_new_size(const char *text, struct resize_request *request)
{
    if (*text == '+' || *text == '-') {
        request->sign = *text++;
    }
    return parse_size_option("image size", text, &request->size);
}

static int run(int argc, char **argv)
{
    enum { SHRINK = 256 };
    static const struct option names[] = {
        HELP_OPTION, {"shrink", no_argument, NULL, SHRINK}, END_OF_OPTIONS};
    struct resize_request request = {0};
    struct pcow_error error;
    const char *size = argv[argc - 1];
    int option;

    if (argc < 2 || !strcmp(size, "-h") || !strcmp(size, "--help")) {
        return argc < 2 ? (check_operands(argc, argv, 2, 2, "FILE SIZE"), EXIT_FAILURE)
                        : command_help(&resize_command, stdout);
    }
    /* the size comes last and is taken away first: "-1G" is not an option */
    while ((option = next_option(argc - 1, argv, ":hqf:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&resize_command, stdout);
        case 'q': request.quiet = true; break;
        case 'f': request.format = optarg; break;
        case SHRINK: request.shrink = true; break;
        default: return EXIT_FAILURE;
        }
    }
    if (!check_operands(argc, argv, 2, 2, "FILE SIZE")) {
        return EXIT_FAILURE;
    }
    if (!parse_new_size(size, &request)) {
        return EXIT_FAILURE;
    }
    if (resize_image(argv[optind], &request, &error)) {
        return report_error(&error);
    }
    if (!request.quiet) {
        puts("Image resized.");
    }
    return EXIT_SUCCESS;
}

const struct command resize_command = {
    .name = "resize",
    .arguments = "[-q] [-f pcow] [--shrink] FILE [+|-]SIZE",
    .summary = "Change the virtual size",
    .help = "  -q                         print nothing on success\n"
            "  -f pcow                    the format (there is no other)\n"
            "  --shrink                   allow a smaller size; what lies beyond it is lost\n"
            "  SIZE                       the new size, or with + or - the difference; rounded up "
            "to 2 MiB\n",
    .run = run,
};
