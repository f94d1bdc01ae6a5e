/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Prepared slabs: file slabs that are taken, whose blocks are allocated and read as zeros, whose
 * metadata pages exist, and whose pages are in the window's page table. The thread of the monitor
 * makes them (monitor/ahead.c); the fault path takes one without a lock and without a system call,
 * and then stores into it through the window.
 *
 * image->prepared says page by page where blocks are known to be there, and to hold zeros as long
 * as the page is not valid. In class pmem they are settled (see image/file.h), also when it is
 * valid. A prepared slab has no owner word, so after a crash it is a free slab like any other. What
 * never becomes valid is given back: punched out when the map goes, when it has been idle, and
 * before a store is told that the pool is full.
 *
 * In class page-cache nothing is prepared: what is not used could not be given back, see remains.h.
 */
#ifndef PCOW_IMAGE_PREPARE_H
#define PCOW_IMAGE_PREPARE_H

#include "image/image.h"

/* power of two; slabs that may be ready at one time (512 MiB) */
#define PREPARED_MAX 256u

/*
 * Ready slabs, first in, first out: one producer (the thread), many consumers. 0: an empty place.
 */
struct prepared_ring {
    uint64_t slot[PREPARED_MAX];
    uint64_t head, tail;               /* counts; the place is the count modulo the size */
    uint64_t missed;                   /* slabs that were wanted while there was none */
    uint64_t dropped;                  /* of head: given back and not used */
    bool used;                         /* something was prepared */
};

/* Begin to keep prepared slabs / give all of them back and end it. */
int prepare_begin(struct pcow_image *image);
void prepare_end(struct pcow_image *image);

/*
 * Take a slab that nobody owns yet, and give it all of its blocks, which read as zeros: 0, -ENOSPC
 * and others. To give it back: remains_discard() and slab_untake().
 */
int slab_take_whole(struct pcow_image *image, uint64_t *slab);

/* False in class page-cache. Async-signal-safe. */
static inline bool prepare_is_of_use(const struct pcow_image *image)
{
    return image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE;
}

/* How many are ready. */
unsigned prepared_count(const struct pcow_image *image);
/* Take a ready slab. Async-signal-safe. */
bool prepared_pop(struct pcow_image *image, uint64_t *slab);
/* Make one more ready: 0 or -ENOSPC and others. For one thread only. */
int prepare_one(struct pcow_image *image);
/* Give ready slabs back until at most keep are left; returns how many were. Async-signal-safe. */
unsigned prepared_drop(struct pcow_image *image, unsigned keep);

/*
 * Prepare pages [first, first + count) of a slab that are not valid, in two steps: give them
 * blocks, and count them as prepared. The claim of the guest slab is held in each. Class pmem:
 * after a commit in between.
 */
int prepare_blocks(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count);
int prepare_pages(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count);
/*
 * Give the blocks of pages back that are prepared and not valid; returns pages. The claim is held,
 * or nobody else uses the slab.
 */
unsigned prepared_trim(struct pcow_image *image, uint64_t slab);
/* Is the page prepared, and how many from it on (at most to end) have the same answer? */
bool prepared_run(const struct pcow_image *image, uint64_t slab, unsigned page, unsigned *end);

/* How many more slabs may be prepared without taking the last of the pool's space. */
uint64_t prepare_room(const struct pcow_image *image);

/* As slab_take_unsettled(), for guest data: a prepared one if there is one. Async-signal-safe. */
int slab_take_ready(struct pcow_image *image, uint64_t *slab);

#endif
