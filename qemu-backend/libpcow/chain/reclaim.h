/* SPDX-License-Identifier: BSD-3-Clause */
/* Giving remains (image/remains.h) back to the pool, while others use the image. */
#ifndef PCOW_CHAIN_RECLAIM_H
#define PCOW_CHAIN_RECLAIM_H

#include "image/image.h"

/*
 * Punch out what is marked, in at most limit slabs (0: all). True if anything was. What others are working on is passed over and stays
 * due; what the file system does not take stays marked. The tables of layers are not looked at. Async-signal-safe.
 */
bool reclaim(struct pcow_image *image, unsigned limit);
/* The same for all of it, with what a former writer has left in free slabs. */
void reclaim_all(struct pcow_image *image);

#endif
