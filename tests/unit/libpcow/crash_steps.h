/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The steps of a scenario: each does something to the image, and says to the model and to the log
 * what must hold before and after.
 */
#ifndef PCOW_TEST_CRASH_STEPS_H
#define PCOW_TEST_CRASH_STEPS_H

#include "crash.h"

/* From here on the image is as the model is now, or, if before is not NULL, as it was before. */
void step_expect(struct crash *c, const struct world *before);

/* An operation that happens wholly or not at all, and is durable when it returns. */
#define OPERATION(c, alter, call)                        \
    do {                                                 \
        struct world operation_before = (c)->now;        \
                                                         \
        alter;                                           \
        (c)->now.changed = true;                         \
        step_expect((c), &operation_before);                  \
        MUST(call);                                      \
        step_expect((c), NULL);                               \
    } while (0)

/* pcow_write() of whole pages / pcow_write_zeroes() / pcow_flush(). */
void step_put(struct crash *c, unsigned first, unsigned count);
void step_zero(struct crash *c, unsigned first, unsigned count);
void step_flush(struct crash *c);
/* The guest stores to a page of its memory (class pmem: it does not flush yet) / flushes it. */
void step_guest_store(struct crash *c, unsigned page);
void step_guest_flush(struct crash *c, unsigned page);
/*
 * Map it; prepared: wait until slabs are ready that were taken, emptied and filled with zeros ahead
 * of the guest, without owner.
 */
void step_map(struct crash *c);
void step_map_prepared(struct crash *c);
/* Mapped; the mirror follows what was stored until now, but in class page-cache. */
void step_follow(struct crash *c);
/* Mapped; until spare slabs are there, or none any more. */
void step_keep_spare(struct crash *c, bool keep);
void step_unmap(struct crash *c);
/* Snapshots and sizes: whole or not at all. */
void step_snapshot(struct crash *c, const char *name);
/*
 * The same while the guest runs on: up to the commit, and from there to where it counts. Between
 * the two there is none of it.
 */
void step_prepare(struct crash *c, const char *name);
void step_freeze(struct crash *c, const char *name);
void step_finish(struct crash *c);
void step_abandon(struct crash *c);
void step_revert(struct crash *c, const char *name);
/* To what is below the image, which has no snapshots. */
void step_revert_to_base(struct crash *c);
void step_delete(struct crash *c, const char *which);
void step_reclaim(struct crash *c);
void step_rename(struct crash *c, const char *name, const char *new_name);
void step_resize(struct crash *c, uint64_t size);
void step_vm_state(struct crash *c, const char *name, size_t size);
/* The same in a full pool: it is made of what is kept for that. */
void step_last_vm_state(struct crash *c, const char *name, size_t size);

#endif
