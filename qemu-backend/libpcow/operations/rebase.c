/* SPDX-License-Identifier: BSD-3-Clause */
/* Changing what an image stands on: rebase to another base, commit into the base. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "chain/chain.h"
#include "operations/operations.h"
#include "snapshot/tree.h"
#include "util/error.h"

static int report(pcow_progress_fn progress, void *opaque, uint64_t done, uint64_t total,
                  const char *path, struct pcow_error *error)
{
    if (progress && progress(opaque, done, total))
        return error_set(error, -ECANCELED, "%s: cancelled", path);
    return 0;
}

/*
 * What shows from offset on, up to end: looked for once, however often it is asked for. image may
 * be NULL, or end before.
 */
static int look(pcow_image *image, uint64_t offset, uint64_t end, struct pcow_extent *extent,
                struct pcow_error *error)
{
    if (extent->length > 0 && offset < extent->offset + extent->length)
        return 0;
    if (image && offset < image->size)
        return pcow_get_extent(image, offset, (end < image->size ? end : image->size) - offset,
                               extent, error);
    *extent = (struct pcow_extent){.offset = offset, .length = end - offset, .zero = true};
    return 0;
}

/* Zeros behind the end. */
static int read_or_zero(pcow_image *image, uint64_t offset, char *to, uint64_t length,
                        struct pcow_error *error)
{
    uint64_t there = !image || offset >= image->size ? 0
                     : image->size - offset < length ? image->size - offset
                                                     : length;

    memset(to + there, 0, length - there);
    return there ? pcow_read(image, offset, to, there, error) : 0;
}

/* Pages of one slab that would read differently: they become own together. */
struct kept {
    pcow_image *image, *new_base;
    char *before, *after;              /* a slab each */
    uint64_t guest_slab;
    struct page_set differs;
};

static int keep(struct kept *kept, struct pcow_error *error)
{
    int ret =
        page_set_empty(&kept->differs)
            ? 0
            : chain_write_pages(kept->image, kept->guest_slab, &kept->differs, kept->before, error);

    memset(&kept->differs, 0, sizeof kept->differs);
    return ret;
}

/* A range inside one slab. */
static int compare(struct kept *kept, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    uint64_t from = offset % PCOW_SLAB_SIZE;
    int ret = offset >> SLAB_BITS == kept->guest_slab ? 0 : keep(kept, error);

    kept->guest_slab = offset >> SLAB_BITS;
    if (!ret)
        ret = read_or_zero(kept->image, offset, kept->before + from, length, error);
    if (!ret)
        ret = read_or_zero(kept->new_base, offset, kept->after + from, length, error);
    for (uint64_t at = from; at < from + length && !ret; at += PCOW_PAGE_SIZE)
        if (memcmp(kept->before + at, kept->after + at, PCOW_PAGE_SIZE))
            page_set_add_range(&kept->differs, (unsigned)(at / PCOW_PAGE_SIZE), 1);
    return ret;
}

static int keep_different(struct kept *kept, pcow_progress_fn progress, void *opaque,
                          struct pcow_error *error)
{
    pcow_image *image = kept->image;
    struct pcow_extent extent = {0}, under = {0};
    int ret = 0;

    for (uint64_t offset = 0, end; offset < image->size && !ret; offset = end) {
        ret = look(image, offset, image->size, &extent, error);
        if (!ret)
            ret = look(kept->new_base, offset, image->size, &under, error);
        if (!ret)
            ret = report(progress, opaque, offset, image->size, image->file.path, error);
        if (ret)
            break;
        end = extent.offset + extent.length < under.offset + under.length
                  ? extent.offset + extent.length
                  : under.offset + under.length;
        /*
         * Depth 0: any layer of this file, so the base does not show. Both absent: zeros on either.
         */
        if ((extent.present && extent.depth == 0) || (!extent.present && !under.present))
            continue;
        if (end > (offset / PCOW_SLAB_SIZE + 1) * PCOW_SLAB_SIZE)
            end = (offset / PCOW_SLAB_SIZE + 1) * PCOW_SLAB_SIZE;
        ret = compare(kept, offset, end - offset, error);
    }
    return ret ? ret : keep(kept, error);
}

/* Bring pages into the active layer that would read differently on the new base. */
static int keep_content(pcow_image *image, pcow_image *new_base, pcow_progress_fn progress,
                        void *opaque, struct pcow_error *error)
{
    struct kept kept = {.image = image,
                        .new_base = new_base,
                        .before = malloc(PCOW_SLAB_SIZE),
                        .after = malloc(PCOW_SLAB_SIZE)};
    int ret = kept.before && kept.after ? keep_different(&kept, progress, opaque, error)
                                        : error_set(error, -ENOMEM, "out of memory");

    free(kept.before);
    free(kept.after);
    return ret ? ret : pcow_flush(image, error);
}

static int check_rebase(const pcow_image *image, bool unsafe, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    if (image->map)
        return error_set(error, -EBUSY, "%s is mapped by a VM; stop it before rebasing",
                         image->file.path);
    /* Pages are kept for the active layer only; a snapshot would silently read something else. */
    for (size_t i = 0; i < image->layer_count && !unsafe; i++)
        if (image->layers[i].state != LAYER_OPEN)
            return error_set(
                error, -EINVAL,
                "%s has snapshots, whose content a new base would change; delete them, "
                "or convert the image, or use -u if the new base has the same content",
                image->file.path);
    return 0;
}

static bool is_absent(const char *path)
{
    struct stat status;

    return lstat(path, &status) && errno == ENOENT;
}

/*
 * The base is yet to come, as when it is about to be renamed. It is what the old one was, the same
 * image at the same snapshot or generation, or it is not opened.
 */
static int record_by_name(const pcow_image *image, const char *base, struct base_record *record,
                          struct pcow_error *error)
{
    const struct base_record *old = image_base_record(image);
    struct base_record named;
    pcow_image *none;
    int ret = base_record_make(&named, image->file.path, base, NULL, true, &none, error);

    if (ret)
        return ret;
    *record = old ? *old : named;
    memcpy(record->name, named.name, sizeof record->name);
    record->crc = base_record_crc(record);
    return 0;
}

int pcow_rebase(pcow_image *image, const char *base, const char *base_snapshot, bool unsafe,
                pcow_progress_fn progress, void *opaque, struct pcow_error *error)
{
    struct base_record record;
    pcow_image *new_base = NULL;
    int ret = check_rebase(image, unsafe, error);

    if (!ret && base) {
        ret = base_record_make(&record, image->file.path, base, base_snapshot, false, &new_base,
                               error);
        if (ret && unsafe && !base_snapshot && is_absent(base))
            ret = record_by_name(image, base, &record, error);
    }
    if (!ret)
        ret = image_begin_change(image, error);
    if (!ret && !unsafe)
        ret = keep_content(image, new_base, progress, opaque, error);
    if (!ret)
        ret = header_set_base(image, base ? &record : NULL, error);
    /* Held until the record counts: nothing else keeps a snapshot that no image stands on yet. */
    pcow_close(new_base);
    if (ret)
        return ret;
    chain_free(image);
    pcow_close(image->base);
    image->base = NULL;
    /* Unsafe means without looking: what is wrong with the new base shows at the next open. */
    if (base && !unsafe)
        ret = image_open_base(image, error);
    return ret ? ret : report(progress, opaque, image->size, image->size, image->file.path, error);
}

static int copy_up(pcow_image *image, pcow_image *base, pcow_progress_fn progress, void *opaque,
                   struct pcow_error *error)
{
    /* Above it the image reads as zeros whatever the base holds: what a resize had given up. */
    uint64_t base_limit = layer_find(image, image_active(image))->parent_limit;
    struct pcow_extent extent = {0};
    char *buffer = malloc(PCOW_SLAB_SIZE);
    int ret = buffer ? 0 : error_set(error, -ENOMEM, "out of memory");

    for (uint64_t offset = 0, end; offset < image->size && ret == 0; offset = end) {
        ret = look(image, offset, image->size, &extent, error);
        if (ret)
            break;
        end = extent.offset + extent.length;
        if (end - offset > PCOW_SLAB_SIZE)
            end = offset + PCOW_SLAB_SIZE;
        if (extent.present && extent.depth == 0) {
            ret = pcow_read(image, offset, buffer, end - offset, error);
            if (!ret)
                ret = pcow_write(base, offset, buffer, end - offset, error);
        } else if (!extent.present && end > base_limit) {
            uint64_t from = offset > base_limit ? offset : base_limit;

            ret = pcow_write_zeroes(base, from, end - from, error);
        } else {
            /* Nothing to do as far as the base shows through. */
            end = extent.offset + extent.length;
            if (!extent.present && end > base_limit)
                end = base_limit;
        }
        if (!ret)
            ret = report(progress, opaque, offset, image->size, image->file.path, error);
    }
    free(buffer);
    return ret ? ret : pcow_flush(base, error);
}

static int check_commit(const struct pcow_image *image, struct pcow_error *error)
{
    const struct base_record *record = image_base_record(image);
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    if (!image->base || !record)
        return error_set(error, -EINVAL, "%s has no base to commit to", image->file.path);
    if (image->map || image->base->format1 || record->layer)
        return error_set(
            error, -EINVAL,
            "%s: cannot commit while it is mapped, nor into a snapshot or a format 1 base",
            image->file.path);
    for (size_t i = 0; i < image->layer_count; i++)
        if (image->layers[i].state != LAYER_OPEN)
            return error_set(error, -EINVAL, "%s has snapshots; delete them before committing",
                             image->file.path);
    return 0;
}

/*
 * The base holds, at every offset, what the image reads as: also above the limit where a resize had
 * put an end to what shows through. So nothing that can be read changes when the limit goes, nor
 * when the layer is emptied after that.
 */
static int show_all_of_base(pcow_image *image, struct pcow_error *error)
{
    struct layer *layer = layer_find(image, image_active(image));
    int ret = layer->parent_limit >= image->size
                  ? 0
                  : layer_store_word(image, layer, offsetof(struct layer_record, parent_limit),
                                     image->size, error);

    if (!ret && layer->parent_limit < image->size)
        layer->parent_limit = image->size;
    return ret;
}

/*
 * What the base was when the image was opened on it, and has been since: our shared lock kept
 * writers out.
 */
struct committed {
    char *path;
    uint8_t uuid[PCOW_UUID_SIZE];
    uint64_t generation;
};

/*
 * Between that lock and the exclusive one the name may have become another file's, or the file a
 * writer's.
 */
static int check_same_base(const pcow_image *image, const pcow_image *base,
                           const struct committed *into, struct pcow_error *error)
{
    if (memcmp(base->header.uuid, into->uuid, PCOW_UUID_SIZE) == 0
        && word_value(base->header.generation) == into->generation)
        return 0;
    return error_set(error, -ESTALE,
                     "%s: its base %s was changed or replaced just now; nothing was committed",
                     image->file.path, base->file.path);
}

static int commit_layer(pcow_image *image, pcow_image *base, pcow_progress_fn progress,
                        void *opaque, struct pcow_error *error)
{
    int ret = base->size < image->size ? pcow_resize(base, image->size, false, error) : 0;

    if (!ret && !chain_get(image, error))
        ret = -ENOMEM;
    if (!ret) {
        image->chain->incomplete = false;     /* only what lies in this file is read */
        ret = copy_up(image, base, progress, opaque, error);
    }
    chain_free(image);
    if (!ret)
        ret = show_all_of_base(image, error);
    return ret ? ret : tree_release_layer(image, image_active(image), OWNER_DATA, error);
}

/*
 * The base is locked from before the first of its changes until the record tells of the last one,
 * so that it tells of nobody else's.
 */
static int commit_into(pcow_image *image, pcow_image *base, pcow_progress_fn progress, void *opaque,
                       struct pcow_error *error)
{
    struct base_record record = *image_base_record(image);
    bool checked = !(record.flags & BASE_UNCHECKED);
    int ret, recorded = 0;

    /*
     * Until it is done the base changes under the image: a crash on the way must not leave it
     * "changed since".
     */
    record.flags |= BASE_UNCHECKED;
    record.crc = base_record_crc(&record);
    ret = header_set_base(image, &record, error);
    if (!ret)
        ret = commit_layer(image, base, progress, opaque, error);
    /*
     * A commit that ends half-way, as one that is cancelled, has changed the base only where the
     * image holds pages, or zeros, of its own. So the image stands on the base as that is now, and
     * must notice what others do to it. A record that was not checked before stays so.
     */
    if (!ret || checked) {
        memcpy(record.uuid, base->header.uuid, sizeof record.uuid);
        record.generation = word_value(base->header.generation);
        record.format = 2;
        record.flags &= ~(uint32_t)BASE_UNCHECKED;
        record.crc = base_record_crc(&record);
        recorded = header_set_base(image, &record, ret ? NULL : error);
    }
    return ret ? ret : recorded;
}

static int commit(pcow_image *image, const struct committed *into, pcow_progress_fn progress,
                  void *opaque, struct pcow_error *error)
{
    pcow_image *base;
    int ret =
        image_open(into->path, PCOW_OPEN_WRITE, NULL, image->file.persist.observer, &base, error);

    if (ret)
        return ret;
    ret = check_same_base(image, base, into, error);
    if (!ret)
        ret = commit_into(image, base, progress, opaque, error);
    if (!ret)
        ret = pcow_finish(base, error);
    pcow_close(base);
    return ret;
}

int pcow_commit(pcow_image *image, pcow_progress_fn progress, void *opaque,
                struct pcow_error *error)
{
    struct pcow_error reopened;
    struct committed into;
    int ret = check_commit(image, error);

    if (!ret)
        ret = image_begin_change(image, error);
    if (ret)
        return ret;
    into.path = strdup(image->base->file.path);
    if (!into.path)
        return error_set(error, -ENOMEM, "out of memory");
    memcpy(into.uuid, image->base->header.uuid, sizeof into.uuid);
    into.generation = word_value(image->base->header.generation);
    /*
     * Our own shared lock on the base would keep us from writing it; the exclusive one keeps
     * everybody else out.
     */
    chain_free(image);
    pcow_close(image->base);
    image->base = NULL;
    ret = commit(image, &into, progress, opaque, error);
    free(into.path);
    if (image_open_base(image, &reopened) && !ret)
        ret = error_set(error, reopened.code, "%s", reopened.message);
    return ret;
}
