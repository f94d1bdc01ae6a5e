/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An image with everything in it, and what it holds by what was written to it: a tree of snapshots,
 * VM state, a fork, a base. Each page has content of its own, so that it can be told wherever it
 * turns up.
 */
#ifndef PCOW_TEST_RICH_H
#define PCOW_TEST_RICH_H

#include "support.h"

#include "format/format2.h"

#define RICH_SIZE (8 * MIB)
#define RICH_PAGES (RICH_SIZE / PCOW_PAGE_SIZE)
#define RICH_LAYERS 5u                     /* ids from 1; the last is the active one */

struct rich {
    struct rich_layer {
        const char *name;                      /* NULL: the active layer */
        bool dead;
        uint32_t parent;                       /* id */
        bool page[RICH_PAGES];                 /* own */
        uint64_t state_size;
    } layer[RICH_LAYERS + 1];
    /* by the tables as they were made: of each file slab its owner, and of each page of it */
    uint64_t slabs;
    struct owner owner[64];
    struct page_set valid[64];
    uint64_t size;                             /* of the file */
    uint8_t *bytes;
    /* its metadata at an older moment, closed by its writer: two of the snapshots were there */
    uint8_t older[2 * PCOW_SLAB_SIZE];
};

/* What page of what layer: never zeros. */
void rich_page(uint32_t layer, uint64_t page, uint8_t bytes[PCOW_PAGE_SIZE]);
void rich_state(uint32_t layer, uint64_t size, uint8_t *bytes);

/*
 * Make image.pcow, base.pcow and fork.pcow in the scratch directory. mirror: the first has one,
 * which mends what is damaged.
 */
struct rich *rich_make(bool mirror);
void rich_free(struct rich *rich);
/* image.pcow as it was made, and no file of a repair. */
void rich_put_back(const struct rich *rich);
/* All that was written to layers that live: pages, VM state. */
uint64_t rich_data(const struct rich *rich);
uint64_t rich_states(const struct rich *rich);
/* What of it lies behind this place in the file. State is whole, or lost. */
uint64_t rich_behind(const struct rich *rich, uint64_t length);
/* Of each layer that lives, the pages in front of this place in the file are what they were. */
void rich_expect_rest(const struct rich *rich, uint64_t length);
/* Does each view read as it was made: of each layer that lives, VM state, and the fork? */
bool rich_is_right(const struct rich *rich);

#endif
