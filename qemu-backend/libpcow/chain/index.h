/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An index of a long list: where a guest slab was stored to between thousands of snapshots, each
 * page of it may lie in another one of thousands of file slabs, and a walk to it takes as many
 * cache misses. The index tells, for every page, the first slab of the list that holds it, counted
 * from one slab of the list on (`from`). A walk that gets to that slab ends there.
 *
 * Invariant: what is behind `from` does not change while the index stands. Slabs of the active
 * layer are in front of it; those of older layers lose no page that anybody sees. Whoever gives a
 * slab to another layer, or takes one off the list, forgets the index before. None is built while
 * slabs of the active layer may lie behind others: during a merge, and after one that has failed.
 *
 * Concurrency: an index is built and forgotten under the claim of its guest slab. Lookups may run
 * without it: a page's entry is replaced only by that of a newer slab which a walk down the list
 * would have found as well.
 */
#ifndef PCOW_CHAIN_INDEX_H
#define PCOW_CHAIN_INDEX_H

#include "chain/chain.h"

/* slabs that are walked over before an index is worth its 4 KiB */
#define LONG_LIST 64u

/*
 * Memory for the indexes of a chain; false: there is none. What is never used takes address space
 * alone, also where all memory is locked (mlockall(2)): it may not be accessed before it is used.
 */
bool index_init(struct chain *chain);
void index_free(struct chain *chain);
/* Bytes that the indexes take; chain may be NULL. */
uint64_t index_memory(const struct chain *chain);

/*
 * Build the index of a guest slab, or bring it up to date, if its list is long. The claim is held.
 * Async-signal-safe.
 */
void index_update(const struct pcow_image *image, uint64_t guest_slab);
/* The claim is held, or nobody looks anything up. Async-signal-safe. */
static inline void index_forget(struct chain *chain, uint64_t guest_slab)
{
    if (__atomic_load_n(&chain->index[guest_slab].from, __ATOMIC_RELAXED))
        __atomic_store_n(&chain->index[guest_slab].from, 0, __ATOMIC_RELEASE);
}

/* The slab from which on the index counts; 0: there is none. */
static inline slab_ref index_from(const struct chain *chain, uint64_t guest_slab)
{
    return __atomic_load_n(&chain->indexes, __ATOMIC_RELAXED)
        ? __atomic_load_n(&chain->index[guest_slab].from, __ATOMIC_ACQUIRE) : 0;
}

/* The first slab from there on that holds a page; 0: none. */
static inline slab_ref index_page(const struct chain *chain, uint64_t guest_slab, unsigned page)
{
    return __atomic_load_n(&chain->index[guest_slab].page[page], __ATOMIC_RELAXED);
}

/*
 * Behind the last page from this one on that the index finds in the same slab, *found; end at most.
 */
unsigned index_run_end(const struct chain *chain, uint64_t guest_slab, unsigned page, unsigned end,
                       slab_ref *found);

#endif
