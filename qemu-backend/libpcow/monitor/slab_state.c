/* SPDX-License-Identifier: BSD-3-Clause */
#include "monitor/slab_state.h"

#include <stdlib.h>

/*
 * Any slab can be mapped as the chain has it, and be unmapped; any but one in minor mode can be
 * watched in the place of what it is. What cannot be: a copy of what nobody knows; to let pages in
 * one by one where nothing was mapped.
 */
static const struct {
    const char *name;
    unsigned to;
} table[SLAB_STATES] = {
    [SLAB_MAPPED] = {"mapped", SLAB_BIT(SLAB_UNMAPPED) | SLAB_BIT(SLAB_BOUNCE)
                                   | SLAB_BIT(SLAB_MINOR) | SLAB_BIT(SLAB_WATCHED)},
    [SLAB_UNMAPPED] = {"unmapped", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNKNOWN)
                                       | SLAB_BIT(SLAB_BOUNCE) | SLAB_BIT(SLAB_WATCHED_UNMAPPED)},
    [SLAB_UNKNOWN] = {"unknown", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                     | SLAB_BIT(SLAB_WATCHED_UNMAPPED)},
    [SLAB_BOUNCE] = {"bounce", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                   | SLAB_BIT(SLAB_MINOR) | SLAB_BIT(SLAB_WATCHED)},
    [SLAB_MINOR] = {"minor", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_BOUNCE)
                                 | SLAB_BIT(SLAB_MINOR_FROZEN) | SLAB_BIT(SLAB_UNMAPPED)
                                 | SLAB_BIT(SLAB_UNKNOWN)},
    [SLAB_MINOR_FROZEN] = {"minor, frozen", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                                | SLAB_BIT(SLAB_UNKNOWN)},
    [SLAB_WATCHED] = {"watched", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                     | SLAB_BIT(SLAB_WATCHED_READ)},
    [SLAB_WATCHED_READ] = {"watched, read", SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                                | SLAB_BIT(SLAB_WATCHED)},
    [SLAB_WATCHED_UNMAPPED] = {"watched, unmapped",
                               SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                   | SLAB_BIT(SLAB_UNKNOWN) | SLAB_BIT(SLAB_BOUNCE)
                                   | SLAB_BIT(SLAB_WATCHED_UNMAPPED_READ)},
    [SLAB_WATCHED_UNMAPPED_READ] = {"watched, unmapped, read",
                                    SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_UNMAPPED)
                                        | SLAB_BIT(SLAB_UNKNOWN) | SLAB_BIT(SLAB_BOUNCE)
                                        | SLAB_BIT(SLAB_WATCHED_UNMAPPED)},
};

static const unsigned ages[SLAB_AGES] = {
    [SLAB_FRESH] = SLAB_BIT(SLAB_STALE) | SLAB_BIT(SLAB_STALE_FROZEN),
    [SLAB_STALE] = SLAB_BIT(SLAB_FRESH) | SLAB_BIT(SLAB_STALE_FROZEN),
    [SLAB_STALE_FROZEN] = SLAB_BIT(SLAB_FRESH),
};

const char *slab_state_name(enum slab_state state)
{
    return table[state].name;
}

bool slab_state_may_follow(enum slab_state from, enum slab_state to)
{
    return from == to || table[from].to & SLAB_BIT(to);
}

bool slab_age_may_follow(enum slab_age from, enum slab_age to)
{
    return from == to || ages[from] & SLAB_BIT(to);
}

/* A wrong mapping may lose what a guest stores: better no process. */
static void check(bool may)
{
#ifndef NDEBUG
    if (!may)
        abort();
#else
    (void)may;
#endif
}

void slab_enter(struct slab_status *status, enum slab_state state)
{
    check(slab_state_may_follow(slab_state(status), state));
    __atomic_store_n(&status->state, (uint8_t)state, __ATOMIC_SEQ_CST);
}

static void set_age(struct slab_status *status, enum slab_age age)
{
    check(slab_age_may_follow(slab_age(status), age));
    status->age = (uint8_t)age;
}

void slab_grow_stale(struct slab_status *status)
{
    if (slab_age(status) == SLAB_FRESH)
        set_age(status, SLAB_STALE);
}

void slab_refresh(struct slab_status *status)
{
    set_age(status, SLAB_FRESH);
}

void slab_freeze_stale(struct slab_status *status)
{
    if (slab_is_stale(status))
        set_age(status, SLAB_STALE_FROZEN);
}

void slab_lose_track(struct slab_status *status)
{
    set_age(status, SLAB_STALE_FROZEN);
}
