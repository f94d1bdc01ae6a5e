/* SPDX-License-Identifier: BSD-3-Clause */
/* Blocks for what is to be mapped for stores. */
#include "image/datasum.h"
#include "image/image.h"
#include "image/remains.h"

static bool has_bit(const uint64_t *bits, uint64_t slab)
{
    return __atomic_load_n(&bits[slab / 64], __ATOMIC_ACQUIRE) & slab_bit(slab);
}

/* Are remains of it still to be given back before it is stored to? */
static bool begins_stores(const struct pcow_image *image, uint64_t slab)
{
    return image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
           && !has_bit(image->stored, slab);
}

bool slab_is_backed(const struct pcow_image *image, uint64_t slab)
{
    return has_bit(image->backed, slab) && !begins_stores(image, slab);
}

void slab_forget_backed(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_and(&image->backed[slab / 64], ~slab_bit(slab), __ATOMIC_RELEASE);
}

void slab_forget_stored(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_and(&image->stored[slab / 64], ~slab_bit(slab), __ATOMIC_RELEASE);
}

/*
 * From here on remains wait, see remains_must_wait(); so those that there are go now. Of one that
 * the thread has been at there are none.
 */
static void begin_stores(struct pcow_image *image, uint64_t slab)
{
    bool may_have = has_bit(image->remains, slab)
                    || (slab < image->slabs_at_open
                        && !__atomic_load_n(&image->remains_found, __ATOMIC_ACQUIRE));

    if (may_have && remains_empty_pages(image, slab, false))
        remains_keep(image, slab);
    else if (may_have)
        remains_forget(image, slab);
    __atomic_fetch_or(&image->stored[slab / 64], slab_bit(slab), __ATOMIC_RELEASE);
}

int slab_back(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count)
{
    int ret;

    if (begins_stores(image, slab))
        begin_stores(image, slab);
    if (slab_is_backed(image, slab))
        return 0;
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
