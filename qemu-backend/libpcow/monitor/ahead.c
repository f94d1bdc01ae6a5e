/* SPDX-License-Identifier: BSD-3-Clause */
#include "monitor/ahead.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "chain/reclaim.h"
#include "image/prepare.h"
#include "image/remains.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/order.h"

#define SOON_NS 10000000L              /* while guesses are left, they are looked for after this time */
#define IDLE_SECONDS 5                 /* without an access that had to be served, before everything is given back */
#define MAX_OPENED 512u                /* slabs (1 GiB) handed out with prepared pages, before those not in use are trimmed */
#define MAX_GIVEN_BACK 8u              /* slabs whose remains are punched out before somebody else may have a turn */

/* ---- called by others ------------------------------------------------------------------------ */

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
        .is_ready = owns && slab->faults == 1
                    && page_set_full(&map->image->prepared[slab_ref_slab(head)]),
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
        slab->queued = 1;
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
    case POLICY_JOB_NONE:
        break;
    }
    if (slab->faults == 1
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
}

bool ahead_has_frozen(const struct pcow_map *map)
{
    return __atomic_load_n(&map->ahead.froze, __ATOMIC_ACQUIRE);
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* True if there may be more to do. */
static bool refill(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;
    uint64_t room;

    lead_judge(map);
    if (prepared_count(map->image) >= ahead->lead)
        return false;
    room = prepare_room(map->image);
    if (room == 0) {
        prepared_drop(map->image, 0);
        return false;
    }
    if (prepared_count(map->image) >= room || prepare_one(map->image))
        return false;
    ahead->holding = true;
    __atomic_fetch_add(&ahead->prepared, 1, __ATOMIC_RELAXED);
    return true;
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
        map->slabs[v].queued = 0;
        chain_release(map->image->chain, v);
        turnstile_release(map);
    }
}

static bool serve_queue(struct pcow_map *map)
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
            if (!complete && ahead->opened < MAX_OPENED)
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

/* Was the guest here since the last look? */
static bool was_used(void *opaque, uint64_t guest_slab, uint64_t slab)
{
    const struct pcow_map *map = opaque;
    struct slab_map *found = &map->slabs[guest_slab];

    if (!found->recent || map->image->slabs[slab].layer != image_active(map->image))
        return false;
    found->recent = 0;
    return true;
}

/* Too much handed out: take it back from slabs that are not in use any more. */
static bool limit_opened(struct pcow_map *map)
{
    if (map->ahead.opened < MAX_OPENED)
        return false;
    map->ahead.opened = 0;
    turnstile_take(map);
    reclaim_prepared(map->image, was_used, map);
    turnstile_release(map);
    return true;
}

/* Nothing happened for a while: keep nothing that others could use. */
static void give_back(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;

    lead_give_back(ahead);
    prepared_drop(map->image, ahead->lead_min);
    turnstile_take(map);
    reclaim_prepared(map->image, NULL, NULL);
    turnstile_release(map);
    ahead->opened = 0;
    ahead->holding = !windows_empty(map);
}

/* Returns false if the time has passed without anything having happened. */
static bool rest(struct pcow_map *map, uint32_t seen)
{
    struct ahead *ahead = &map->ahead;
    struct timespec idle = {IDLE_SECONDS, 0}, soon = {0, SOON_NS};
    bool something = ahead->holding || retire_is_due(map), expecting;
    uint32_t guesses = __atomic_load_n(&ahead->guesses, __ATOMIC_SEQ_CST);
    long ret;

    expecting = guesses != ahead->seen_guesses;
    ahead->seen_guesses = guesses;
    __atomic_store_n(&ahead->expecting, expecting, __ATOMIC_SEQ_CST);
    /* Either whoever leaves one now sees this, and wakes, or it is seen here. */
    if (!expecting && __atomic_load_n(&ahead->guesses, __ATOMIC_SEQ_CST) != guesses)
        return true;
    __atomic_store_n(&ahead->sleeping, 1, __ATOMIC_SEQ_CST);
    ret = syscall(SYS_futex, &ahead->wakeups, FUTEX_WAIT_PRIVATE, seen,
                  expecting   ? &soon
                  : something ? &idle
                              : NULL,
                  NULL, 0);
    if (ret < 0 && errno == ETIMEDOUT && !expecting) {
        uint64_t count = accesses_served(map);

        if (count == ahead->idle_accesses)
            return false;
        ahead->idle_accesses = count;
    }
    return true;
}

/*
 * Some of what snapshot operations and crashes have left, so that nobody waits for long. True if
 * there may be more.
 */
static bool give_back_remains(struct pcow_map *map)
{
    struct pcow_image *image = map->image;

    if (!remains_are_due(image))
        return false;
    turnstile_take(map);
    reclaim(image, MAX_GIVEN_BACK);
    turnstile_release(map);
    if (remains_are_due(image))
        return true;
    /* What the file system was told must be certain before a slab is used again: not in a trap. */
    file_settle(&image->file);
    return false;
}

/*
 * A slab at a time: the next snapshot, and who serves faults, may be waiting. True if there may be
 * more.
 */
static bool give_back_frozen(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;

    if (__atomic_exchange_n(&ahead->froze, false, __ATOMIC_ACQ_REL)) {
        ahead->frozen_next = 1;
        ahead->takers_since_ns = 0;
        /* What was handed out before is dealt with here. */
        ahead->opened = 0;
    }
    if (ahead->frozen_next == 0)
        return false;
    turnstile_take(map);
    if (!reclaim_frozen(map->image, &ahead->frozen_next))
        ahead->frozen_next = 0;
    turnstile_release(map);
    if (ahead->frozen_next)
        return true;
    file_settle(&map->image->file);
    return false;
}

/*
 * While it runs, each change of a page table that a snapshot operation makes has to interrupt its
 * CPU, for which the VM stands still.
 */
static void wait_for_operations(struct pcow_map *map)
{
    turnstile_take(map);
    turnstile_release(map);
}

static void *run(void *opaque)
{
    struct pcow_map *map = opaque;
    struct ahead *ahead = &map->ahead;
    bool looked = false;

    pthread_setname_np(pthread_self(), "pcow-ahead");
    /*
     * Waking up must not interrupt who stores, least of all a vCPU with a real-time policy, which
     * would be inherited.
     */
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &(struct sched_param){0});
    remains_find(map->image, false);
    while (!ahead_is_stopping(ahead)) {
        uint32_t seen = __atomic_load_n(&ahead->wakeups, __ATOMIC_SEQ_CST);
        bool more = false;

        /*
         * Of a former writer that was killed: in slabs that are owned too, once the image turns out
         * to be stored to.
         */
        if (!looked && (ahead->lead_min > 0 || accesses_served(map) > 0)) {
            remains_find(map->image, true);
            looked = true;
        }
        wait_for_operations(map);
        more |= retire_some(map);
        more |= give_back_remains(map);
        more |= give_back_frozen(map);
        more |= refill(map);
        more |= serve_queue(map);
        more |= limit_opened(map);
        if (!more && !ahead_is_stopping(ahead) && !rest(map, seen))
            give_back(map);
    }
    return NULL;
}

void ahead_start(struct pcow_map *map, unsigned lead_min)
{
    struct ahead *ahead = &map->ahead;
    sigset_t all, before;

    if (!map->image->file.writable || prepare_begin(map->image))
        return;
    pthread_mutex_init(&ahead->busy, NULL);
    lead_begin(ahead, lead_min);
    /*
     * Signals are for the program's own threads; but an error in memory that it copies must not be
     * the end of the process.
     */
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ahead->running = pthread_create(&ahead->thread, NULL, run, map) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void ahead_stop(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;

    if (!map->image->ready || !ahead->running)
        return;
    __atomic_store_n(&ahead->stop, true, __ATOMIC_RELEASE);
    wake(ahead);
    pthread_join(ahead->thread, NULL);
    __atomic_store_n(&ahead->running, false, __ATOMIC_RELAXED);
}

void ahead_end(struct pcow_map *map)
{
    if (!map->image->ready)
        return;
    prepare_end(map->image);
    reclaim(map->image, 0);
    pthread_mutex_destroy(&map->ahead.busy);
}
