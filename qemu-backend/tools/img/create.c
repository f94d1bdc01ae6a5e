/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "format/format.h"
#include "image.h"
#include "options.h"
#include "report.h"
#include "size.h"

struct create_request {
    struct pcow_create_options options;
    const char *format, *base, *base_format;
    bool quiet;
};

static int apply_options(char *list, struct create_request *request, struct pcow_error *error)
{
    char *key, *value;
    int more;

    while ((more = next_key_value(&list, &key, &value, error)) > 0) {
        if (!strcmp(key, "cluster_size") || !strcmp(key, "size")) {
            uint64_t *size =
                key[0] == 's' ? &request->options.virtual_size : &request->options.cluster_size;

            if (parse_size_of(key, value, size, error)) {
                return -EINVAL;
            }
        } else if (!strcmp(key, "base_snapshot")) {
            request->options.base_snapshot = value;
        } else if (!strcmp(key, "copy_on_read")) {
            if (!parse_switch(key, value, &request->options.copy_on_read, error)) {
                return -EINVAL;
            }
        } else if (!strcmp(key, "mirror")) {
            bool mirror;

            if (!parse_switch(key, value, &mirror, error)) {
                return -EINVAL;
            }
            request->options.no_mirror = !mirror;
        } else if (!strcmp(key, "backing_file")) {
            request->base = value;
        } else if (!strcmp(key, "backing_fmt")) {
            request->base_format = value;
        } else {
            return fail(
                error, -EINVAL,
                "create option '%s' is not known; there are size, cluster_size, base_snapshot, "
                "copy_on_read, mirror, backing_file and backing_fmt",
                key);
        }
    }
    return more;
}

/* What was made, in the words of qemu-img. */
static void announce(const char *path, const struct create_request *request)
{
    const struct pcow_create_options *options = &request->options;
    struct pcow_info info = {.virtual_size = options->virtual_size};
    pcow_image *image;

    if (!pcow_open(path, PCOW_OPEN_NO_BASE, NULL, &image, NULL)) {
        pcow_get_info(image, &info);
        pcow_close(image);
    }
    fputs("Formatting '", stdout);
    print_text(path);
    printf("', fmt=pcow cluster_size=%" PRIu64 " size=%" PRIu64, info.cluster_size,
           info.virtual_size);
    if (request->base) {
        fputs(" backing_file=", stdout);
        print_text(request->base);
        printf(" backing_fmt=%s", request->base_format ? request->base_format : "pcow");
        if (options->base_snapshot) {
            fputs(" base_snapshot=", stdout);
            print_text(options->base_snapshot);
        }
    }
    putchar('\n');
}

static int create_image(const char *path, struct create_request *request, struct pcow_error *error)
{
    struct pcow_create_options *options = &request->options;
    char base[PATH_MAX];
    int r;

    if (request->format && strcmp(request->format, "pcow")) {
        return fail(
            error, -EINVAL,
            "format '%s' cannot be created here; pcow-img creates pcow, qemu-img the others",
            request->format);
    }
    if (!request->format && !is_called_pcow(path)) {
        return fail(error, -EINVAL,
                    "%s: QEMU takes no file for a pcow image that is not called *.pcow: name it "
                    "so, or say -f pcow; qemu-img creates other formats",
                    path);
    }
    r = check_base_format(request->base_format, error);
    if (r) {
        return r;
    }
    if (request->base) {
        r = base_path(path, request->base, base, error);
        if (r) {
            return r;
        }
        options->base = base;
    } else if (options->base_snapshot || options->base_unchecked || request->base_format) {
        return fail(error, -EINVAL, "%s: -F, -u and base_snapshot need a base: give one with -b",
                    path);
    }
    if (options->virtual_size) {
        r = round_virtual_size(&options->virtual_size, request->quiet, error);
        if (r) {
            return r;
        }
    } else if (!request->base || options->base_unchecked) {
        return fail(error, -EINVAL, "%s: image creation needs a size: pcow-img create FILE SIZE",
                    path);
    }
    return pcow_create(path, options, error);
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {HELP_OPTION, END_OF_OPTIONS};
    struct create_request request = {0};
    struct pcow_error error;
    int option;

    while ((option = next_option(argc, argv, ":hqf:b:F:uo:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&create_command, stdout);
        case 'q': request.quiet = true; break;
        case 'f': request.format = optarg; break;
        case 'b': request.base = optarg; break;
        case 'F': request.base_format = optarg; break;
        case 'u': request.options.base_unchecked = true; break;
        case 'o':
            if (apply_options(optarg, &request, &error)) {
                return report_error(&error);
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (!check_operands(argc, argv, 1, 2, "FILE SIZE")) {
        return EXIT_FAILURE;
    }
    if (argc - optind == 2) {
        if (!parse_size_option("image size", argv[optind + 1], &request.options.virtual_size)) {
            return EXIT_FAILURE;
        }
        if (request.options.virtual_size == 0) {
            report("image size 0 is out of range: the smallest image has 2M");
            return EXIT_FAILURE;
        }
    }
    if (create_image(argv[optind], &request, &error)) {
        return report_error(&error);
    }
    if (!request.quiet) {
        announce(argv[optind], &request);
    }
    return EXIT_SUCCESS;
}

const struct command create_command = {
    .name = "create",
    .arguments = "[-q] [-f pcow] [-b BASE [-F FMT]] [-u] [-o OPTIONS] FILE [SIZE]",
    .summary = "Make a new image, empty or on a base",
    .help = "  -q                         print nothing on success\n"
            "  -f pcow                    the format (there is no other); needed if FILE is not "
            "called *.pcow\n"
            "  -b BASE                    stand on this image, in the directory of FILE\n"
            "  -F FMT                     format of BASE: pcow (default) or pcow1\n"
            "  -u                         do not look at BASE; needs SIZE\n"
            "  -o cluster_size=SIZE       unit of allocation, 4k to 2M, default 64k\n"
            "  -o base_snapshot=NAME      stand on this snapshot of BASE\n"
            "  -o copy_on_read=on|off     have data that a VM reads from older layers copied into "
            "the newest one\n"
            "  -o mirror=on|off           keep a second copy of the metadata, with checksums "
            "(default: on)\n"
            "  SIZE                       default: that of BASE; rounded up to 2 MiB\n",
    .run = run,
};
