/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Class page-cache leaves words of metadata (which pages are valid, whose a slab is) to the next flush. A page of them that the kernel could not
 * write counts as written from then on, and no sync tries it again: what relies on its words would be missing after a crash, however often it was
 * flushed since. So after a failure all of them are made dirty once more, until a sync after which there was none.
 */
#include "image/image.h"

/* The same value, by a store that no other one can be lost by. */
static void touch(struct pcow_image *image, uint64_t offset)
{
    uint64_t *word = file_address(&image->file, offset);
    uint64_t value = word ? __atomic_load_n(word, __ATOMIC_RELAXED) : 0;

    if (word)
        __atomic_compare_exchange_n(word, &value, value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

static void touch_metadata(struct pcow_image *image)
{
    for (uint64_t p = 1; p < image_slab_count(image); p++)
        /* Of a slab that somebody has: its tables have blocks. */
        if (__atomic_load_n(&image->slabs[p].layer, __ATOMIC_ACQUIRE)) {
            touch(image, owner_offset(p));
            touch(image, bitmap_offset(p));
        }
}

bool image_must_store_again(const struct pcow_image *image)
{
    return image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
        && failures_count(&image->file.persist.failures) != __atomic_load_n(&image->stored_again, __ATOMIC_SEQ_CST);
}

int image_sync(struct pcow_image *image)
{
    uint64_t failures;
    int ret;

    if (!image_must_store_again(image))
        return file_sync(&image->file);
    failures = failures_await(&image->file.persist.failures);
    touch_metadata(image);
    ret = file_sync(&image->file);
    if (!ret)
        ret = file_check_since(&image->file, failures);
    if (!ret)
        __atomic_store_n(&image->stored_again, failures, __ATOMIC_SEQ_CST);
    return ret;
}
