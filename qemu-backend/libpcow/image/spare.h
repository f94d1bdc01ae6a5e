/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the last snapshot of a guest is made of when the pool has no room any more: slabs that are
 * taken, with their blocks and the pages of their metadata. As a prepared slab (image/prepare.h) a
 * spare one has no owner word: nothing on the medium tells of it, and after a crash it is a free
 * slab like any other. The thread of the map takes them, and gives them back.
 *
 * One more, the loan, is for stores that nobody can put off: of a thread that would wait for space
 * in a trap with a lock that everybody needs who would make the snapshot. Such a store needs a
 * block in a place of its own, so one of the loan is punched out for it, and is then anybody's:
 * whoever else waits for space may be faster, and then the next one goes.
 */
#ifndef PCOW_IMAGE_SPARE_H
#define PCOW_IMAGE_SPARE_H

#include "image/image.h"

#define SPARE_MAX 1024u                /* slabs (2 GiB), without the loan */
/*
 * Free records of layers: for the snapshot, for the one that is spare anyway, for two that it is
 * renamed by.
 */
#define SPARE_RECORDS 4u

struct spare {
    bool kept;
    unsigned wanted;                   /* slabs, without the loan */
    bool in_use;                       /* who makes a snapshot gets them */
    bool records_due;                  /* there may be less than SPARE_RECORDS with blocks */
    uint64_t slab[SPARE_MAX];          /* 0: an empty place */
    uint64_t loan;                     /* 0: none */
    unsigned loan_left;                /* pages from its beginning on that have their blocks */
    unsigned lending;                  /* threads that are about to punch some out */
    uint64_t tried_ns;                 /* of the thread: when there was no space */
};

/* So many are wanted from now on / none at all: 0 or -ENOMEM. For one thread. */
int spare_keep(struct pcow_image *image, unsigned slabs);
void spare_give_up(struct pcow_image *image);
/* Whoever makes a snapshot gets them, or not. */
void spare_use(struct pcow_image *image, bool use);
bool spare_is_in_use(const struct pcow_image *image);
bool spare_is_kept(const struct pcow_image *image);

/* How many there are, or should be, with the loan. */
unsigned spare_count(const struct pcow_image *image);
unsigned spare_wanted(const struct pcow_image *image);

/*
 * Of a slab that is not: it has its blocks, and reads as zeros. False: there is none for who asks.
 */
bool spare_take(struct pcow_image *image, uint64_t *slab);
/* A block for a store that cannot wait. False: there is none. Async-signal-safe. */
bool spare_lend(struct pcow_image *image);
/* Records were used. */
void spare_note_records(struct pcow_image *image);

/* By the thread: is there something to do? / Do some of it: 0 (there may be more), -ENOSPC, ... */
bool spare_is_due(const struct pcow_image *image);
void spare_give_back_surplus(struct pcow_image *image);
int spare_fill(struct pcow_image *image);
/* Once it has ended: nobody stores any more. */
void spare_end(struct pcow_image *image);

#endif
