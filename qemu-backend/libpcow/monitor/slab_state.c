/* SPDX-License-Identifier: BSD-3-Clause */
#include "monitor/slab_state.h"

#include <stdlib.h>

#define IN(state) SLAB_BIT(SLAB_##state)
#define ROW(state, name, is, to, from) [SLAB_##state] = {name, to, from},

static const struct {
    const char *name;
    unsigned to, from;
} table[SLAB_STATES] = {SLAB_STATE_ROWS(ROW)};

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
    return from == to || table[from].to & SLAB_BIT(to) || table[to].from & SLAB_BIT(from);
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
