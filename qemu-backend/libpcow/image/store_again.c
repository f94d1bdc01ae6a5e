/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Class page-cache leaves words of metadata (which pages are valid, whose a slab is) to the next
 * flush. A page of them that the kernel could not write counts as written from then on, and no sync
 * tries it again: what relies on its words would be missing after a crash, however often it was
 * flushed since. So after a failure all of them are made dirty once more, until a sync after which
 * there was none.
 */
#include <errno.h>

#include "image/image.h"

static bool slot_is_used(const struct pcow_image *image, uint32_t slot)
{
    return __atomic_load_n(&image->slot_used[slot / 64], __ATOMIC_RELAXED) >> slot % 64 & 1;
}

/* A snapshot in the making leaves to the next flush what it stores there. */
static int touch_layers(struct pcow_image *image)
{
    int ret = file_touch(&image->file, 0);

    for (uint32_t slot = 0; slot < MAX_LAYERS && !ret; slot++)
        if (slot_is_used(image, slot)) {
            uint64_t offset = layer_record_offset(image, slot);

            ret = offset ? file_touch(&image->file, offset) : 0;
        }
    return ret;
}

static int touch_metadata(struct pcow_image *image)
{
    int ret = touch_layers(image);

    for (uint64_t p = 1; p < image_slab_count(image) && !ret; p++)
        /* What this writer has stored: the others are on the medium, and may be without blocks. */
        if (__atomic_load_n(&image->slabs[p].layer, __ATOMIC_ACQUIRE)
            && slab_has_tables(image, p)) {
            ret = file_touch(&image->file, owner_offset(p));
            if (!ret)
                ret = file_touch(&image->file, bitmap_offset(p));
        }
    return ret;
}

bool image_must_store_again(const struct pcow_image *image)
{
    return image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
           && failures_count(&image->file.persist.failures)
                  != __atomic_load_n(&image->stored_again, __ATOMIC_SEQ_CST);
}

uint64_t image_note_stores(struct pcow_image *image)
{
    return __atomic_add_fetch(&image->stores, 1, __ATOMIC_SEQ_CST);
}

uint64_t image_stores(const struct pcow_image *image)
{
    return __atomic_load_n(&image->stores, __ATOMIC_SEQ_CST);
}

bool image_is_synced(const struct pcow_image *image, uint64_t stores)
{
    return __atomic_load_n(&image->synced, __ATOMIC_SEQ_CST) >= stores;
}

/*
 * Not before the sync is over: a flush that comes meanwhile would find nothing to do, and say that
 * is on the medium which is not.
 */
static void note_synced(struct pcow_image *image, uint64_t stores)
{
    uint64_t synced = __atomic_load_n(&image->synced, __ATOMIC_SEQ_CST);

    while (synced < stores
           && !__atomic_compare_exchange_n(&image->synced, &synced, stores, true, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST))
        ;
}

static int sync_all(struct pcow_image *image)
{
    /* Before it is asked whether there was one: what comes in between is seen by one of both. */
    uint64_t failures = failures_count(&image->file.persist.failures);
    int ret;

    if (!image_must_store_again(image)) {
        ret = file_sync(&image->file);
        return ret || image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE
                   ? ret
                   : file_check_since(&image->file, failures);
    }
    failures = failures_await(&image->file.persist.failures);
    ret = touch_metadata(image);
    if (!ret)
        ret = file_sync(&image->file);
    if (!ret)
        ret = file_check_since(&image->file, failures);
    if (!ret)
        __atomic_store_n(&image->stored_again, failures, __ATOMIC_SEQ_CST);
    return ret;
}

int image_sync(struct pcow_image *image)
{
    uint64_t stores = image_stores(image);
    int ret = sync_all(image);

    /* In class pmem a guest's stores may be in the caches of the CPUs still. */
    if (!ret && image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        note_synced(image, stores);
    return ret;
}

int image_sync_stores(struct pcow_image *image)
{
    /* Before the commit: what is noted meanwhile is for the next one. */
    uint64_t stores = image_stores(image),
             failures = failures_count(&image->file.persist.failures);
    int ret = image_must_store_again(image) ? image_sync(image) : file_commit(&image->file);

    /* If another request was told of what was lost: the next one stores it again. */
    if (!ret && file_check_since(&image->file, failures) == 0)
        note_synced(image, stores);
    return ret;
}
