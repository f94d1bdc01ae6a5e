/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A chain of three files and four snapshots on which every page was written, and raw files with the
 * same content. One of these is mapped as the published method maps what it has written, whatever
 * the past: by clusters of 64 KiB. Word 0 of a page tells its number and who wrote it last; the
 * rest of a page is zeros. After chain_write_all() the caller may store words with the right page
 * number to the start of any line.
 */
#ifndef BENCH_CHAIN_H
#define BENCH_CHAIN_H

#include "sides.h"

enum { CHAIN_PLAIN, CHAIN_CONTROL, CHAIN_PAPER, CHAIN_RAW };

#define CHAIN_FREE 0x80u                       /* writers from here on are the caller's */
#define CHAIN_WRITTEN 0xffu                    /* the writer of what chain_write_all() stored */

static inline uint64_t chain_word(uint64_t page, unsigned writer)
{
    return page << 8 | writer;
}

static inline uint64_t chain_word_page(uint64_t word)
{
    return word >> 8;
}

struct chain_sides {
    const struct bench *bench;
    /* CHAIN_CONTROL: what two equal files differ by; CHAIN_PAPER: a mapping for each cluster */
    struct raw raw[CHAIN_RAW];
    pcow_image *image;
    pcow_map *map;
    uint8_t *pcow;
    uint8_t *writer;                           /* by page: who wrote it last */
    uint64_t pages;
};

/*
 * unit: 2 MiB or 64 KiB, what a layer overwrites at a time, in random places. raw_first: which
 * files are made first, for where they come to lie in physical memory. copy_on_read: of the image
 * on top, see pcow_set_copy_on_read(); all of it has been read when this returns.
 */
int chain_open(const struct bench *bench, uint64_t unit, bool raw_first, bool copy_on_read,
               struct chain_sides *sides, struct pcow_error *error);
/*
 * Store to every page of all sides, through the maps: all pages are the active layer's afterwards.
 */
void chain_write_all(struct chain_sides *sides);
/* All sides hold what was written last.  -EILSEQ. */
int chain_verify(const struct chain_sides *sides, struct pcow_error *error);
void chain_close(struct chain_sides *sides);

#endif
