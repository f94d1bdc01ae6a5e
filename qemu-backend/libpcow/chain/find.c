/* SPDX-License-Identifier: BSD-3-Clause */
/* Where a page lies, and which pages are own. Everything here is async-signal-safe. */
#include <errno.h>
#include <string.h>

#include "chain/chain.h"
#include "chain/index.h"
#include "format1/format1.h"

/*
 * Own slabs are not always in front of those of older layers: while a snapshot is deleted its slabs
 * become the child's one by one, and after an error some stay what they were.
 */
static bool in_top(const struct pcow_image *image, slab_ref ref)
{
    return ref && slab_ref_level(ref) == image->chain->levels && !image->format1;
}

static bool is_own(const struct pcow_image *image, slab_ref ref)
{
    return in_top(image, ref) && image->slabs[slab_ref_slab(ref)].layer == image_active(image)
           && image->view == image_active(image);
}

/*
 * May there be own slabs behind this one, which is not? Those of the active layer are in front, but
 * for what a merge gives it: they lie among those of the layer that is merged, its parent. What
 * comes behind is older, however long the list is. After a merge that has failed any may be behind
 * any: what it had given before may have become the active layer's since, by another merge.
 */
static bool may_be_followed(const struct pcow_image *image, slab_ref ref)
{
    uint32_t merging = __atomic_load_n(&image->merging, __ATOMIC_ACQUIRE);

    return (merging && image->slabs[slab_ref_slab(ref)].layer == merging)
           || chain_is_mixed(image->chain);
}

slab_ref chain_next_own(const struct pcow_image *image, slab_ref ref)
{
    uint32_t active = image_active(image);

    if (image->view != active)
        return 0;
    for (; in_top(image, ref); ref = image->slabs[slab_ref_slab(ref)].next) {
        if (image->slabs[slab_ref_slab(ref)].layer == active)
            return ref;
        if (!may_be_followed(image, ref))
            break;
    }
    return 0;
}

/* The page of a guest slab behind the last one that shows from a level. */
static unsigned reach_in_slab(const struct chain *chain, unsigned level, uint64_t guest_slab)
{
    uint64_t first = guest_slab * PAGES_PER_SLAB, reach = chain->reach[level];

    return reach >= first + PAGES_PER_SLAB ? PAGES_PER_SLAB
           : reach > first                 ? (unsigned)(reach - first)
                                           : 0;
}

/* Of a page that a slab holds. */
static void put_place(const struct pcow_image *image, slab_ref ref, unsigned page,
                      struct place *place)
{
    place->present = true;
    place->level = slab_ref_level(ref);
    place->offset = (slab_ref_slab(ref) << SLAB_BITS) + page * PCOW_PAGE_SIZE;
    place->own = is_own(image, ref);
}

struct place chain_find(const struct pcow_image *image, uint64_t guest_slab, unsigned page,
                        unsigned max_pages)
{
    const struct chain *chain = image->chain;
    struct place place = {.pages = max_pages < PAGES_PER_SLAB - page ? max_pages
                                                                     : PAGES_PER_SLAB - page};
    unsigned end = page + place.pages;
    slab_ref from = index_from(chain, guest_slab);

    for (slab_ref ref = __atomic_load_n(&chain->head[guest_slab], __ATOMIC_ACQUIRE); ref;) {
        const struct pcow_image *file = chain->file[slab_ref_level(ref)];
        uint64_t slab = slab_ref_slab(ref);

        if (ref == from) {
            end = index_run_end(chain, guest_slab, page, end, &ref);
            if (ref)
                put_place(image, ref, page, &place);
            break;
        }
        if (chain->ragged) {
            unsigned reach = reach_in_slab(chain, slab_ref_level(ref), guest_slab);

            if (page >= reach)
                break;                 /* what is below reaches no further */
            end = reach < end ? reach : end;
        }
        if (file->format1) {
            unsigned run = 1;
            bool found =
                format1_find(file, guest_slab * PAGES_PER_SLAB + page, &place.offset, &run);

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
                put_place(image, ref, page, &place);
                break;
            }
        }
        ref = file->slabs[slab].next;
    }
    place.pages = end - page;
    return place;
}

/* One after the other: as often as it takes to walk the list down to where each begins. */
static unsigned count_by_looking(const struct pcow_image *image, uint64_t guest_slab,
                                 unsigned pages)
{
    unsigned pieces = 0;

    for (unsigned page = 0; page < pages; pieces++)
        page += chain_find(image, guest_slab, page, pages - page).pages;
    return pieces;
}

/*
 * Pieces that begin in this word of a set, all of whose pages lie in one slab. last: its last page
 * before, in the same place of the word.
 */
static unsigned count_begins(uint64_t word, uint64_t last)
{
    return (unsigned)__builtin_popcountll(word & ~(word << 1 | last));
}

/* Of the pages that are left: pieces begin where there was none before, or one in another slab. */
static unsigned count_by_index(const struct chain *chain, uint64_t guest_slab,
                               const struct page_set *left)
{
    unsigned pieces = 0, page = 0;
    slab_ref found;

    while (page < PAGES_PER_SLAB) {
        unsigned end = page_set_run_end(left, page, PAGES_PER_SLAB);

        if (!page_set_has(left, page))
            page = end;
        for (; page < end; pieces++)
            page = index_run_end(chain, guest_slab, page, end, &found);
    }
    return pieces;
}

unsigned chain_count_pieces(const struct pcow_image *image, uint64_t guest_slab, unsigned pages)
{
    const struct chain *chain = image->chain;
    struct page_set left = {{0}};
    unsigned pieces = 0;
    slab_ref from = index_from(chain, guest_slab),
             ref = __atomic_load_n(&chain->head[guest_slab], __ATOMIC_ACQUIRE);

    page_set_add_range(&left, 0, pages);
    for (;; ref = ref ? chain->file[slab_ref_level(ref)]->slabs[slab_ref_slab(ref)].next : 0) {
        const struct pcow_image *file = ref ? chain->file[slab_ref_level(ref)] : NULL;
        uint64_t any = 0, last = 0;

        if (ref && ref == from)
            return pieces + count_by_index(chain, guest_slab, &left);
        if (file && (file->format1 || chain->ragged))
            return count_by_looking(image, guest_slab, pages);
        /* What no slab has is a piece wherever it is one run. */
        for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
            uint64_t found =
                left.word[w]
                & (file ? page_set_word(&file->valid[slab_ref_slab(ref)], w) : UINT64_MAX);

            pieces += count_begins(found, last);
            last = found >> 63;
            left.word[w] &= ~found;
            any |= left.word[w];
        }
        if (!ref || !any)
            return pieces;
    }
}

static void own_pages(const struct pcow_image *image, uint64_t guest_slab, bool backed,
                      struct page_set *own)
{
    memset(own, 0, sizeof *own);
    for (slab_ref ref = chain_next_own(
             image, __atomic_load_n(&image->chain->head[guest_slab], __ATOMIC_ACQUIRE));
         ref; ref = chain_next_own(image, image->slabs[slab_ref_slab(ref)].next)) {
        if (backed && !slab_is_backed(image, slab_ref_slab(ref)))
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

int chain_back(struct pcow_image *image, uint64_t guest_slab, unsigned first, unsigned count,
               bool *changed)
{
    int ret = 0;

    *changed = false;
    if (!image->file.writable)
        return -EROFS;
    for (slab_ref ref = chain_next_own(image, image->chain->head[guest_slab]); ref && ret == 0;
         ref = chain_next_own(image, image->slabs[slab_ref_slab(ref)].next))
        if (!slab_is_backed(image, slab_ref_slab(ref))) {
            ret = slab_back(image, slab_ref_slab(ref), first, count);
            *changed |= slab_is_backed(image, slab_ref_slab(ref));
        }
    return ret;
}
