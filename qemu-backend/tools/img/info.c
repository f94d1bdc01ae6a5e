/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "image.h"
#include "json_output.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "snapshot_list.h"
#include "uuid.h"

static const char *format_name(unsigned format)
{
    return format == 1 ? "pcow1" : "pcow";
}

static const struct {
    enum pcow_survives bit;
    const char *name;
} failures[] = {
    {PCOW_SURVIVES_PROCESS, "process-crash"},
    {PCOW_SURVIVES_HOST, "host-crash"},
    {PCOW_SURVIVES_POWER, "power-loss"},
};

static void put_survives(json_object *object, const char *key, unsigned survives)
{
    json_object *array = json_object_new_array();

    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        if (survives & failures[i].bit) {
            json_object_array_add(array, json_object_new_string(failures[i].name));
        }
    }
    json_object_object_add(object, key, array);
}

static void print_survives(const char *what, unsigned survives)
{
    const char *separator = " ";

    printf("    %s:", what);
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        if (survives & failures[i].bit) {
            printf("%s%s", separator, failures[i].name);
            separator = ", ";
        }
    }
    putchar('\n');
}

/*
 * What a guest flushes on an nvdimm leaves the CPU's caches, and no more: the host hears nothing of
 * it.
 */
static unsigned nvdimm_survives(const struct pcow_info *info)
{
    return pcow_persistence_survives(info->persistence, info->persistence == PCOW_PERSISTENCE_PMEM);
}

static void put_format_specific(json_object *object, const struct pcow_info *info)
{
    json_object *specific = json_object_new_object(), *data = json_object_new_object();
    char uuid[UUID_TEXT_LENGTH];

    json_object_object_add(object, "format-specific", specific);
    json_put_text(specific, "type", "pcow");
    json_object_object_add(specific, "data", data);
    json_put_size(data, "format", info->format);
    json_put_text(data, "uuid", format_uuid(info->uuid, uuid));
    json_put_size(data, "generation", info->generation);
    json_put_bool(data, "sealed", info->sealed);
    json_put_bool(data, "mirror", info->mirror);
    json_put_bool(data, "checksums", info->checksums);
    json_put_bool(data, "copy-on-read", info->copy_on_read);
    json_put_size(data, "data-size", info->data_size);
    json_put_size(data, "free-size", info->free_size);
    json_put_size(data, "file-size", info->file_size);
    json_put_size(data, "chain-depth", info->chain_depth);
    json_put_text(data, "persistence", pcow_persistence_name(info->persistence));
    put_survives(data, "stored-survives", pcow_persistence_survives(info->persistence, false));
    put_survives(data, "flushed-survives", pcow_persistence_survives(info->persistence, true));
    put_survives(data, "nvdimm-flushed-survives", nvdimm_survives(info));
    if (info->has_base) {
        json_put_text(data, "base-uuid", format_uuid(info->base_uuid, uuid));
        json_put_size(data, "base-format", info->base_format);
        if (info->base_snapshot[0]) {
            json_put_text(data, "base-snapshot", info->base_snapshot);
        }
    }
}

static int info_json(pcow_image *image, json_object **object, struct pcow_error *error)
{
    char full_base[PATH_MAX];
    struct pcow_info info;
    json_object *snapshots;
    int r;

    pcow_get_info(image, &info);
    r = snapshot_list_json(image, &snapshots, error);
    if (r) {
        return r;
    }
    *object = json_object_new_object();
    json_put_text(*object, "filename", pcow_path(image));
    json_put_text(*object, "format", format_name(info.format));
    json_put_size(*object, "virtual-size", info.virtual_size);
    json_put_size(*object, "actual-size", info.allocated_size);
    json_put_size(*object, "cluster-size", info.cluster_size);
    if (info.has_base) {
        json_put_text(*object, "backing-filename", info.base_name);
        json_put_text(*object, "backing-filename-format", format_name(info.base_format));
        if (!sibling_path(pcow_path(image), info.base_name, full_base, NULL)) {
            json_put_text(*object, "full-backing-filename", full_base);
        }
    }
    json_object_object_add(*object, "snapshots", snapshots);
    put_format_specific(*object, &info);
    return 0;
}

static void print_size(const char *name, uint64_t size)
{
    char text[SIZE_TEXT_LENGTH];

    printf("%s: %s (%" PRIu64 " bytes)\n", name, format_size(size, text), size);
}

static void print_base(pcow_image *image, const struct pcow_info *info)
{
    char full_base[PATH_MAX];

    fputs("backing file: ", stdout);
    print_text(info->base_name);
    if (strchr(pcow_path(image), '/')
        && !sibling_path(pcow_path(image), info->base_name, full_base, NULL)) {
        fputs(" (actual path: ", stdout);
        print_text(full_base);
        putchar(')');
    }
    printf("\nbacking file format: %s\n", format_name(info->base_format));
    if (info->base_snapshot[0]) {
        fputs("backing file snapshot: ", stdout);
        print_text(info->base_snapshot);
        putchar('\n');
    }
}

static int print_info(pcow_image *image, struct pcow_error *error)
{
    struct pcow_info info;
    char text[SIZE_TEXT_LENGTH], uuid[UUID_TEXT_LENGTH];

    pcow_get_info(image, &info);
    fputs("image: ", stdout);
    print_text(pcow_path(image));
    printf("\nfile format: %s\n", format_name(info.format));
    print_size("virtual size", info.virtual_size);
    printf("disk size: %s\ncluster_size: %" PRIu64 "\n", format_size(info.allocated_size, text),
           info.cluster_size);
    if (info.has_base) {
        print_base(image, &info);
    }
    if (info.snapshots) {
        int r = snapshot_list_print(image, error);

        if (r) {
            return r;
        }
    }
    puts("Format specific information:");
    printf("    format: %u\n", info.format);
    if (info.format > 1) {
        printf("    uuid: %s\n", format_uuid(info.uuid, uuid));
        printf("    generation: %" PRIu64 "\n    sealed: %s\n", info.generation,
               !info.sealed ? "false" : info.checksums ? "true, with checksums" : "true");
        printf("    mirror of the metadata: %s\n", info.mirror ? "true" : "false");
    }
    if (info.copy_on_read) {
        puts("    copy on read: true");
    }
    print_size("    data size", info.data_size);
    print_size("    free size", info.free_size);
    print_size("    file size", info.file_size);
    printf("    chain depth: %u\n    persistence: %s\n", info.chain_depth,
           pcow_persistence_name(info.persistence));
    print_survives("stored data survives", pcow_persistence_survives(info.persistence, false));
    if (nvdimm_survives(&info) == pcow_persistence_survives(info.persistence, true)) {
        print_survives("flushed data survives", nvdimm_survives(&info));
    } else {
        print_survives("flushed data survives, nvdimm", nvdimm_survives(&info));
        print_survives("flushed data survives, virtio-pmem",
                       pcow_persistence_survives(info.persistence, true));
    }
    return 0;
}

/* Every image of the chain, top first, or only the top. */
static int show(pcow_image *image, bool chain, bool json, struct pcow_error *error)
{
    json_object *array = json_object_new_array(), *object = NULL;
    int r = 0;

    for (pcow_image *i = image; i && !r; i = chain ? pcow_base(i) : NULL) {
        if (!json) {
            if (i != image) {
                putchar('\n');
            }
            r = print_info(i, error);
            continue;
        }
        r = info_json(i, &object, error);
        if (!r) {
            json_object_array_add(array, object);
        }
    }
    if (r || !json) {
        json_object_put(array);
        return r;
    }
    if (!chain) {
        json_object_get(object);
        json_object_put(array);
        array = object;
    }
    return json_print(array) ? fail(error, -EIO, "could not write the output") : 0;
}

/*
 * Without --backing-chain a base that is missing, changed or busy is no reason to say nothing about
 * the image.
 */
static int open_for_info(const char *path, const char *format, bool chain, bool force_share,
                         pcow_image **image, struct pcow_error *error)
{
    unsigned flags = force_share ? PCOW_OPEN_FORCE_SHARE : 0;
    struct pcow_error problem;
    int r = img_open(path, format, flags, NULL, image, error);

    if (!r || chain || img_open(path, format, flags | PCOW_OPEN_NO_BASE, NULL, image, &problem)) {
        return r;
    }
    report("warning: %s", error->message);
    return 0;
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256, BACKING_CHAIN };
    static const struct option names[] = {
        HELP_OPTION,
        {"output", required_argument, NULL, OUTPUT},
        {"backing-chain", no_argument, NULL, BACKING_CHAIN},
        {"force-share", no_argument, NULL, 'U'},
        END_OF_OPTIONS,
    };
    bool json = false, chain = false, force_share = false;
    const char *path, *format = NULL;
    struct pcow_error error;
    pcow_image *image;
    int option, r;

    while ((option = next_option(argc, argv, ":hUf:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&info_command, stdout);
        case 'U': force_share = true; break;
        case 'f': format = optarg; break;
        case BACKING_CHAIN: chain = true; break;
        case OUTPUT:
            if (!parse_output(optarg, &json)) {
                return EXIT_FAILURE;
            }
            break;
        default: return EXIT_FAILURE;
        }
    }
    path = only_operand(&info_command, argc, argv);
    if (!path) {
        return EXIT_FAILURE;
    }
    if (open_for_info(path, format, chain, force_share, &image, &error)) {
        return report_error(&error);
    }
    r = show(image, chain, json, &error);
    pcow_close(image);
    return r ? report_error(&error) : EXIT_SUCCESS;
}

const struct command info_command = {
    .name = "info",
    .arguments = "[-U] [-f FMT] [--output human|json] [--backing-chain] FILE",
    .summary = "Show what an image is, its sizes and its snapshots",
    .help = "  -f FMT                     pcow (default) or pcow1\n"
            "  -U, --force-share          take no lock: also while the image is in use\n"
            "  --backing-chain            also its bases\n"
            "  --output human|json        default: human\n",
    .run = run,
};
