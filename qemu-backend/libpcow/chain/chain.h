/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The chain as the guest sees it: for every guest slab a list of the file slabs that hold pages of
 * it, newest first, through all layers of all files. A page is found by walking the list until a
 * valid set has it; the list is as long as the number of layers that touched this slab, whatever
 * the depth of the chain.
 *
 * Concurrency: a list and the active layer's valid sets for one guest slab change only under that
 * slab's claim. Lookups may run without it: a new head is published with release order after its
 * fields, valid bits only ever appear for pages whose data is complete, and merge keeps the order
 * of the list.
 */
#ifndef PCOW_CHAIN_CHAIN_H
#define PCOW_CHAIN_CHAIN_H

#include "image/image.h"
#include "util/sparse_set.h"

/*
 * A file slab in the chain: level of its file (1 = the bottom of the chain) and its number there.
 * 0: none.
 */
typedef uint64_t slab_ref;

#define REF_SLAB_BITS 48u

static inline slab_ref slab_ref_make(unsigned level, uint64_t slab)
{
    return (slab_ref)level << REF_SLAB_BITS | slab;
}

static inline unsigned slab_ref_level(slab_ref ref)
{
    return (unsigned)(ref >> REF_SLAB_BITS);
}

static inline uint64_t slab_ref_slab(slab_ref ref)
{
    return ref & ((UINT64_C(1) << REF_SLAB_BITS) - 1);
}

/* What it takes to build the lists. */
struct chain_memory {
    const struct layer **path;
    uint64_t *sorted;
    size_t *start;
    uint64_t layers, slabs;                        /* that they have room for */
};

/* Of one guest slab, see chain/index.h. */
struct page_index {
    slab_ref from;                                 /* 0: none now */
    /* PAGES_PER_SLAB of them; NULL: there was none yet */
    slab_ref *page;
};

struct chain {
    unsigned levels;                               /* files; the top one has level == levels */
    struct pcow_image *file[PCOW_MAX_CHAIN_DEPTH + 1]; /* by level, from 1 */
    /* the bottom file has a base that was not opened */
    bool incomplete;
    /* a file of format 1 ends inside a slab: see reach */
    bool ragged;
    /* of the top view, the last one possibly partial (format 1) */
    uint64_t guest_slabs;
    slab_ref *head;                                /* by guest slab */
    uint64_t end;                                  /* while it is built: no head at or above */
    uint8_t *claim;                                /* by guest slab; 1 while somebody changes it */
    /*
     * guest slabs that have, or had, a list, or were claimed: all others are as they were at first
     */
    struct sparse_set used;
    bool format1;                                  /* a file of format 1 is among them */
    /* a merge has failed since the lists were built, see chain_is_mixed() */
    bool mixed;
    struct page_index *index;                      /* by guest slab */
    slab_ref *index_memory;
    unsigned indexes;                              /* that have memory */
    struct chain_memory memory;                    /* while it is built, or about to be */
    /* by level: so many pages of the guest may show from it, as no file above ends before them */
    uint64_t reach[PCOW_MAX_CHAIN_DEPTH + 1];
};

struct place {
    bool present;
    unsigned level;
    uint64_t offset;                               /* in that file */
    /* in the active layer of the top file, which may be stored to */
    bool own;
    /* as many from here on have one answer and lie in one piece */
    unsigned pages;
};

/*
 * The chain of this image, built on first use. NULL with *error set if memory is short or the base
 * was not opened.
 */
struct chain *chain_get(struct pcow_image *image, struct pcow_error *error);
void chain_free(struct pcow_image *image);
/*
 * Before a change of the tree that cannot be taken back: the memory that it takes to build the
 * lists anew, after which chain_bring_back() cannot fail unless the size changes.
 */
int chain_reserve(struct pcow_image *image, struct pcow_error *error);
/*
 * Around a change of the tree, while nobody looks anything up: take the lists apart (what is owned
 * must not have changed yet), and build them anew, in time that does not depend on the size of the
 * image. NULL: there were none. After -ENOMEM there are none either. Flushes and statistics of a
 * map may be asked for meanwhile: they find no chain, or lists that are not complete.
 */
struct chain *chain_set_aside(struct pcow_image *image);
int chain_bring_back(struct pcow_image *image, struct chain *chain, struct pcow_error *error);

/*
 * Where is page (of the slab, 0 to 511) of a guest slab? At most max_pages are looked at.
 * Async-signal-safe.
 */
struct place chain_find(const struct pcow_image *image, uint64_t guest_slab, unsigned page,
                        unsigned max_pages);

/* The first guest slab from one on that is used; guest_slabs: none. Async-signal-safe. */
static inline uint64_t chain_next_used(const struct chain *chain, uint64_t guest_slab)
{
    return sparse_set_next(&chain->used, guest_slab);
}

/*
 * In how many pieces lie the first pages of a guest slab? In one walk down its list.
 * Async-signal-safe.
 */
unsigned chain_count_pieces(const struct pcow_image *image, uint64_t guest_slab, unsigned pages);

/*
 * Claim a guest slab for changes / let it go. Async-signal-safe; claims are short and never nested.
 */
void chain_claim(struct chain *chain, uint64_t guest_slab);
void chain_release(struct chain *chain, uint64_t guest_slab);

/*
 * Take a slab of the top file off the list of its guest slab. The claim is held, and nobody looks
 * anything up without it meanwhile.
 */
void chain_unlink(struct pcow_image *image, uint64_t guest_slab, uint64_t slab);

/*
 * A merge that fails leaves slabs of two layers among each other, and later merges may give some of
 * them to the active layer: until the lists are built anew nothing is known of their order.
 */
static inline bool chain_is_mixed(const struct chain *chain)
{
    return __atomic_load_n(&chain->mixed, __ATOMIC_ACQUIRE);
}

static inline void chain_set_mixed(struct chain *chain)
{
    __atomic_store_n(&chain->mixed, true, __ATOMIC_RELEASE);
}

/* The first own slab of a list from this reference on; 0: none. */
slab_ref chain_next_own(const struct pcow_image *image, slab_ref ref);
/*
 * The pages of a guest slab that the active layer holds; _backed: those of them in slabs that may
 * be mapped for stores, see slab_back().
 */
void chain_own_pages(const struct pcow_image *image, uint64_t guest_slab, struct page_set *own);
void chain_own_backed(const struct pcow_image *image, uint64_t guest_slab, struct page_set *own);
/*
 * slab_back() for what the active layer holds of a guest slab; *changed: slabs have become backed.
 * The claim is held. Async-signal-safe.
 */
int chain_back(struct pcow_image *image, uint64_t guest_slab, unsigned first, unsigned count,
               bool *changed);

/*
 * Make pages [first, first + count) of a guest slab valid in the active layer, keeping what they
 * read as, or, if data is not NULL, with this content (count * 4 KiB) for the pages that were not
 * valid. The caller holds the claim. -ENOSPC pool full, -EIO source unreadable or file not
 * writable; the pages that are valid afterwards are whole. *copied and *zeroed (may be NULL) count
 * pages that have become valid, also when it fails in the end. Async-signal-safe. Crash-safe: see
 * "Update protocols" in format.rst.
 */
int chain_own(struct pcow_image *image, uint64_t guest_slab, unsigned first, unsigned count,
              const void *data, uint64_t *copied, uint64_t *zeroed);
/*
 * The same for any pages of the slab, which in class page-cache are put on the medium together:
 * what hides older pages costs one sync, however many they are. data: of all pages of the slab, or
 * NULL.
 */
int chain_own_set(struct pcow_image *image, uint64_t guest_slab, const struct page_set *wanted,
                  const void *data);
/*
 * As pcow_write() of these pages, which nothing in the file holds; page i of the slab is data + i *
 * 4 KiB.
 */
int chain_write_pages(struct pcow_image *image, uint64_t guest_slab, const struct page_set *pages,
                      const void *data, struct pcow_error *error);
/* They become pages of zeros without blocks. */
int chain_own_zeros(struct pcow_image *image, uint64_t guest_slab, const struct page_set *wanted);

/* chain/own.c: forget own pages beyond the guest's end, used before the image grows */
int chain_drop_own_from(struct pcow_image *image, uint64_t first_guest_slab,
                        struct pcow_error *error);

#endif
