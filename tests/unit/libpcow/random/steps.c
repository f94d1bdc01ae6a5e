/* SPDX-License-Identifier: BSD-3-Clause */
/* What a round does, one step after the other, while the rest goes on beside it. */
#include "world.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Nobody stores, as pcow.h asks for it. */
static void stop_guests(struct world *world)
{
    sigset_t tick;

    for (unsigned i = 0; i < GUESTS; i++)
        guest_await(&world->guest[i]);
    atomic_store(&world->hold_ticker, true);
    sigemptyset(&tick);
    sigaddset(&tick, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &tick, NULL);
    for (unsigned i = 0; i < GUESTS; i++)
        guest_take_signals(&world->guest[i], false);
}

static void go_on(struct world *world)
{
    sigset_t tick;

    for (unsigned i = 0; i < GUESTS; i++)
        guest_take_signals(&world->guest[i], true);
    sigemptyset(&tick);
    sigaddset(&tick, SIGUSR1);
    pthread_sigmask(SIG_UNBLOCK, &tick, NULL);
    atomic_store(&world->hold_ticker, false);
}

static void aim(struct world *world, struct guest *guest)
{
    guest->focus = below(&world->seed, 3) ? below(&world->seed, world->slabs) : MAX_SLABS;
    guest->sequential = below(&world->seed, 4) == 0;
}

static void burst(struct world *world)
{
    unsigned accesses = 1 + (unsigned)below(&world->seed, below(&world->seed, 4) ? 30 : 300);

    for (unsigned i = 0; i < GUESTS; i++)
        aim(world, &world->guest[i]);
    for (unsigned i = GUESTS; i-- > 0;)
        guest_ask(&world->guest[i], accesses);
    for (unsigned i = 0; i < GUESTS; i++)
        guest_await(&world->guest[i]);
}

/* No space; or a reader has the tree for longer than a change waits, on a busy machine or disk. */
static bool may_be(int ret)
{
    return ret == 0 || ret == -ENOSPC || ret == -EBUSY;
}

static void create(struct world *world)
{
    struct saved *saved = &world->saved[world->snapshots];
    struct pcow_error error = {0};
    int ret;

    if (world->snapshots == MAX_SNAPSHOTS)
        return;
    snprintf(saved->name, sizeof saved->name, "s%u", world->next_name++);
    stop_guests(world);
    ret = pcow_snapshot_create(world->image, saved->name, &error);
    if (!ret) {
        saved->bytes = malloc(world->size);
        if (!saved->bytes)
            abort();
        memcpy(saved->bytes, world->bytes, world->size);
        world->snapshots++;
    }
    go_on(world);
    if (!may_be(ret))
        wrong(world, "create: %d, %s", ret, error.message);
}

static void let_a_guest_work(struct world *world)
{
    aim(world, &world->guest[1]);
    guest_ask(&world->guest[1], 1 + (unsigned)below(&world->seed, 200));
}

static int flush_all(struct world *world, struct pcow_error *error)
{
    return pcow_map_flush(world->map, 0, world->size, error);
}

static int prepare(struct world *world, const char *name, uint64_t *token,
                   struct pcow_error *error)
{
    int ret;

    while ((ret = pcow_snapshot_prepare(world->image, name, 1, 1, token, error))
           == PCOW_FLUSH_FIRST)
        if ((ret = flush_all(world, error)))
            break;
    return ret;
}

#define MOST_TRIES 20u

static int finish(struct world *world, uint64_t token, struct pcow_error *error)
{
    unsigned tries = 0;
    int ret;

    while ((ret = pcow_snapshot_finish(world->image, token, NULL, error)) == PCOW_FLUSH_FIRST
           || (ret == -EBUSY && tries++ < MOST_TRIES))
        if (ret == PCOW_FLUSH_FIRST && (ret = flush_all(world, error)))
            break;
    return ret;
}

/* A guest and the handlers store on, but for the moment in which it is frozen. */
static void create_in_steps(struct world *world)
{
    struct saved *saved = &world->saved[world->snapshots];
    struct pcow_error error = {0};
    bool abandon = below(&world->seed, 5) == 0, frozen;
    uint64_t token = 0;
    int ret;

    if (world->snapshots == MAX_SNAPSHOTS)
        return;
    snprintf(saved->name, sizeof saved->name, "s%u", world->next_name++);
    let_a_guest_work(world);
    ret = prepare(world, saved->name, &token, &error);
    stop_guests(world);
    if (!ret)
        ret = pcow_snapshot_freeze(world->image, token, &error);
    frozen = !ret;
    if (frozen) {
        saved->bytes = malloc(world->size);
        if (!saved->bytes)
            abort();
        memcpy(saved->bytes, world->bytes, world->size);
    }
    go_on(world);
    let_a_guest_work(world);
    if (!ret)
        ret = abandon ? pcow_snapshot_abandon(world->image, token, &error)
                      : finish(world, token, &error);
    else
        pcow_snapshot_abandon(world->image, token, NULL);
    guest_await(&world->guest[1]);
    if (!ret && !abandon)
        world->snapshots++;
    else if (frozen)
        free(saved->bytes);
    if (!may_be(ret) || (ret == -EBUSY && frozen))
        wrong(world, "create in steps: %d, %s", ret, error.message);
}

static void revert(struct world *world)
{
    struct pcow_error error = {0};
    struct saved *saved;
    int ret;

    if (!world->snapshots)
        return;
    saved = &world->saved[below(&world->seed, world->snapshots)];
    stop_guests(world);
    ret = pcow_snapshot_revert(world->image, saved->name, &error);
    if (!ret)
        memcpy(world->bytes, saved->bytes, world->size);
    go_on(world);
    if (!may_be(ret))
        wrong(world, "revert: %d, %s", ret, error.message);
}

/* Guests may go on, and handlers store in the midst of it. */
static void delete(struct world *world)
{
    struct pcow_error error = {0};
    unsigned at;
    int ret = 0;

    if (!world->snapshots)
        return;
    at = (unsigned)below(&world->seed, world->snapshots);
    if (below(&world->seed, 2))
        let_a_guest_work(world);
    /* The neighbour may be making checksums of it, and waits for a disk that others use. */
    for (unsigned tries = 0; tries < 6000; tries++) {
        ret = pcow_snapshot_delete(world->image, world->saved[at].name, NULL, &error);
        if (ret != -EBUSY)
            break;
        usleep(10000);
    }
    guest_await(&world->guest[1]);
    if (ret)
        wrong(world, "delete: %d, %s", ret, error.message);
    free(world->saved[at].bytes);
    world->saved[at] = world->saved[--world->snapshots];
}

/*
 * A file system may want a block for its own lists to punch a hole: with none left it refuses, and
 * what is left is given back later.
 */
static void reclaim(struct world *world)
{
    struct pcow_error error = {0};
    int ret = pcow_reclaim(world->image, NULL, &error);

    if (ret && ret != -ENOSPC)
        wrong(world, "reclaim: %d, %s", ret, error.message);
}

static void flush(struct world *world)
{
    uint64_t offset = below(&world->seed, world->size / PAGE) * PAGE;
    struct pcow_error error = {0};
    int ret = pcow_map_flush(world->map, offset,
                             below(&world->seed, 2) ? PAGE : world->size - offset, &error);

    if (ret)
        wrong(world, "flush: %d, %s", ret, error.message);
}

static void compare(struct world *world)
{
    stop_guests(world);
    world_compare(world, below(&world->seed, 2));
    go_on(world);
}

static void compare_slab(struct world *world)
{
    stop_guests(world);
    world_compare_slab(world, below(&world->seed, world->slabs));
    go_on(world);
}

/* What a merge has taken away goes back to the pool, and nobody must see it there. */
static void delete_and_look(struct world *world)
{
    delete(world);
    reclaim(world);
    compare_slab(world);
}

static void compare_snapshot(struct world *world)
{
    if (world->snapshots)
        world_compare_snapshot(world, &world->saved[below(&world->seed, world->snapshots)]);
}

static void fill_pool(struct world *world)
{
    pool_fill_but(world, "filler",
                  (unsigned)below(&world->seed, below(&world->seed, 2) ? 40 : 700));
}

static void empty_pool(struct world *world)
{
    pool_empty(world, "filler");
}

/*
 * Memory of the caller's lay over a page, as where an access was to end that could not be served.
 * It has its content before: the thread that works ahead, or who calls beside, may map the slab
 * anew at any time, and a store there would be one to the image.
 */
static void restore(struct world *world)
{
    uint64_t offset = below(&world->seed, world->size / PAGE) * PAGE;
    void *over =
        mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct pcow_error error = {0};
    int ret;

    if (over == MAP_FAILED)
        wrong(world, "no memory: %d", errno);
    memset(over, 0xee, PAGE);
    stop_guests(world);
    if (mremap(over, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, world->memory + offset)
        == MAP_FAILED)
        wrong(world, "no memory over a page: %d", errno);
    ret = pcow_map_restore(world->map, offset, PAGE, &error);
    if (ret)
        wrong(world, "restore: %d, %s", ret, error.message);
    world_compare_slab(world, offset / PCOW_SLAB_SIZE);
    go_on(world);
}

static void rest(struct world *world)
{
    usleep((useconds_t)below(&world->seed, 20000));
}

static const struct {
    const char *name;
    void (*run)(struct world *world);
    unsigned weight;
} steps[] = {
    {"a burst", burst, 60},
    {"create", create, 5},
    {"create in steps", create_in_steps, 4},
    {"revert", revert, 3},
    {"delete", delete, 4},
    {"reclaim", reclaim, 4},
    {"flush", flush, 3},
    {"comparing", compare, 1},
    {"looking at a slab", compare_slab, 4},
    {"deleting and looking", delete_and_look, 4},
    {"comparing a snapshot", compare_snapshot, 2},
    {"filling the pool", fill_pool, 7},
    {"emptying the pool", empty_pool, 4},
    {"restoring a page", restore, 2},
    {"resting", rest, 3},
};

void step(struct world *world)
{
    unsigned total = 0, chosen;

    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        total += steps[i].weight;
    chosen = (unsigned)below(&world->seed, total);
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (chosen < steps[i].weight) {
            atomic_store(&world->doing, steps[i].name);
            steps[i].run(world);
            break;
        }
        chosen -= steps[i].weight;
    }
    atomic_fetch_add(&world->progress, 1);
    atomic_fetch_add(&figures.steps, 1);
}
