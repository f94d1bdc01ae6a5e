/* SPDX-License-Identifier: BSD-3-Clause */
#include "chain/index.h"

#include <sys/mman.h>

/* 64 MiB of addresses: their lists hold a million slabs. Beyond, lists are walked over */
#define MOST_INDEXES 16384u
#define INDEX_SIZE (PAGES_PER_SLAB * sizeof(slab_ref))

static void *reserve(uint64_t size, int access)
{
    void *memory = mmap(NULL, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static uint64_t size_of_all(const struct chain *chain)
{
    return (chain->guest_slabs + 1) * sizeof *chain->index;
}

bool index_init(struct chain *chain)
{
    chain->index = reserve(size_of_all(chain), PROT_READ | PROT_WRITE);
    chain->index_memory = reserve(MOST_INDEXES * INDEX_SIZE, PROT_NONE);
    return chain->index && chain->index_memory;
}

void index_free(struct chain *chain)
{
    if (chain->index)
        munmap(chain->index, size_of_all(chain));
    if (chain->index_memory)
        munmap(chain->index_memory, MOST_INDEXES * INDEX_SIZE);
}

uint64_t index_memory(const struct chain *chain)
{
    return chain ? (uint64_t)__atomic_load_n(&chain->indexes, __ATOMIC_RELAXED)
                       * (INDEX_SIZE + sizeof *chain->index)
                 : 0;
}

/* Its memory, which it keeps while the chain is there. */
static bool has_memory(struct chain *chain, struct page_index *index)
{
    unsigned used = __atomic_load_n(&chain->indexes, __ATOMIC_RELAXED);

    while (!index->page && used < MOST_INDEXES)
        if (__atomic_compare_exchange_n(&chain->indexes, &used, used + 1, true, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            slab_ref *page = chain->index_memory + (size_t)used * PAGES_PER_SLAB;

            if (mprotect(page, INDEX_SIZE, PROT_READ | PROT_WRITE))
                return false;          /* no memory, or no mapping is left */
            index->page = page;
        }
    return index->page;
}

static slab_ref next_ref(const struct chain *chain, slab_ref ref)
{
    return chain->file[slab_ref_level(ref)]->slabs[slab_ref_slab(ref)].next;
}

/* Take the pages that a slab holds out of those that are left. True: there are some still. */
static bool note_pages(const struct chain *chain, slab_ref *page, slab_ref ref,
                       struct page_set *left)
{
    const struct page_set *valid = &chain->file[slab_ref_level(ref)]->valid[slab_ref_slab(ref)];
    uint64_t any = 0;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
        uint64_t found = left->word[w] & page_set_word(valid, w);

        left->word[w] &= ~found;
        any |= left->word[w];
        for (; found; found &= found - 1)
            __atomic_store_n(&page[w * 64 + (unsigned)__builtin_ctzll(found)], ref,
                             __ATOMIC_RELAXED);
    }
    return any;
}

/*
 * Let it count from this slab on. What it says of the list from its old slab on, if the list has
 * that, stays right.
 */
static void build(const struct chain *chain, struct page_index *index, slab_ref from)
{
    struct page_set left = {{0}};
    bool some = true;
    slab_ref ref = from;

    page_set_add_range(&left, 0, PAGES_PER_SLAB);
    for (; ref && ref != index->from && some; ref = next_ref(chain, ref))
        some = note_pages(chain, index->page, ref, &left);
    for (unsigned page = 0; page < PAGES_PER_SLAB && !ref && some; page++)
        if (page_set_has(&left, page))
            __atomic_store_n(&index->page[page], 0, __ATOMIC_RELAXED);
    __atomic_store_n(&index->from, from, __ATOMIC_RELEASE);
}

void index_update(const struct pcow_image *image, uint64_t guest_slab)
{
    struct chain *chain = image->chain;
    struct page_index *index = &chain->index[guest_slab];
    slab_ref first = chain->head[guest_slab], from = index_from(chain, guest_slab);
    unsigned steps = 0;

    /* Slabs of the active layer lie among others then, and get pages. */
    if (chain->ragged || chain->format1 || __atomic_load_n(&image->merging, __ATOMIC_ACQUIRE)
        || chain_is_mixed(chain))
        return;
    while (first && slab_ref_level(first) == chain->levels
           && image->slabs[slab_ref_slab(first)].layer == image_active(image))
        first = next_ref(chain, first);
    for (slab_ref ref = first; ref && ref != from; ref = next_ref(chain, ref))
        if (++steps > LONG_LIST) {
            if (has_memory(chain, index))
                build(chain, index, first);
            return;
        }
}

unsigned index_run_end(const struct chain *chain, uint64_t guest_slab, unsigned page, unsigned end,
                       slab_ref *found)
{
    *found = index_page(chain, guest_slab, page);
    while (++page < end && index_page(chain, guest_slab, page) == *found)
        ;
    return page;
}
