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
 *
 * None is made of what is known to be damaged: where a checksum is damaged, or is gone from where
 * header or layer record say that all had one, a new one would call whole what nobody has judged.
 * What has one is compared, when the others are made.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/datasum.h"
#include "image/lock.h"
#include "operations/operations.h"
#include "operations/verify_data.h"
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
    bool *compared;                    /* the same; NULL: all that are wanted */
    unsigned flags;                    /* enum pcow_checksum_flags */
    void *buffer;
    uint8_t *judged;                   /* a bit for each slab: it has one, or has lost it */
    struct verify verify;
    struct pcow_data_result found;
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
    return making->flags & PCOW_CHECKSUM_ACTIVE || layer->id != image_active(image);
}

/* Of what is wanted. */
static bool is_compared(const struct summing *making, uint64_t slab)
{
    const struct layer *layer = layer_find(making->image, slab_peek(making->image, slab).layer);

    return !making->compared || (layer && making->compared[layer - making->image->layers]);
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

static int hash_and_publish(struct summing *making, uint64_t slab, struct pcow_error *error)
{
    int ret = hash_slab(making, slab);

    if (ret == -EIO) {
        making->unreadable++;
        return 0;
    }
    if (ret)
        return error_set_errno(error, ret, "%s: cannot make the checksum of file slab %llu",
                               making->file->path, (unsigned long long)slab);
    return making->count == BATCH ? publish_batch(making, error) : 0;
}

static int judge_error(const struct summing *making, int code, uint64_t slab,
                       struct pcow_error *error)
{
    return code ? error_set_errno(error, code, "%s: cannot read file slab %llu, or its checksum",
                                  making->file->path, (unsigned long long)slab)
                : 0;
}

/* The first time round: where there never was one. */
static int make_one(struct summing *making, uint64_t slab, bool *done, struct pcow_error *error)
{
    bool may;
    int ret = judge_error(making, verify_may_make(&making->verify, slab, &may), slab, error);

    *done = !ret && may;
    if (*done)
        return hash_and_publish(making, slab, error);
    making->judged[slab / 8] |= (uint8_t)(1u << slab % 8);
    return ret;
}

/* The second time: what has one, or has lost it. */
static int judge_one(struct summing *making, uint64_t slab, bool *done, struct pcow_error *error)
{
    enum verdict verdict;
    int ret = 0;

    *done = making->judged[slab / 8] >> slab % 8 & 1 && is_compared(making, slab);
    if (*done)
        ret = judge_error(making, verify_slab(&making->verify, slab, &verdict), slab, error);
    if (*done && !ret && verdict == VERDICT_DAMAGED && making->flags & PCOW_CHECKSUM_ACCEPT_DAMAGE)
        ret = hash_and_publish(making, slab, error);
    return ret;
}

/* What was accepted is no error. */
static int tell_damage(struct summing *making, struct pcow_error *error)
{
    verify_end(&making->verify);
    if (!making->found.corruptions || making->flags & PCOW_CHECKSUM_ACCEPT_DAMAGE)
        return 0;
    return error_set(error, -EUCLEAN,
                     "%.300s is damaged: %.400s; none was made of what is damaged (%llu in all): "
                     "put a whole copy in its place, or accept it as it is with --accept-damage",
                     making->file->path, making->verify.first,
                     (unsigned long long)making->found.corruptions);
}

static int make(struct summing *making, pcow_progress_fn progress, void *opaque,
                struct pcow_error *error)
{
    struct pcow_image *image = making->image;
    uint64_t count = image_slab_count(image), total = 0, made = 0;
    int ret = 0, published;

    for (uint64_t p = 1; p < count; p++)
        total += is_wanted(making, p)
                 && (!datasum_may_be(making->file, p) || is_compared(making, p));
    for (uint64_t i = 0; i < 2 * count && !ret; i++) {
        uint64_t p = i % count;
        bool done;

        if (p == 0 || !is_wanted(making, p))
            continue;
        ret = i < count ? make_one(making, p, &done, error) : judge_one(making, p, &done, error);
        if (ret || !done)
            continue;
        total = ++made > total ? made : total;
        if (progress && progress(opaque, made * PCOW_SLAB_SIZE, total * PCOW_SLAB_SIZE))
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
    const struct layer *top = layer;
    bool own = true;

    making->wanted = calloc(image->layer_count, sizeof *making->wanted);
    making->compared = calloc(image->layer_count, sizeof *making->compared);
    if (!making->wanted || !making->compared)
        return error_set(error, -ENOMEM, "out of memory");
    for (; layer; layer = layer->parent ? layer_find(image, layer->parent) : NULL) {
        /* A hidden one has no turn of its own. */
        own = own && (layer == top || layer->state == LAYER_HIDDEN);
        making->wanted[layer - image->layers] = true;
        making->compared[layer - image->layers] =
            own || !(making->flags & PCOW_CHECKSUM_COMPARE_OWN);
    }
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
                            pcow_finding_fn finding, pcow_progress_fn progress, void *opaque,
                            struct pcow_error *error)
{
    int ret = top ? want(making, top, error) : 0;

    making->buffer = malloc(DATASUM_BUFFER);
    making->judged = calloc(image_slab_count(making->image) / 8 + 1, 1);
    making->verify = (struct verify){.image = making->image,
                                     .finding = finding,
                                     .opaque = opaque,
                                     .result = &making->found,
                                     .buffer = making->buffer};
    if (!ret && (!making->buffer || !making->judged))
        ret = error_set(error, -ENOMEM, "out of memory");
    if (!ret)
        ret = make(making, progress, opaque, error);
    if (!ret)
        ret = note_summed(making, error);
    if (!ret)
        ret = tell_damage(making, error);
    free(making->judged);
    free(making->buffer);
    free(making->compared);
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

int pcow_checksum(pcow_image *image, const char *snapshot, unsigned flags, pcow_finding_fn finding,
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
    making->flags = flags;
    ret = lock_checksums(&image->file, error);
    if (!ret) {
        ret = make_with_buffer(making, top, finding, progress, opaque, error);
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

int pcow_checksum_beside_writer(pcow_image *image, unsigned flags, pcow_finding_fn finding,
                                pcow_progress_fn progress, void *opaque,
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
    making->flags = flags & ~(unsigned)PCOW_CHECKSUM_ACTIVE;
    ret = beside_writer_open(image, &file, error);
    if (!ret) {
        ret = attach(&file, error);
        if (!ret)
            ret = make_with_buffer(making, layer_find(image, image->view), finding, progress,
                                   opaque, error);
        file_close(&file);
    }
    free(making);
    return ret;
}
