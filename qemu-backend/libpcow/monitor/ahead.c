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
#include "image/spare.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/clock.h"
#include "util/order.h"

/* While guesses are left, they are looked for after this time. */
#define SOON_NS 10000000L
/* Without an access that had to be served, before everything is given back. */
#define IDLE_SECONDS 5
/* While spare slabs are missing, others may have made room for them after this time. */
#define SPARE_NS 1000000000u

/* True if there may be more to do. */
static bool refill(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;
    uint64_t room;

    if (!prepare_is_of_use(map->image)) {
        /* Windows alone. */
        ahead->holding |= accesses_served(map) != ahead->idle_accesses;
        return false;
    }
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

/* Returns false if the time has passed without anything having happened. */
static bool rest(struct pcow_map *map, uint32_t seen)
{
    struct ahead *ahead = &map->ahead;
    struct timespec idle = {IDLE_SECONDS, 0}, soon = {0, SOON_NS}, spare = {0, SPARE_NS - 1};
    bool something = ahead->holding || retire_is_due(map), expecting, due;
    uint32_t guesses = __atomic_load_n(&ahead->guesses, __ATOMIC_SEQ_CST);
    const struct timespec *limit;
    struct timespec mirror;
    long ret;

    expecting = guesses != ahead->seen_guesses;
    ahead->seen_guesses = guesses;
    __atomic_store_n(&ahead->expecting, expecting, __ATOMIC_SEQ_CST);
    /* Either whoever leaves one now sees this, and wakes, or it is seen here. */
    if (!expecting && __atomic_load_n(&ahead->guesses, __ATOMIC_SEQ_CST) != guesses)
        return true;
    __atomic_store_n(&ahead->sleeping, 1, __ATOMIC_SEQ_CST);
    due = spare_is_due(map->image);
    limit = expecting ? &soon : due ? &spare : something ? &idle : NULL;
    if (ahead_arm_mirror(map, &mirror) && (!limit || mirror.tv_sec < limit->tv_sec))
        limit = &mirror;
    ret = syscall(SYS_futex, &ahead->wakeups, FUTEX_WAIT_PRIVATE, seen, limit, NULL, 0);
    if (ret < 0 && errno == ETIMEDOUT && limit != &mirror && !expecting && (something || !due)) {
        uint64_t count = accesses_served(map);

        if (count == ahead->idle_accesses)
            return false;
        ahead->idle_accesses = count;
    }
    return true;
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

/* What is kept for the last snapshot. */
static bool keep_spare(struct pcow_map *map)
{
    struct pcow_image *image = map->image;
    struct spare *spare = __atomic_load_n(&image->spare, __ATOMIC_ACQUIRE);
    int ret = 0;

    if (!spare || !spare_is_due(image) || clock_now_ns() - spare->tried_ns < SPARE_NS)
        return false;
    spare_give_back_surplus(image);
    if (__atomic_exchange_n(&spare->records_due, false, __ATOMIC_ACQ_REL)) {
        turnstile_take(map);
        ret = layer_allocate_spare(image, SPARE_RECORDS);
        turnstile_release(map);
        if (ret)
            spare_note_records(image);
    }
    if (!ret)
        ret = spare_fill(image);
    if (ret)
        spare->tried_ns = clock_now_ns();
    return !ret;
}

/* Not while the pool is full: it would take what is lent to a store that cannot wait. */
static bool serve_queue(struct pcow_map *map)
{
    return !spare_is_due(map->image) && ahead_serve_queue(map);
}

/* In turn, as long as one of them says that there may be more to do. */
static bool (*const jobs[])(struct pcow_map *map) = {
    retire_some,            /* page tables that a snapshot has moved out of the way */
    ahead_give_back_remains,
    ahead_give_back_frozen,
    keep_spare,
    refill,
    serve_queue,
    ahead_limit_opened,
    ahead_follow_mirror,
};

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
        for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
            more |= jobs[i](map);
        if (!more && !ahead_is_stopping(ahead) && !rest(map, seen))
            ahead_give_back(map);
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
    ahead->is_fork =
        map->image->base && map->image->base->view != image_active(map->image->base);
    lead_begin(ahead, lead_min);
    ahead_mirror_begin(map);
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
    ahead_wake(map);
    pthread_join(ahead->thread, NULL);
    __atomic_store_n(&ahead->running, false, __ATOMIC_RELAXED);
}

void ahead_end(struct pcow_map *map)
{
    if (!map->image->ready)
        return;
    spare_end(map->image);
    prepare_end(map->image);
    reclaim(map->image, 0);
    ahead_mirror_end(map);
    pthread_mutex_destroy(&map->ahead.busy);
}
