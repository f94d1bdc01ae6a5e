/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The state of a guest slab (2 MiB): how its pages are mapped that are not mapped for stores.
 *
 *   state                  mapping                               a load            left because
 *   ---------------------  ------------------------------------  ----------------  ----------------
 *   MAPPED                 each page where the chain has it      memory speed
 *   UNMAPPED               nothing: too many pieces, or          trap              of any access
 *                          copy-on-read
 *   UNKNOWN                UNMAPPED was due, the kernel refused  anything          of any trap
 *   BOUNCE                 one, of a copy in memory (bounce.c)   memory speed
 *   MINOR                  one, of the top file                  of what is own    of other loads (*)
 *   MINOR_FROZEN           the same, read-only by a snapshot     trap              of any access
 *   WATCHED                anonymous, userfaultfd (watch.c)      trap once         the watch ends
 *   WATCHED_READ           with copies of what was loaded        trap once         the watch ends
 *   WATCHED_UNMAPPED       as WATCHED, in place of UNMAPPED      trap once         the watch ends
 *   WATCHED_UNMAPPED_READ  as WATCHED_READ, in that place        trap once         the watch ends
 *
 * (*) where mappings are left for it: else what is loaded becomes own.
 *
 * MINOR and MINOR_FROZEN are kept by engine minor (engine_minor.c): what is mapped only it knows.
 *
 * And beside it, whether that may be behind the chain: pages may have become own that are mapped to
 * where an older layer holds them, or not at all. Only who maps all of the slab takes that back.
 *
 *   FRESH         no page is
 *   STALE         own pages of the active layer may be, which tell whether they are still
 *   STALE_FROZEN  and of layers that were frozen since, which do not
 *
 * slab_state.c alone writes either. slab_states.h is the table of the states and of which may
 * follow which: a build without NDEBUG stops at another one, and test_slab_state goes through all
 * of them. The claim of the slab is held, or everybody stopped; anybody may look.
 * Async-signal-safe.
 */
#ifndef PCOW_MONITOR_SLAB_STATE_H
#define PCOW_MONITOR_SLAB_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "monitor/slab_states.h"

#define SLAB_ROW_NUMBER(state, name, is, to, from) SLAB_##state,
enum slab_state { SLAB_STATE_ROWS(SLAB_ROW_NUMBER) SLAB_STATES };

enum slab_age {
    SLAB_FRESH,
    SLAB_STALE,
    SLAB_STALE_FROZEN,
    SLAB_AGES,
};

/* What a slab is begun with is all zeros: MAPPED and FRESH. */
struct slab_status {
    uint8_t state;                     /* enum slab_state; atomic */
    uint8_t age;                       /* enum slab_age */
};

const char *slab_state_name(enum slab_state state);
/* The tables. To stay what it is, it may always. */
bool slab_state_may_follow(enum slab_state from, enum slab_state to);
bool slab_age_may_follow(enum slab_age from, enum slab_age to);

/*
 * Who holds no claim sees it from here on. So MAPPED and BOUNCE come after what was mapped for
 * them, and what cannot be loaded from comes before the mappings go.
 */
void slab_enter(struct slab_status *status, enum slab_state state);
/* Pages are about to become own. */
void slab_grow_stale(struct slab_status *status);
/* All of it is mapped, or nothing; or its own pages tell that none of them is stale. */
void slab_refresh(struct slab_status *status);
/* A snapshot has frozen what is stale; or nobody knows what is mapped. */
void slab_freeze_stale(struct slab_status *status);
void slab_lose_track(struct slab_status *status);

static inline enum slab_state slab_state(const struct slab_status *status)
{
    return (enum slab_state)__atomic_load_n(&status->state, __ATOMIC_SEQ_CST);
}

static inline enum slab_age slab_age(const struct slab_status *status)
{
    return (enum slab_age)status->age;
}

static inline bool slab_is_stale(const struct slab_status *status)
{
    return slab_age(status) != SLAB_FRESH;
}

#define SLAB_BIT(state) (1u << (state))

/* Which states are so: sets of bits. */
#define SLAB_ROW_UNMAPPED(state, name, is, to, from)                                           \
    | ((is) & SLAB_IS_UNMAPPED ? SLAB_BIT(SLAB_##state) : 0u)
#define SLAB_ROW_KEPT(state, name, is, to, from)                                               \
    | ((is) & SLAB_IS_KEPT ? SLAB_BIT(SLAB_##state) : 0u)
#define SLAB_ROW_WATCHED(state, name, is, to, from)                                            \
    | ((is) & SLAB_IS_WATCHED ? SLAB_BIT(SLAB_##state) : 0u)
#define SLAB_UNMAPPEDS (0u SLAB_STATE_ROWS(SLAB_ROW_UNMAPPED))
#define SLAB_KEPT (0u SLAB_STATE_ROWS(SLAB_ROW_KEPT))
#define SLAB_WATCHEDS (0u SLAB_STATE_ROWS(SLAB_ROW_WATCHED))

static inline bool slab_is_one_of(const struct slab_status *status, unsigned states)
{
    return SLAB_BIT(slab_state(status)) & states;
}

/* Only its keeper knows what is mapped, see engine.h. */
static inline bool slab_is_kept(const struct slab_status *status)
{
    return slab_is_one_of(status, SLAB_KEPT);
}

/* A load traps there, and is told by the slab's pages. */
static inline bool slab_is_unmapped(const struct slab_status *status)
{
    return slab_is_one_of(status, SLAB_UNMAPPEDS);
}

static inline bool slab_is_watched(const struct slab_status *status)
{
    return slab_is_one_of(status, SLAB_WATCHEDS);
}

/* The kernel may load from it, in a system call. */
static inline bool slab_can_be_loaded_from(const struct slab_status *status)
{
    return !slab_is_one_of(status, SLAB_KEPT | SLAB_UNMAPPEDS);
}

#endif
