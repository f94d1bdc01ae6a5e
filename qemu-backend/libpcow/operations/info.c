/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>
#include <sys/stat.h>

#include "format1/format1.h"
#include "image/image.h"
#include "util/sized.h"

#ifndef PCOW_VERSION
#define PCOW_VERSION "unknown"
#endif

const char *pcow_version(void)
{
    return PCOW_VERSION;
}

const char *pcow_path(const pcow_image *image)
{
    return image->file.path;
}

int pcow_fd(const pcow_image *image)
{
    return image->file.fd;
}

uint64_t pcow_size(const pcow_image *image)
{
    return image->size;
}

pcow_image *pcow_base(pcow_image *image)
{
    return image->base;
}

static void count_slabs(const struct pcow_image *image, struct pcow_info *info)
{
    for (uint64_t p = 1; p < image_slab_count(image); p++) {
        const struct slab *slab = &image->slabs[p];

        if (slab->kind == OWNER_NONE
            || (slab->kind != OWNER_TABLE && !layer_find(image, slab->layer)))
            info->free_size += slab_is_group_head(p, image->file.heads) ? 0 : PCOW_SLAB_SIZE;
        else if (slab->kind == OWNER_DATA && slab->layer == image->view)
            info->data_size += page_set_count(&image->valid[p]) * PCOW_PAGE_SIZE;
    }
}

static void describe_base(const struct pcow_image *image, struct pcow_info *info)
{
    const struct base_record *record = image_base_record(image);
    const struct layer *layer;

    if (!record)
        return;
    info->has_base = true;
    info->base_format = record->format;
    memcpy(info->base_uuid, record->uuid, sizeof info->base_uuid);
    if (base_name_is_safe(record->name, sizeof record->name))
        strcpy(info->base_name, record->name);
    layer = record->layer && image->base && !image->base->format1
                ? layer_find(image->base, (uint32_t)record->layer)
                : NULL;
    if (layer)
        memcpy(info->base_snapshot, layer->name, sizeof info->base_snapshot);
}

static void get_info(const pcow_image *image, struct pcow_info *info)
{
    struct stat st;

    memset(info, 0, sizeof *info);
    info->virtual_size = image->size;
    info->file_size = image->file.size;
    if (fstat(image->file.fd, &st) == 0)
        info->allocated_size = (uint64_t)st.st_blocks * 512;
    info->persistence = image->file.persist.persistence;
    for (const struct pcow_image *i = image; i; i = i->base)
        info->chain_depth++;
    if (image->format1) {
        format1_get_info(image, info);
        return;
    }
    info->format = 2;
    memcpy(info->uuid, image->header.uuid, sizeof info->uuid);
    info->cluster_size = UINT64_C(1) << image->header.cluster_bits;
    info->generation = word_value(image->header.generation);
    info->incompatible_features = image->header.incompatible_features;
    info->mirror = image->file.heads > 1;
    info->read_only_compatible_features = image->header.read_only_compatible_features;
    info->compatible_features = image->header.compatible_features;
    info->active_layer = image_active(image);
    info->sealed = word_value(image->header.state) & HEADER_SEALED;
    info->checksums = word_value(image->header.state) & HEADER_CHECKSUMS;
    info->copy_on_read = image_copies_on_read(image);
    for (size_t i = 0; i < image->layer_count; i++)
        info->snapshots += image->layers[i].state == LAYER_SNAPSHOT;
    count_slabs(image, info);
    describe_base(image, info);
}

void pcow_get_info_sized(const pcow_image *image, struct pcow_info *given, size_t size)
{
    struct pcow_info info;

    get_info(image, &info);
    sized_give(given, size, &info, sizeof info);
}
