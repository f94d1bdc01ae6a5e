/* SPDX-License-Identifier: BSD-3-Clause */
/* Giving remains (image/remains.h) back to the pool, while others use the image. */
#ifndef PCOW_CHAIN_RECLAIM_H
#define PCOW_CHAIN_RECLAIM_H

#include "image/image.h"

/*
 * Punch out what is marked, in at most limit slabs (0: all). True if anything was. With a limit,
 * which only one thread may give, it goes on where it ended the last time. What others are working
 * on is passed over and stays due; what the file system does not take stays marked, and is tried
 * again when all is gone through anew. The tables of layers are not looked at. Async-signal-safe.
 */
bool reclaim(struct pcow_image *image, unsigned limit);
/*
 * slabs_release() for who may have guests that store meanwhile: what is punched out beside it is
 * never a slab that somebody has taken since. No claim is held.
 */
int reclaim_release(struct pcow_image *image, slab_condition *condition, const void *opaque);
/*
 * Give back what is prepared in slabs that have an owner, and is not used. Returns pages. No claim
 * is held. Async-signal-safe.
 */
uint64_t reclaim_prepared(struct pcow_image *image);
/*
 * The same for slabs of layers that are frozen, from *next on and up to the first that had any; a
 * few thousand are looked at. True if it was not the last slab.
 */
bool reclaim_frozen(struct pcow_image *image, uint64_t *next);
/* Asked under the claim: is what is prepared in this slab soon used? */
typedef bool keep_prepared_fn(void *opaque, uint64_t guest_slab, uint64_t slab);
/* In such steps, for those of all layers that keep does not want kept. */
bool reclaim_unused(struct pcow_image *image, uint64_t *next, keep_prepared_fn *keep, void *opaque);
/*
 * The pool is full: give back all of that, and the slabs that are ready. True if there was
 * something, so that a second try makes sense. No claim is held. Async-signal-safe.
 */
bool reclaim_for_space(struct pcow_image *image);
/* Remains again, and with what a former writer has left in free slabs. */
void reclaim_all(struct pcow_image *image);

#endif
