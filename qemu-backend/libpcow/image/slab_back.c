/* SPDX-License-Identifier: BSD-3-Clause */
/* Blocks for what is to be mapped for stores. */
#include "image/datasum.h"
#include "image/image.h"
#include "image/remains.h"

bool slab_is_backed(const struct pcow_image *image, uint64_t slab)
{
    return __atomic_load_n(&image->backed[slab / 64], __ATOMIC_ACQUIRE) >> (slab % 64) & 1;
}

void slab_forget_backed(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_and(&image->backed[slab / 64], ~slab_bit(slab), __ATOMIC_RELEASE);
}

void slab_forget_stored(struct pcow_image *image, uint64_t slab)
{
    if (image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
        return;
    slab_forget_backed(image, slab);
    __atomic_fetch_and(&image->stored[slab / 64], ~slab_bit(slab), __ATOMIC_RELEASE);
}

/* From here on remains wait, see remains_must_wait(); so those that there are go now. */
static void begin_stores(struct pcow_image *image, uint64_t slab)
{
    if (image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE
        || __atomic_load_n(&image->stored[slab / 64], __ATOMIC_ACQUIRE) & slab_bit(slab))
        return;
    if (slab_is_suspect(image, slab) && remains_empty_pages(image, slab, false) == 0)
        remains_forget(image, slab);
    __atomic_fetch_or(&image->stored[slab / 64], slab_bit(slab), __ATOMIC_RELEASE);
}

int slab_back(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count)
{
    int ret;

    if (slab_is_backed(image, slab))
        return 0;
    begin_stores(image, slab);
    /* It is to be stored to. */
    ret = datasum_drop(&image->file, slab);
    if (!ret)
        ret = slab_allocate_tables(image, slab);
    for (unsigned page = first; page < first + count && ret == 0;) {
        unsigned end = page_set_run_end(&image->valid[slab], page, first + count);
        uint64_t offset = (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                 length = (end - page) * PCOW_PAGE_SIZE;

        if (page_set_has(&image->valid[slab], page)) {
            ret = file_unshare(&image->file, offset, length);
            if (!ret)
                ret = file_allocate_holes(&image->file, offset, length);
        }
        page = end;
    }
    if (!ret && count == PAGES_PER_SLAB)
        slab_begin_backed(image, slab);
    return ret;
}
