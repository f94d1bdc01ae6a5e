/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Making checksums of data: by the writer of an image, or beside him of a snapshot.
 *
 * Invariant of datasum.h: where there is a checksum, the slab has it. Beside a writer it is kept so:
 * data of a snapshot does not change, but its slabs become another layer's or are given back when
 * layers go, for which the tree is locked. So each slab is hashed without that lock, and with it
 * (shared) the word that publishes is stored only if owner and bitmap are still those that were
 * hashed. Whoever changes them later looks for what was published: datasum_look(). VM state is left
 * out there, as its writer does not lock the tree. Of those who make them there is one at a time,
 * by a lock of its own: each knows which there are.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/datasum.h"
#include "image/lock.h"
#include "operations/operations.h"
#include "snapshot/beside_writer.h"
#include "snapshot/summed.h"
#include "util/error.h"

/* That are published together, after one sync; their checksums fill a page. */
#define BATCH (PCOW_PAGE_SIZE / sizeof(struct datasum))

struct summing {
    struct pcow_image *image;
    struct file *file;                 /* that is stored to: the image's, or beside a writer another */
    bool beside_writer;
    bool *wanted;                      /* of each layer, in their order; NULL: all */
    bool with_active;
    void *buffer;
    struct {
        struct datasum_subject subject;
        uint64_t hash[2];
    } batch[BATCH];
    unsigned count;
    uint64_t unreadable;               /* slabs */
};

static bool is_wanted(const struct summing *making, uint64_t slab)
{
    const struct pcow_image *image = making->image;
    struct slab owner = slab_peek(image, slab);
    const struct layer *layer =
        owner.kind == OWNER_DATA || (owner.kind == OWNER_STATE && !making->beside_writer)
            ? layer_find(image, owner.layer)
            : NULL;

    if (!layer || (making->wanted && !making->wanted[layer - image->layers]))
        return false;
    return making->with_active || layer->id != image_active(image);
}

/* A damaged one is made anew. */
static int has_one(const struct summing *making, uint64_t slab, bool *has)
{
    const struct file *file = making->file;
    struct datasum datasum;
    int ret = 0;

    *has = false;
    if (datasum_may_be(file, slab)) {
        ret = file_read(file, datasum_offset(slab), &datasum, sizeof datasum);
        *has = !ret && datasum_is_good(file, slab, &datasum);
    }
    return ret;
}

static int hash_slab(struct summing *making, uint64_t slab)
{
    struct pcow_image *image = making->image;
    struct slab owner = slab_peek(image, slab);
    struct datasum_subject *subject = &making->batch[making->count].subject;
    uint64_t *hash = making->batch[making->count].hash;
    int ret;

    *subject = (struct datasum_subject){
        .slab = slab,
        .owner = {(enum owner_kind)owner.kind, owner.layer, owner.number},
        .valid = image->valid[slab],
    };
    ret = datasum_hash(making->file, subject, making->buffer, hash);
    if (!ret)
        ret = datasum_store_hash(making->file, subject, hash);
    if (!ret)
        making->count++;
    /* Whoever stores to it later asks for blocks again, and drops it. */
    if (!making->beside_writer)
        slab_forget_backed(image, slab);
    return ret;
}

static int publish_all(const struct summing *making)
{
    int ret = 0;

    for (unsigned i = 0; i < making->count && !ret; i++) {
        bool same = true;

        if (making->beside_writer)
            ret = datasum_is_unchanged(making->file, &making->batch[i].subject,
                                       making->batch[i].hash, &same);
        if (!ret && same)
            ret = datasum_publish(making->file, &making->batch[i].subject);
    }
    return ret;
}

/*
 * The hashes are on the medium, and so is what they are of: by a writer's flush at the beginning,
 * or the commit of beside_writer(). What is in the memory of the kernel is read at once, later.
 */
static int settle_all(struct summing *making)
{
    int ret = making->beside_writer ? 0 : file_sync(making->file);

    for (unsigned i = 0; i < making->count && !ret && making->beside_writer; i++) {
        bool same;

        ret = datasum_settle_hash(making->file, &making->batch[i].subject);
        if (!ret)
            ret = datasum_is_unchanged(making->file, &making->batch[i].subject,
                                       making->batch[i].hash, &same);
    }
    return ret;
}

static int store_error(const struct summing *making, int code, struct pcow_error *error)
{
    return code ? error_set_errno(error, code, "%s: cannot store checksums", making->file->path)
                : 0;
}

static int publish_batch(struct summing *making, struct pcow_error *error)
{
    struct file *file = making->file;
    int ret = 0;

    if (making->count == 0)
        return 0;
    ret = store_error(making, settle_all(making), error);
    if (!ret && making->beside_writer)
        ret = lock_tree(file, false, error);
    if (ret)
        return ret;
    ret = store_error(making, publish_all(making), error);
    if (making->beside_writer)
        unlock_tree(file);
    making->count = 0;
    return ret;
}

static int make_one(struct summing *making, uint64_t slab, bool *made, struct pcow_error *error)
{
    bool has;
    int ret = has_one(making, slab, &has);

    *made = !ret && !has;
    if (*made)
        ret = hash_slab(making, slab);
    if (ret == -EIO) {
        making->unreadable++;
        *made = false;
        return 0;
    }
    if (ret)
        return error_set_errno(error, ret, "%s: cannot make the checksum of file slab %llu",
                               making->file->path, (unsigned long long)slab);
    return making->count == BATCH ? publish_batch(making, error) : 0;
}

static int make(struct summing *making, pcow_progress_fn progress, void *opaque,
                struct pcow_error *error)
{
    struct pcow_image *image = making->image;
    uint64_t total = 0, done = 0;
    int ret = 0, published;

    for (uint64_t p = 1; p < image_slab_count(image); p++)
        total += is_wanted(making, p) && !datasum_may_be(making->file, p);
    for (uint64_t p = 1; p < image_slab_count(image) && !ret; p++) {
        bool made;

        if (!is_wanted(making, p))
            continue;
        ret = make_one(making, p, &made, error);
        if (ret || !made)
            continue;
        /* A damaged one has not been counted. */
        total = ++done > total ? done : total;
        if (progress && progress(opaque, done * PCOW_SLAB_SIZE, total * PCOW_SLAB_SIZE))
            ret = error_set(error, -ECANCELED, "%s: cancelled", image->file.path);
    }
    /* What is made is kept. */
    if (!ret || ret == -ECANCELED) {
        published = publish_batch(making, ret ? NULL : error);
        if (!published)
            published = store_error(making, file_sync(making->file), ret ? NULL : error);
        ret = ret ? ret : published;
    }
    if (!ret && making->unreadable)
        ret = error_set(error, -EIO,
                        "%s: %llu file slabs cannot be read, and have no checksums; see pcow-img "
                        "check",
                        image->file.path, (unsigned long long)making->unreadable);
    return ret;
}

/* A layer, and what is below it. */
static int want(struct summing *making, const struct layer *layer, struct pcow_error *error)
{
    struct pcow_image *image = making->image;

    making->wanted = calloc(image->layer_count, sizeof *making->wanted);
    if (!making->wanted)
        return error_set(error, -ENOMEM, "out of memory");
    for (; layer; layer = layer->parent ? layer_find(image, layer->parent) : NULL)
        making->wanted[layer - image->layers] = true;
    return 0;
}

/* Beside a writer the tree is locked for it, and for no longer than the tables are read. */
static int note_summed(struct summing *making, struct pcow_error *error)
{
    int ret;

    if (!making->beside_writer)
        return summed_note(making->image, making->wanted, error);
    ret = lock_tree(making->file, true, error);
    if (ret)
        return ret;
    ret = summed_note_beside_writer(making->image, making->file, making->wanted, error);
    unlock_tree(making->file);
    return ret;
}

static int make_with_buffer(struct summing *making, const struct layer *top,
                            pcow_progress_fn progress, void *opaque, struct pcow_error *error)
{
    int ret = top ? want(making, top, error) : 0;

    if (ret)
        return ret;
    making->buffer = malloc(DATASUM_BUFFER);
    ret = making->buffer ? make(making, progress, opaque, error)
                         : error_set(error, -ENOMEM, "out of memory");
    if (!ret)
        ret = note_summed(making, error);
    free(making->buffer);
    free(making->wanted);
    return ret;
}

static int check_place(const struct file *file, struct pcow_error *error)
{
    return file->heads < MIRROR_HEADS
               ? error_set(error, -ENOTSUP,
                           "%s has no mirror of its metadata, and so no place for checksums; "
                           "pcow-img amend -o mirror=on makes both",
                           file->path)
               : 0;
}

int pcow_checksum(pcow_image *image, const char *snapshot, bool with_active,
                  pcow_progress_fn progress, void *opaque, struct pcow_error *error)
{
    struct summing *making;
    const struct layer *top = NULL;
    int ret = image_check_writable(image, error);

    if (!ret && image->map)
        ret = error_set(error, -EBUSY, "%s is mapped; unmap it before checksums are made",
                        image->file.path);
    if (!ret)
        ret = check_place(&image->file, error);
    if (!ret && snapshot && !(top = layer_find_name(image, snapshot)))
        ret = error_set(error, -ENOENT, "%s has no snapshot '%s'; pcow-img snapshot -l lists them",
                        image->file.path, snapshot);
    /* They must not be on the medium before what they tell of. */
    if (!ret)
        ret = pcow_flush(image, error);
    if (ret)
        return ret;
    making = calloc(1, sizeof *making);
    if (!making)
        return error_set(error, -ENOMEM, "out of memory");
    making->image = image;
    making->file = &image->file;
    making->with_active = with_active;
    ret = lock_checksums(&image->file, error);
    if (!ret) {
        ret = make_with_buffer(making, top, progress, opaque, error);
        unlock_checksums(&image->file);
    }
    free(making);
    return ret;
}

static int attach(struct file *file, struct pcow_error *error)
{
    int ret = lock_tree(file, false, error);

    if (ret)
        return ret;
    ret = beside_writer_attach(file, error);
    unlock_tree(file);
    if (!ret)
        ret = check_place(file, error);
    if (!ret)
        ret = lock_checksums(file, error);
    if (!ret && (ret = datasum_attach(file)))
        error_set_errno(error, ret, "%s: cannot read its checksums", file->path);
    /*
     * What is hashed, and what says whose it is, was final when the snapshot was opened; in class
     * pmem it may be in the caches still.
     */
    if (!ret && (ret = file_commit(file)))
        error_set_errno(error, ret, "cannot flush %s", file->path);
    return ret;
}

int pcow_checksum_beside_writer(pcow_image *image, pcow_progress_fn progress, void *opaque,
                                struct pcow_error *error)
{
    struct summing *making;
    struct file file;
    int ret = 0;

    if (image->file.writable || image->view == image_active(image))
        return error_set(error, -EINVAL, "%s is not open for reading at a snapshot",
                         image->file.path);
    making = calloc(1, sizeof *making);
    if (!making)
        return error_set(error, -ENOMEM, "out of memory");
    making->image = image;
    making->file = &file;
    making->beside_writer = true;
    ret = beside_writer_open(image, &file, error);
    if (!ret) {
        ret = attach(&file, error);
        if (!ret)
            ret = make_with_buffer(making, layer_find(image, image->view), progress, opaque, error);
        file_close(&file);
    }
    free(making);
    return ret;
}
