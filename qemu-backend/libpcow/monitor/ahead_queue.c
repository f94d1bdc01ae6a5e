/* SPDX-License-Identifier: BSD-3-Clause */
/* Guest slabs that wait for the thread that works ahead: asked for by traps, served by the thread. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "image/prepare.h"
#include "image/remains.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"

static void wake(struct ahead *ahead)
{
    __atomic_fetch_add(&ahead->wakeups, 1, __ATOMIC_SEQ_CST);
    if (__atomic_exchange_n(&ahead->sleeping, 0, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &ahead->wakeups, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void enqueue(struct ahead *ahead, uint64_t guest_slab)
{
    uint32_t at = __atomic_fetch_add(&ahead->queue_tail, 1, __ATOMIC_RELAXED) % AHEAD_QUEUE_SIZE;

    /* Who was held up for a whole round stores over what is newer, and wanted as well. */
    if (__atomic_exchange_n(&ahead->queue[at], (uint32_t)guest_slab + 1, __ATOMIC_RELEASE))
        __atomic_store_n(&ahead->forgot, true, __ATOMIC_RELAXED);
}

static bool is_hot(const struct slab_map *slab)
{
    return slab->faults >= HOT_FAULTS
           && policy_is_hot(slab->faults, page_set_count(&slab->writable), HOT_SHARE)
           && !page_set_full(&slab->writable);
}

/*
 * In the top file: a revert may have taken that away, and what shows then is in the file of a base.
 */
static bool is_own_slab(const struct pcow_map *map, slab_ref head)
{
    return head && slab_ref_level(head) == map->image->chain->levels;
}

static enum policy_job job_after(const struct pcow_map *map, uint64_t guest_slab, bool copied,
                                 bool comes_back)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    slab_ref head = map->image->chain->head[guest_slab];
    bool owns = is_own_slab(map, head);
    const struct policy_trap trap = {
        .faults = slab->faults,
        .copied = copied,
        .comes_back = comes_back,
        .owns = owns,
        .is_ready =
            owns && slab->faults == 1 && page_set_full(&map->image->prepared[slab_ref_slab(head)]),
        .queued = slab->queued,
        .hot = copied && !slab->queued && is_hot(slab),
        .is_busy = ahead_queued(map) >= AHEAD_QUEUE_SIZE / 2,
    };

    return policy_job(&trap);
}

void ahead_served(struct pcow_map *map, uint64_t guest_slab, bool copied, bool comes_back)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    struct ahead *ahead = &map->ahead;

    slab->recent = 1;
    if (!__atomic_load_n(&ahead->running, __ATOMIC_RELAXED))
        return;
    switch (job_after(map, guest_slab, copied, comes_back)) {
    case POLICY_JOB_WHOLE:
        slab_set_queued(slab, true);
        /* fall through */
    case POLICY_JOB_SLAB:
        enqueue(ahead, guest_slab);
        wake(ahead);
        break;
    case POLICY_JOB_GUESS:
        /*
         * To wake the thread takes longer than that may save: the first one does, and it looks for
         * more, see rest().
         */
        enqueue(ahead, guest_slab);
        __atomic_fetch_add(&ahead->guesses, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&ahead->expecting, __ATOMIC_SEQ_CST))
            wake(ahead);
        break;
    case POLICY_JOB_NONE: break;
    }
    if (slab->faults == 1 && prepare_is_of_use(map->image)
        && prepared_count(map->image) <= __atomic_load_n(&ahead->lead, __ATOMIC_RELAXED) / 2
        && __atomic_load_n(&ahead->sleeping, __ATOMIC_RELAXED))
        wake(ahead);
}

unsigned ahead_queued(const struct pcow_map *map)
{
    uint32_t waiting = __atomic_load_n(&map->ahead.queue_tail, __ATOMIC_RELAXED)
                       - __atomic_load_n(&map->ahead.queue_head, __ATOMIC_RELAXED);

    return waiting < AHEAD_QUEUE_SIZE ? waiting : AHEAD_QUEUE_SIZE;
}

void ahead_wake(struct pcow_map *map)
{
    wake(&map->ahead);
}

void ahead_froze(struct pcow_map *map)
{
    __atomic_store_n(&map->ahead.froze, true, __ATOMIC_RELEASE);
    /* Some remains wait for this, see remains_must_wait(). */
    remains_look_again(map->image);
}

bool ahead_has_frozen(const struct pcow_map *map)
{
    return __atomic_load_n(&map->ahead.froze, __ATOMIC_ACQUIRE);
}

/* Some were forgotten, nobody knows which: a trap may ask for any of them again. */
static void forget_queued(struct pcow_map *map)
{
    /* a revert may have the chain in pieces */
    uint64_t slabs = (map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;

    for (uint64_t v = 0; v < slabs; v++) {
        if (!__atomic_load_n(&map->slabs[v].queued, __ATOMIC_RELAXED))
            continue;
        turnstile_take(map);
        chain_claim(map->image->chain, v);
        slab_set_queued(&map->slabs[v], false);
        chain_release(map->image->chain, v);
        turnstile_release(map);
    }
}

bool ahead_serve_queue(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;
    uint32_t head = ahead->queue_head, tail = __atomic_load_n(&ahead->queue_tail, __ATOMIC_RELAXED);

    if (tail - head > AHEAD_QUEUE_SIZE) {
        /* forgotten: they are served on a trap, as without a thread */
        head = tail - AHEAD_QUEUE_SIZE;
        __atomic_store_n(&ahead->forgot, true, __ATOMIC_RELAXED);
    }
    while (head != tail) {
        uint32_t found =
            __atomic_exchange_n(&ahead->queue[head++ % AHEAD_QUEUE_SIZE], 0, __ATOMIC_ACQUIRE);
        bool hot, grown, kept, complete;
        slab_ref first;

        /* Who took this place has not filled it yet, and will be found in it much later. */
        if (found == 0) {
            __atomic_store_n(&ahead->forgot, true, __ATOMIC_RELAXED);
            continue;
        }
        turnstile_take(map);
        chain_claim(map->image->chain, found - 1);
        hot = map->slabs[found - 1].queued && is_hot(&map->slabs[found - 1]);
        grown = map->slabs[found - 1].grown > 0;
        kept = slab_is_kept(&map->slabs[found - 1].status);
        first = map->image->chain->head[found - 1];
        complete =
            !is_own_slab(map, first) || page_set_full(&map->image->prepared[slab_ref_slab(first)]);
        chain_release(map->image->chain, found - 1);
        turnstile_release(map);
        if (hot) {
            ahead_complete_pages(map, found - 1);
        } else {
            if (!complete && ahead->opened < MAX_OPENED && !ahead_is_frugal(ahead))
                ahead_complete_blocks(map, found - 1);
            /*
             * Of a slab that the engine keeps a page here and there is copied: to fill the page
             * table for them takes longer than it saves.
             */
            if (grown || !kept)
                ahead_touch_source(map, found - 1, grown);
        }
        __atomic_store_n(&ahead->queue_head, head, __ATOMIC_RELAXED);
        return true;
    }
    __atomic_store_n(&ahead->queue_head, head, __ATOMIC_RELAXED);
    /* All others have been served, so that none is taken from the queue by this. */
    if (__atomic_exchange_n(&ahead->forgot, false, __ATOMIC_RELAXED))
        forget_queued(map);
    return false;
}
