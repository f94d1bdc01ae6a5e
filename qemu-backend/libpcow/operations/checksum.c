/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/datasum.h"
#include "operations/operations.h"
#include "util/error.h"

/* That are published together, after one sync; their checksums fill a page. */
#define BATCH (PCOW_PAGE_SIZE / sizeof(struct datasum))

struct summing {
    struct pcow_image *image;
    bool *wanted;                      /* of each layer, in their order; NULL: all */
    bool with_active;
    void *buffer;
    struct datasum_subject batch[BATCH];
    unsigned count;
};

static bool is_wanted(const struct summing *making, uint64_t slab)
{
    const struct pcow_image *image = making->image;
    struct slab owner = slab_peek(image, slab);
    const struct layer *layer =
        owner.kind == OWNER_DATA || owner.kind == OWNER_STATE ? layer_find(image, owner.layer)
                                                              : NULL;

    if (!layer || (making->wanted && !making->wanted[layer - image->layers]))
        return false;
    return making->with_active || layer->id != image_active(image);
}

/* A damaged one is made anew. */
static int has_one(const struct summing *making, uint64_t slab, bool *has)
{
    const struct file *file = &making->image->file;
    struct datasum datasum;
    int ret = 0;

    *has = false;
    if (datasum_may_be(file, slab))
        ret = file_read(file, datasum_offset(slab), &datasum, sizeof datasum);
    if (!ret && datasum_may_be(file, slab))
        *has = datasum_is_good(file, slab, &datasum);
    return ret;
}

static int hash_slab(struct summing *making, uint64_t slab)
{
    struct pcow_image *image = making->image;
    struct slab owner = slab_peek(image, slab);
    struct datasum_subject *subject = &making->batch[making->count];
    uint64_t hash[2];
    int ret;

    *subject = (struct datasum_subject){
        .slab = slab,
        .owner = {(enum owner_kind)owner.kind, owner.layer, owner.number},
        .valid = image->valid[slab],
    };
    ret = datasum_hash(&image->file, subject, making->buffer, hash);
    if (!ret)
        ret = datasum_store_hash(&image->file, subject, hash);
    if (!ret)
        making->count++;
    /* Whoever stores to it later asks for blocks again, and drops it. */
    slab_forget_backed(image, slab);
    return ret;
}

static int publish_batch(struct summing *making)
{
    struct file *file = &making->image->file;
    int ret = making->count ? file_sync(file) : 0;

    for (unsigned i = 0; i < making->count && !ret; i++)
        ret = datasum_publish(file, &making->batch[i]);
    making->count = 0;
    return ret;
}

static int make(struct summing *making, pcow_progress_fn progress, void *opaque,
                struct pcow_error *error)
{
    struct pcow_image *image = making->image;
    uint64_t total = 0, done = 0;
    int ret = 0, published;

    for (uint64_t p = 1; p < image_slab_count(image); p++)
        total += is_wanted(making, p);
    for (uint64_t p = 1; p < image_slab_count(image) && !ret; p++) {
        bool has;

        if (!is_wanted(making, p))
            continue;
        ret = has_one(making, p, &has);
        if (!ret && !has)
            ret = hash_slab(making, p);
        if (!ret && making->count == BATCH)
            ret = publish_batch(making);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot make the checksum of file slab %llu",
                                   image->file.path, (unsigned long long)p);
        if (progress && progress(opaque, ++done * PCOW_SLAB_SIZE, total * PCOW_SLAB_SIZE))
            ret = error_set(error, -ECANCELED, "%s: cancelled", image->file.path);
    }
    published = publish_batch(making);
    if (!published)
        published = file_sync(&image->file);
    return published && !ret ? error_set_errno(error, published, "%s: cannot store checksums",
                                               image->file.path)
                             : ret;
}

/* A snapshot and what is below it. */
static int want(struct summing *making, const char *snapshot, struct pcow_error *error)
{
    struct pcow_image *image = making->image;
    const struct layer *layer = layer_find_name(image, snapshot);

    if (!layer)
        return error_set(error, -ENOENT, "%s has no snapshot '%s'; pcow-img snapshot -l lists them",
                         image->file.path, snapshot);
    making->wanted = calloc(image->layer_count, sizeof *making->wanted);
    if (!making->wanted)
        return error_set(error, -ENOMEM, "out of memory");
    for (; layer; layer = layer->parent ? layer_find(image, layer->parent) : NULL)
        making->wanted[layer - image->layers] = true;
    return 0;
}

int pcow_checksum(pcow_image *image, const char *snapshot, bool with_active,
                  pcow_progress_fn progress, void *opaque, struct pcow_error *error)
{
    struct summing *making;
    int ret = image_check_writable(image, error);

    if (!ret && image->map)
        ret = error_set(error, -EBUSY, "%s is mapped; unmap it before checksums are made",
                        image->file.path);
    if (!ret && image->file.heads < MIRROR_HEADS)
        ret = error_set(error, -ENOTSUP,
                        "%s has no mirror of its metadata, and so no place for checksums; pcow-img "
                        "amend -o mirror=on makes both",
                        image->file.path);
    /* They must not be on the medium before what they tell of. */
    if (!ret)
        ret = pcow_flush(image, error);
    if (ret)
        return ret;
    making = calloc(1, sizeof *making);
    if (!making)
        return error_set(error, -ENOMEM, "out of memory");
    making->image = image;
    making->with_active = with_active;
    making->buffer = malloc(DATASUM_BUFFER);
    if (!making->buffer)
        ret = error_set(error, -ENOMEM, "out of memory");
    if (!ret && snapshot)
        ret = want(making, snapshot, error);
    if (!ret)
        ret = make(making, progress, opaque, error);
    free(making->wanted);
    free(making->buffer);
    free(making);
    return ret;
}
