/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the guest and the operator may find after a crash. A page holds its own number and a
 * generation in every word, so that a page of another place, time or file is told from the right
 * one. A world is one answer to "what is in the image"; an operation under way allows two of them,
 * before and after, and nothing between.
 */
#ifndef PCOW_TEST_CRASH_WORLD_H
#define PCOW_TEST_CRASH_WORLD_H

#include "support.h"

#define CRASH_PAGES 1536u                      /* 6 MiB */
#define CRASH_SNAPSHOTS 4u

/* Generations that a word of the page may have; the last is what was stored last. 0: zeros. */
struct cell {
    uint16_t generation[4];
    uint16_t count;
};

struct view {
    uint64_t size;
    struct cell page[CRASH_PAGES];
};

struct world {
    /* so that the generation of the image must have been raised */
    bool changed;
    bool sealed;
    bool amending;                             /* it may be: that is to be done again, then */
    struct view active;
    unsigned snapshots;
    struct saved {
        char name[16], parent[16];             /* parent "": none */
        uint64_t state_size;
        uint16_t state_generation;
        struct view view;
    } saved[CRASH_SNAPSHOTS];
    bool has_base_view;                        /* the base alone is looked at too */
    struct view base;
};

struct expectation {
    const struct world *world[2];
    unsigned worlds;
    /* of the recording; content from there on needs a raised image generation */
    uint16_t first_generation;
    uint64_t image_generation;                 /* at its beginning */
};

/* words of VM state at its beginning and at its end; between them nothing is stored */
#define STATE_EDGE 1024u

void page_fill(uint64_t *words, uint64_t page, uint16_t generation);
void state_fill(uint64_t *words, size_t count, uint16_t generation);

void view_put(struct view *view, unsigned page, uint16_t generation);
/* Only the newest generation from now on, of a page / of every page. */
void cell_settle(struct cell *cell);
void view_settle(struct view *view);
bool view_allows(const struct view *view, unsigned page, uint64_t word);
struct saved *world_find(struct world *world, const char *name);
void world_remove(struct world *world, const char *name);

/*
 * Which world the image at path is, with every page as it is there. False if none, or if a page
 * holds words of two generations.
 */
bool world_recognize(const char *path, const struct expectation *expectation, struct world *world);

/*
 * Which of the worlds the open, unmapped image is: a bit for each; 0: none, and reasons says why.
 */
unsigned world_compare(pcow_image *image, const struct expectation *expectation, char *reasons,
                       size_t room);
/*
 * Write to pages that were never there, take, leave and delete a snapshot. NULL, or what is wrong.
 */
const char *world_live_on(pcow_image *image, const struct world *world);
/*
 * Damage, or remains where there may be none? tidied: a writer had the image open since. NULL, or
 * what.
 */
const char *world_check(const char *path, const char *when, bool tidied);

/*
 * Judge the files of directory; top is the name of the image there, base NULL or that of its base.
 * NULL, or what is wrong.
 */
const char *world_judge(const char *directory, const char *top, const char *base,
                        const struct expectation *expectation);

#endif
