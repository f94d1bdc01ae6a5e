/* SPDX-License-Identifier: BSD-3-Clause */
/* Where a page lies, and which pages are own. Everything here is async-signal-safe. */
#include <errno.h>
#include <string.h>

#include "chain/chain.h"
#include "format1/format1.h"

/*
 * Own slabs are not always in front of those of older layers: while a snapshot is deleted its slabs become the child's one by one, and after an
 * error some stay what they were.
 */
static bool in_top(const struct pcow_image *image, slab_ref ref)
{
    return ref && slab_ref_level(ref) == image->chain->levels && !image->format1;
}

static bool is_own(const struct pcow_image *image, slab_ref ref)
{
    return in_top(image, ref)
        && image->slabs[slab_ref_slab(ref)].layer == image_active(image) && image->view == image_active(image);
}

/* The page of a guest slab behind the last one that shows from a level. */
static unsigned reach_in_slab(const struct chain *chain, unsigned level, uint64_t guest_slab)
{
    uint64_t first = guest_slab * PAGES_PER_SLAB, reach = chain->reach[level];

    return reach >= first + PAGES_PER_SLAB ? PAGES_PER_SLAB : reach > first ? (unsigned)(reach - first) : 0;
}

struct place chain_find(const struct pcow_image *image, uint64_t guest_slab, unsigned page, unsigned max_pages)
{
    const struct chain *chain = image->chain;
    struct place place = {.pages = max_pages < PAGES_PER_SLAB - page ? max_pages : PAGES_PER_SLAB - page};
    unsigned end = page + place.pages;

    for (slab_ref ref = __atomic_load_n(&chain->head[guest_slab], __ATOMIC_ACQUIRE); ref;) {
        const struct pcow_image *file = chain->file[slab_ref_level(ref)];
        uint64_t slab = slab_ref_slab(ref);

        if (chain->ragged) {
            unsigned reach = reach_in_slab(chain, slab_ref_level(ref), guest_slab);

            if (page >= reach)
                break;                 /* what is below reaches no further */
            end = reach < end ? reach : end;
        }
        if (file->format1) {
            unsigned run = 1;
            bool found = format1_find(file, guest_slab * PAGES_PER_SLAB + page, &place.offset, &run);

            end = page + run < end ? page + run : end;
            if (found) {
                place.present = true;
                place.level = slab_ref_level(ref);
                break;
            }
        } else {
            const struct page_set *valid = &file->valid[slab];

            /* Pages whose nearer answer differs from this one's end the run, in either case. */
            end = page_set_run_end(valid, page, end);
            if (page_set_has(valid, page)) {
                place.present = true;
                place.level = slab_ref_level(ref);
                place.offset = (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;
                place.own = is_own(image, ref);
                break;
            }
        }
        ref = file->slabs[slab].next;
    }
    place.pages = end - page;
    return place;
}

static void own_pages(const struct pcow_image *image, uint64_t guest_slab, bool backed, struct page_set *own)
{
    memset(own, 0, sizeof *own);
    for (slab_ref ref = __atomic_load_n(&image->chain->head[guest_slab], __ATOMIC_ACQUIRE); in_top(image, ref);
         ref = image->slabs[slab_ref_slab(ref)].next) {
        if (!is_own(image, ref) || (backed && !slab_is_backed(image, slab_ref_slab(ref))))
            continue;
        for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
            own->word[w] |= page_set_word(&image->valid[slab_ref_slab(ref)], w);
    }
}

void chain_own_pages(const struct pcow_image *image, uint64_t guest_slab, struct page_set *own)
{
    own_pages(image, guest_slab, false, own);
}

void chain_own_backed(const struct pcow_image *image, uint64_t guest_slab, struct page_set *own)
{
    own_pages(image, guest_slab, true, own);
}

int chain_back(struct pcow_image *image, uint64_t guest_slab, unsigned first, unsigned count, bool *changed)
{
    int ret = 0;

    *changed = false;
    if (!image->file.writable)
        return -EROFS;
    for (slab_ref ref = image->chain->head[guest_slab]; in_top(image, ref) && ret == 0; ref = image->slabs[slab_ref_slab(ref)].next)
        if (is_own(image, ref) && !slab_is_backed(image, slab_ref_slab(ref))) {
            ret = slab_back(image, slab_ref_slab(ref), first, count);
            *changed |= slab_is_backed(image, slab_ref_slab(ref));
        }
    return ret;
}
