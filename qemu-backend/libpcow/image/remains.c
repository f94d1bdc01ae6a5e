/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/remains.h"

#include <unistd.h>

void remains_look_again(struct pcow_image *image)
{
    __atomic_store_n(&image->remains_due, true, __ATOMIC_RELEASE);
}

static void mark(struct pcow_image *image, uint64_t slab)
{
    remains_keep(image, slab);
    if (!remains_must_wait(image, slab))
        remains_look_again(image);
}

void remains_leave(struct pcow_image *image, uint64_t slab, unsigned pages)
{
    __atomic_fetch_add(&image->remains_size, pages * PCOW_PAGE_SIZE, __ATOMIC_RELAXED);
    mark(image, slab);
}

bool remains_must_wait(const struct pcow_image *image, uint64_t slab)
{
    return image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE && image->map
           && slab_peek(image, slab).layer == image_active(image)
           && __atomic_load_n(&image->stored[slab / 64], __ATOMIC_ACQUIRE) & slab_bit(slab);
}

void remains_discard(struct pcow_image *image, uint64_t slab, unsigned page, unsigned pages)
{
    if ((pages < PAGES_PER_SLAB && remains_must_wait(image, slab))
        || file_punch(&image->file, (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                   pages * PCOW_PAGE_SIZE))
        mark(image, slab);
}

void remains_forget(struct pcow_image *image, uint64_t slab)
{
    if (__atomic_load_n(&image->remains[slab / 64], __ATOMIC_RELAXED) & slab_bit(slab))
        __atomic_fetch_and(&image->remains[slab / 64], ~slab_bit(slab), __ATOMIC_ACQ_REL);
}

void remains_keep(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_or(&image->remains[slab / 64], slab_bit(slab), __ATOMIC_ACQ_REL);
}

bool remains_are_due(const struct pcow_image *image)
{
    return __atomic_load_n(&image->remains_due, __ATOMIC_ACQUIRE)
           || __atomic_load_n(&image->remains_left, __ATOMIC_ACQUIRE) > 0;
}

static bool is_used(const struct pcow_image *image, uint64_t slab)
{
    return __atomic_load_n(&image->used[slab / 64], __ATOMIC_ACQUIRE) & slab_bit(slab);
}

void remains_find(struct pcow_image *image, bool owned)
{
    for (uint64_t p = 1; p < image->slabs_at_open; p++) {
        off_t data;

        if (slab_is_group_head(p, image->file.heads))
            continue;
        if (is_used(image, p)) {
            if (owned && slab_peek(image, p).kind == OWNER_DATA)
                remains_keep(image, p);
            continue;
        }
        data = lseek(image->file.fd, (off_t)(p << SLAB_BITS), SEEK_DATA);
        /* Nothing up to the slab that was found, so nothing in free ones before it. */
        if (data >= 0 && (uint64_t)data >> SLAB_BITS == p)
            remains_keep(image, p);
        else if (!owned && data >= 0)
            p = ((uint64_t)data >> SLAB_BITS) - 1;
        else if (!owned)
            break;
    }
    /* Who looks at them knows which have to wait; what is the active layer may change just now. */
    remains_look_again(image);
    if (owned)
        __atomic_store_n(&image->remains_found, true, __ATOMIC_RELEASE);
}

int remains_empty_pages(struct pcow_image *image, uint64_t slab, bool holes)
{
    struct page_set kept;
    int ret = 0;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        kept.word[w] =
            page_set_word(&image->valid[slab], w) | page_set_word(&image->prepared[slab], w);
    for (unsigned page = 0; page < PAGES_PER_SLAB && ret == 0;) {
        unsigned end = page_set_run_end(&kept, page, PAGES_PER_SLAB);
        uint64_t offset = (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                 length = (end - page) * PCOW_PAGE_SIZE;

        if (!page_set_has(&kept, page) && (holes || !file_is_hole(&image->file, offset, length)))
            ret = file_punch(&image->file, offset, length);
        page = end;
    }
    return ret;
}
