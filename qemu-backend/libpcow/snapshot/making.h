/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A snapshot in the making, in steps between which somebody else puts on the medium what they have
 * stored, while the guest runs. The tree is locked for a change around each call.
 *
 *   step       what it has stored                          on the medium before the next step
 *   ---------  ------------------------------------------  -------------------------------------------
 *   NONE       nothing
 *   RESERVED   id and slot of the next layer are used      that: a record with an id that was never
 *                                                          given out makes an image unusable
 *   RECORDED   name and date of the active layer, and      that: the commit names the record
 *              the record of the next one
 *   FROZEN     the next layer is the active one: the       that, and all that the guest had stored
 *              commit
 *   MARKED     the record of the layer says: snapshot      that, before anybody is told
 *   ABANDONED  (from FROZEN or MARKED) nothing yet         that the record says: hidden
 *
 * What a crash leaves of the first steps counts for nothing. From FROZEN to MARKED it leaves a layer
 * that is open, beneath the active one. It need not be whole, so it is hidden, and the next writer
 * merges it into the active one: see "Which layers are alive" in format.rst.
 */
#ifndef PCOW_SNAPSHOT_MAKING_H
#define PCOW_SNAPSHOT_MAKING_H

#include "image/image.h"

int making_check_name(struct pcow_image *image, const char *name, struct pcow_error *error);

/*
 * The guest runs. 0 at step RECORDED, with all of it on the medium; PCOW_FLUSH_FIRST: sync, and
 * call it again. Another name begins anew.
 */
int making_prepare(struct pcow_image *image, const char *name, int64_t date_seconds,
                   uint32_t date_nanoseconds, struct pcow_error *error);
/*
 * Nobody stores to the map meanwhile. -ESTALE: it is not prepared (any more). Another error: the
 * step is FROZEN all the same, but the range may not be write-protected.
 */
int making_freeze(struct pcow_image *image, struct pcow_error *error);
/*
 * The guest runs. 0: the snapshot is one, on the medium, and the step NONE again;
 * PCOW_FLUSH_FIRST as above. with_stores: wait for what the guest has stored, in class pmem as well.
 */
int making_finish(struct pcow_image *image, bool with_stores, struct pcow_error *error);
/*
 * No snapshot after all: what is frozen is hidden and merged. On failure the step is ABANDONED, and
 * the next operation, or the next writer, does it.
 */
int making_abandon(struct pcow_image *image, struct pcow_error *error);

/*
 * Somebody is about to change the tree: what is only prepared is forgotten, and what is frozen
 * becomes a snapshot now, with all the syncs that it takes.
 */
int making_settle(struct pcow_image *image, struct pcow_error *error);

#endif
