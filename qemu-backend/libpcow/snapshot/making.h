/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A snapshot in the making, in steps between which somebody else puts on the medium what they have
 * stored, while the guest runs. The tree is locked for a change around each call.
 *
 *   step       what it has stored                         on the medium before the next step
 *   ---------  -----------------------------------------  -----------------------------------------
 *   NONE       nothing
 *   RESERVED   id and slot of the next layer are used     that: a record with an id that was never
 *                                                         given out makes an image unusable
 *   RECORDED   name and date of the active layer, and     that: the commit names the record
 *              the record of the next one
 *   FROZEN     the next layer is the active one: the      that, and all that the guest had stored
 *              commit
 *   MARKED     the record of the layer says: snapshot     that, before anybody is told
 *   ABANDONED  (from FROZEN or MARKED) nothing yet        that the record says: hidden
 *
 * What a crash leaves of the first steps counts for nothing. From FROZEN to MARKED it leaves a
 * layer that is open, beneath the active one. It need not be whole, so it is hidden, and the next
 * writer merges it into the active one: see "Which layers are alive" in format.rst.
 */
#ifndef PCOW_SNAPSHOT_MAKING_H
#define PCOW_SNAPSHOT_MAKING_H

#include "image/image.h"

int making_check_name(struct pcow_image *image, const char *name, struct pcow_error *error);

/*
 * The guest runs. 0 at step RECORDED, with all of it on the medium; PCOW_FLUSH_FIRST: sync, and
 * call it again. Another name or date begins anew. With *token, which is another one for each
 * beginning, the other steps tell theirs from one that somebody else has begun meanwhile.
 */
int making_prepare(struct pcow_image *image, const char *name, int64_t date_seconds,
                   uint32_t date_nanoseconds, uint64_t *token, struct pcow_error *error);
/*
 * Nobody stores to the map meanwhile; the tree need not be locked: a record that was there becomes
 * the active one's by one word. -ESTALE: it is not prepared (any more). Another error: the step may
 * be FROZEN all the same, and the range not write-protected.
 */
int making_freeze(struct pcow_image *image, uint64_t token, struct pcow_error *error);
/*
 * The guest runs; the tree need not be locked. 0: the snapshot is one, on the medium, and the step
 * NONE again; PCOW_FLUSH_FIRST as above. with_stores: wait for what the guest has stored, in class pmem as
 * well. Until then nobody can open it: it is locked, as one that is being deleted.
 */
int making_finish(struct pcow_image *image, uint64_t token, bool with_stores,
                  struct pcow_error *error);
/*
 * No snapshot after all: from here on the step is ABANDONED, or NONE if nothing was frozen. Without
 * a lock.
 */
void making_give_up(struct pcow_image *image, uint64_t token);

/*
 * Somebody is about to change the tree: what is only prepared is forgotten, what is frozen becomes
 * a snapshot now, with all the syncs that it takes, and what is given up is hidden and merged.
 */
int making_settle(struct pcow_image *image, struct pcow_error *error);

/* Of what is being made. */
uint64_t making_token(const struct pcow_image *image);
/* The layer that a token is about. */
static inline uint32_t making_layer(uint64_t token)
{
    return (uint32_t)token;
}

#endif
