/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mappings of the range. If nothing else is said the claim of the slab is held, or everybody
 * stopped, and it is async-signal-safe.
 */
#ifndef PCOW_MONITOR_LAYOUT_H
#define PCOW_MONITOR_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "monitor/slab_state.h"

struct layout_lists;
struct pcow_error;
struct pcow_image;
struct pcow_map;
struct slab_map;

/* ---- first_layout.c -------------------------------------------------------------------------- */

/* The address may be another one after it. Not async-signal-safe. */
int layout_begin(struct pcow_map *map, struct pcow_error *error);

/* ---- layout.c, lists.c ----------------------------------------------------------------------- */

/* Not async-signal-safe, nor are lists. */
int layout_map_all(struct pcow_map *map, struct pcow_error *error);
/*
 * A revert changes few lists of the chain: those of before it, and then what has to be mapped anew
 * when they are built again. NULL: memory is short.
 */
struct layout_lists *layout_note_lists(const struct pcow_map *map);
bool layout_is_as_noted(const struct pcow_map *map, const struct layout_lists *lists,
                        uint64_t guest_slab);
int layout_map_changed(struct pcow_map *map, const struct layout_lists *lists);
void layout_forget_lists(struct layout_lists *lists);
/*
 * Copy-on-read: something shows from an older layer or a base, which the first access shall bring
 * into the active one.
 */
bool layout_is_to_be_copied(const struct pcow_map *map, uint64_t guest_slab);

/* ---- layout_piece.c -------------------------------------------------------------------------- */

/* A stretch of the range that one mapping can serve. */
struct piece {
    uint64_t from, to;                 /* guest offsets */
    unsigned level;                    /* 0: absent */
    uint64_t offset;
    bool store;
};

/* Map it, if it is not empty. */
int piece_map(struct pcow_map *map, const struct piece *piece);
/* Extend it by one slab, or up to there by what is not used; what is complete is mapped. */
int piece_add_slab(struct pcow_map *map, uint64_t guest_slab, struct piece *piece);
int piece_add_absent(struct pcow_map *map, uint64_t to, struct piece *piece);
int layout_map_file(void *address, size_t length, const struct pcow_image *file, uint64_t offset,
                    bool write, int fixed);

/* ---- layout_slab.c --------------------------------------------------------------------------- */

/* How many mappings it has now. */
void layout_set_pieces(struct pcow_map *map, struct slab_map *slab, unsigned pieces);
/* It is mapped as the chain has it, or (UNMAPPED) not at all. */
void layout_remember(struct pcow_map *map, uint64_t guest_slab, enum slab_state state,
                     unsigned pieces);
/* In the first layout, and after a revert. */
int layout_map_nothing(struct pcow_map *map, uint64_t guest_slab);
/*
 * Whoever relies on pages that were mapped for stores (a kernel that asked once) has to ask again.
 */
void layout_withdraw(struct pcow_map *map);

/* As the chain is now. On failure nothing is mapped: the next access tries again. */
int layout_map_slab(struct pcow_map *map, uint64_t guest_slab);
/*
 * Before blocks are given back that an older layer has for pages that are own by now: nothing may
 * be mapped there any more. On failure something may be, and they must stay.
 */
int layout_catch_up(struct pcow_map *map, uint64_t guest_slab);
/* Count its mappings, which traps only estimate. */
void layout_recount(struct pcow_map *map, uint64_t guest_slab);
/* Nothing is mapped: the next access traps. If the kernel refuses: see unknown in monitor.h. */
void layout_unmap_slab(struct pcow_map *map, uint64_t guest_slab);

/* ---- layout_own.c ---------------------------------------------------------------------------- */

/*
 * chain_own(). Every page that the monitor makes own becomes so here, and with that the slab is
 * stale until its own pages are mapped.
 */
int layout_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count,
               uint64_t *copied);
/* All that is not; the slab counts as promoted if anything was copied. */
int layout_own_whole(struct pcow_map *map, uint64_t guest_slab);
/*
 * On failure the pages of the piece that failed count as not mapped for stores, and the slab is
 * stale.
 */
int layout_map_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count);
/*
 * A page that is mapped for stores: see that one does not fail for want of space for its
 * neighbours, see image/folio.c. 0, -ENOSPC or -EIO.
 */
int layout_prepare_store(const struct pcow_map *map, uint64_t guest_slab, unsigned page);

/* ---- rest.c, bounce.c, density.c: quicker ways, or with fewer mappings ------------------------- */

/* All pages of the slab are own, some are not mapped for stores yet. */
int layout_map_rest(struct pcow_map *map, uint64_t guest_slab);
/*
 * As layout_map_slab(), of a slab of which nothing is mapped for stores. Where that would take more
 * mappings than there are, as one, of a copy in memory.
 */
int bounce_slab(struct pcow_map *map, uint64_t guest_slab);
/*
 * As such a copy, whatever mappings there are. If it fails, the slab is mapped as it was, or as the
 * chain has it, or not at all.
 */
int bounce_now(struct pcow_map *map, uint64_t guest_slab);
/*
 * Fill the page table for mapped own pages. Class volatile only: there a load's fault brings in 16
 * writable entries, where a store's brings in one; elsewhere the first store must be seen by the
 * file system.
 */
void layout_populate(const struct pcow_map *map, uint64_t guest_slab, unsigned first,
                     unsigned count);

#endif
