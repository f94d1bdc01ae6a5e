/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The table of the states of a guest slab: all that is derived from it is in slab_state.h, where
 * they are explained. A new state is a row, and a file with its keeper (engine.h) if a trap in it
 * needs one. "from" is for a state that is added: so the others' rows stay as they are.
 */
#ifndef PCOW_MONITOR_SLAB_STATES_H
#define PCOW_MONITOR_SLAB_STATES_H

/* Some states that only a test knows: a file that defines SLAB_TEST_ROWS(ROW). */
#ifdef SLAB_STATES_FOR_TESTS
#include SLAB_STATES_FOR_TESTS
#else
#define SLAB_TEST_ROWS(ROW)
#endif

/* What a state is. */
#define SLAB_IS_UNMAPPED 1u            /* nothing is mapped: a load traps */
#define SLAB_IS_KEPT 2u                /* only its keeper knows what is mapped */
#define SLAB_IS_WATCHED 4u             /* anonymous memory is mapped in place of the pages */

/*
 * ROW(state, its name, what it is, which may follow, which may come before beside those that say so
 * themselves). To stay what it is, a slab may always.
 *
 * Any slab can be mapped as the chain has it, and be unmapped; any but one that is kept can be
 * watched in the place of what it is. What cannot be: a copy of what nobody knows; to let pages in
 * one by one where nothing was mapped.
 */
#define SLAB_STATE_ROWS(ROW)                                                                   \
    ROW(MAPPED, "mapped", 0, IN(UNMAPPED) | IN(BOUNCE) | IN(MINOR) | IN(WATCHED), 0)           \
    ROW(UNMAPPED, "unmapped", SLAB_IS_UNMAPPED,                                                \
        IN(MAPPED) | IN(UNKNOWN) | IN(BOUNCE) | IN(WATCHED_UNMAPPED), 0)                       \
    ROW(UNKNOWN, "unknown", SLAB_IS_UNMAPPED,                                                  \
        IN(MAPPED) | IN(UNMAPPED) | IN(WATCHED_UNMAPPED), 0)                                   \
    ROW(BOUNCE, "bounce", 0, IN(MAPPED) | IN(UNMAPPED) | IN(MINOR) | IN(WATCHED), 0)           \
    ROW(MINOR, "minor", SLAB_IS_KEPT,                                                          \
        IN(MAPPED) | IN(BOUNCE) | IN(MINOR_FROZEN) | IN(UNMAPPED) | IN(UNKNOWN), 0)            \
    ROW(MINOR_FROZEN, "minor, frozen", SLAB_IS_KEPT,                                           \
        IN(MAPPED) | IN(MINOR) | IN(UNMAPPED) | IN(UNKNOWN), 0)                                \
    ROW(WATCHED, "watched", SLAB_IS_WATCHED, IN(MAPPED) | IN(UNMAPPED) | IN(WATCHED_READ), 0)  \
    ROW(WATCHED_READ, "watched, read", SLAB_IS_WATCHED,                                        \
        IN(MAPPED) | IN(UNMAPPED) | IN(WATCHED), 0)                                            \
    ROW(WATCHED_UNMAPPED, "watched, unmapped", SLAB_IS_WATCHED | SLAB_IS_UNMAPPED,             \
        IN(MAPPED) | IN(UNMAPPED) | IN(UNKNOWN) | IN(BOUNCE) | IN(WATCHED_UNMAPPED_READ), 0)   \
    ROW(WATCHED_UNMAPPED_READ, "watched, unmapped, read", SLAB_IS_WATCHED | SLAB_IS_UNMAPPED,  \
        IN(MAPPED) | IN(UNMAPPED) | IN(UNKNOWN) | IN(BOUNCE) | IN(WATCHED_UNMAPPED), 0)        \
    SLAB_TEST_ROWS(ROW)

#endif
