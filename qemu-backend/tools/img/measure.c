/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "format/source.h"
#include "image.h"
#include "json_output.h"
#include "options.h"
#include "report.h"
#include "size.h"

/* Of the file format, doc/source/reference/format.rst. */
#define SLABS_IN_GROUP 16384
#define HEADS_OF_GROUP 3                       /* the first ones: metadata, its mirror, checksums */
#define DATA_IN_GROUP (SLABS_IN_GROUP - HEADS_OF_GROUP)
#define TABLE_ENTRY_SIZE 8
#define PAGE_BITMAP_SIZE 64
#define FIXED_METADATA (4 * PCOW_PAGE_SIZE)    /* header, its copy, locks, first layer records */

struct measure_request {
    const char *path, *format, *output_format, *snapshot;
    char *option_list;
    uint64_t size, cluster_size;
    bool json, force_share, has_size;
};

struct need {
    uint64_t slabs;                            /* 2 MiB slabs with data */
    uint64_t clusters;                         /* clusters with data */
};

static uint64_t divide_up(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

/* Blocks of the file for the tables of so many data slabs, in whole pages, and their mirror. */
static uint64_t metadata_size(uint64_t slabs)
{
    uint64_t full = slabs / DATA_IN_GROUP, rest = slabs % DATA_IN_GROUP;
    uint64_t size = FIXED_METADATA + full * SLABS_IN_GROUP * (TABLE_ENTRY_SIZE + PAGE_BITMAP_SIZE);

    if (rest || !full) {
        size += round_up((rest + HEADS_OF_GROUP) * TABLE_ENTRY_SIZE, PCOW_PAGE_SIZE)
                + round_up((rest + HEADS_OF_GROUP) * PAGE_BITMAP_SIZE, PCOW_PAGE_SIZE);
    }
    /* And a page of checksums of it in each group. */
    return 2 * size + (full + 1) * PCOW_PAGE_SIZE;
}

/* Length of the file when every slab is in use. */
static uint64_t full_size(uint64_t virtual_size)
{
    uint64_t slabs = divide_up(virtual_size, PCOW_SLAB_SIZE);

    return (slabs + HEADS_OF_GROUP * divide_up(slabs ? slabs : 1, DATA_IN_GROUP)) * PCOW_SLAB_SIZE;
}

/* Count units of so many bytes that the range touches, after those up to *counted. */
static uint64_t count_units(uint64_t start, uint64_t end, uint64_t unit, uint64_t *counted)
{
    uint64_t first = start / unit, last = divide_up(end, unit);

    if (first < *counted) {
        first = *counted;
    }
    if (last <= first) {
        return 0;
    }
    *counted = last;
    return last - first;
}

static int survey(struct source *source, uint64_t cluster_size, struct need *need,
                  struct pcow_error *error)
{
    uint64_t offset = 0, counted_slabs = 0, counted_clusters = 0;
    struct source_extent extent;

    while (offset < source->size) {
        int r = source_get_extent(source, offset, source->size - offset, &extent, error);

        if (r) {
            return r;
        }
        if (!extent.zero) {
            need->slabs +=
                count_units(offset, offset + extent.length, PCOW_SLAB_SIZE, &counted_slabs);
            need->clusters +=
                count_units(offset, offset + extent.length, cluster_size, &counted_clusters);
        }
        offset += extent.length;
    }
    return 0;
}

static int apply_options(struct measure_request *request, struct pcow_error *error)
{
    char *list = request->option_list, *key, *value;
    int more;

    request->cluster_size = PCOW_DEFAULT_CLUSTER_SIZE;
    while ((more = next_key_value(&list, &key, &value, error)) > 0) {
        if (strcmp(key, "cluster_size")) {
            return fail(error, -EINVAL, "measure option '%s' is not known; there is cluster_size",
                        key);
        }
        if (parse_size_of(key, value, &request->cluster_size, error)) {
            return -EINVAL;
        }
        if (request->cluster_size < PCOW_MIN_CLUSTER_SIZE
            || request->cluster_size > PCOW_MAX_CLUSTER_SIZE
            || (request->cluster_size & (request->cluster_size - 1))) {
            return fail(error, -EINVAL, "cluster_size '%s' is not a power of two from 4k to 2M",
                        value);
        }
    }
    return more;
}

static int measure(struct measure_request *request, struct need *need, struct pcow_error *error)
{
    struct source_options options = {
        .path = request->path, .snapshot = request->snapshot, .force_share = request->force_share,
    };
    struct source *source;
    int r = apply_options(request, error);

    if (!r && request->output_format && strcmp(request->output_format, "pcow")) {
        r = fail(error, -EINVAL,
                 "-O %s cannot be measured here; pcow-img measures pcow, qemu-img the others",
                 request->output_format);
    }
    if (r || request->has_size) {
        return r ? r : round_virtual_size(&request->size, true, error);
    }
    r = format_of_file(options.path, request->format, "-f", &options.format, error);
    if (!r) {
        r = source_open(&options, &source, error);
    }
    if (r) {
        return r;
    }
    request->size = source->size;
    r = round_virtual_size(&request->size, true, error);
    if (!r) {
        r = survey(source, request->cluster_size, need, error);
    }
    source_close(source);
    return r;
}

static int show(const struct measure_request *request, const struct need *need)
{
    uint64_t required = metadata_size(need->slabs) + need->clusters * request->cluster_size;
    uint64_t full = full_size(request->size);
    json_object *object;

    if (!request->json) {
        printf("required size: %" PRIu64 "\nfully allocated size: %" PRIu64 "\n", required, full);
        return EXIT_SUCCESS;
    }
    object = json_object_new_object();
    json_put_size(object, "required", required);
    json_put_size(object, "fully-allocated", full);
    return json_print(object);
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256, SIZE };
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"size", required_argument, NULL, SIZE},
        {"force-share", no_argument, NULL, 'U'},
        END_OF_OPTIONS,
    };
    struct measure_request request = {0};
    struct need need = {0};
    struct pcow_error error;
    int option;

    while ((option = next_option(argc, argv, ":hUf:O:l:o:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&measure_command, stdout);
        case 'U': request.force_share = true; break;
        case 'f': request.format = optarg; break;
        case 'O': request.output_format = optarg; break;
        case 'l': request.snapshot = optarg; break;
        case 'o': request.option_list = optarg; break;
        case SIZE:
            request.has_size = true;
            if (!parse_size_option("image size", optarg, &request.size)) {
                return EXIT_FAILURE;
            }
            break;
        case OUTPUT:
            if (!parse_output(optarg, &request.json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    if (argc - optind != (request.has_size ? 0 : 1)) {
        report("measure: expecting either an image file name or --size SIZE");
        return EXIT_FAILURE;
    }
    request.path = argv[optind];
    return measure(&request, &need, &error) ? report_error(&error) : show(&request, &need);
}

const struct command measure_command = {
    .name = "measure",
    .arguments = "[-U] [-f FMT] [-O pcow] [-l SNAPSHOT] [-o cluster_size=SIZE] [--output "
                 "human|json] FILE | --size SIZE",
    .summary = "Say how much of a pool an image would take",
    .help = "  -f FMT                     format of FILE: raw, qcow2, pcow, pcow1; may be left out "
            "for *.pcow\n"
            "  -O pcow                    the format to measure for (there is no other)\n"
            "  -l SNAPSHOT                measure a snapshot of FILE\n"
            "  -o cluster_size=SIZE       of the new image, default 64k\n"
            "  --size SIZE                measure an empty image of this size\n"
            "  -U, --force-share          take no lock: also while FILE is in use\n"
            "  --output human|json        default: human\n"
            "required: what the file system gives up for it; fully allocated: when the guest has "
            "written everything.\n",
    .run = run,
};
