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

/* The same value, by a store that no other one can be lost by. */
static int touch(struct pcow_image *image, uint64_t offset)
{
    uint64_t *word = file_address(&image->file, offset), value;
    int ret = word ? file_prepare_store(&image->file, word, NULL, offset, sizeof *word) : -errno;

    if (ret)
        return ret;
    value = __atomic_load_n(word, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(word, &value, value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    return 0;
}

static int touch_metadata(struct pcow_image *image)
{
    int ret = 0;

    for (uint64_t p = 1; p < image_slab_count(image) && !ret; p++)
        /* What this writer has stored: the others are on the medium, and may be without blocks. */
        if (__atomic_load_n(&image->slabs[p].layer, __ATOMIC_ACQUIRE)
            && slab_has_tables(image, p)) {
            ret = touch(image, owner_offset(p));
            if (!ret)
                ret = touch(image, bitmap_offset(p));
        }
    return ret;
}

bool image_must_store_again(const struct pcow_image *image)
{
    return image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
           && failures_count(&image->file.persist.failures)
                  != __atomic_load_n(&image->stored_again, __ATOMIC_SEQ_CST);
}

int image_sync(struct pcow_image *image)
{
    uint64_t failures;
    int ret;

    if (!image_must_store_again(image))
        return file_sync(&image->file);
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
