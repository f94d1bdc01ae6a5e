/* SPDX-License-Identifier: BSD-3-Clause */
#include "world.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct world *current_world;

#define DO(world, call)                                                             \
    do {                                                                            \
        struct pcow_error error = {0};                                              \
        int must_ret = (call);                                                      \
                                                                                    \
        if (must_ret)                                                               \
            wrong(world, "%s: %d, %s", #call, must_ret, error.message);             \
    } while (0)

static void fill(uint64_t *seed, uint8_t *to, size_t length)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t value = random_next(seed);

        memcpy(to + i, &value, 8);
    }
}

/* Zeros without blocks, as a copy of the file has them that leaves zeros out. */
static void make_hole(struct world *world, pcow_image *base, uint64_t at, uint64_t length)
{
    struct pcow_extent extent;

    DO(world, pcow_write(base, at, world->bytes + at, length, &error));
    for (uint64_t end = at + length; at < end; at += extent.length) {
        DO(world, pcow_get_extent(base, at, end - at, &extent, &error));
        if (fallocate(pcow_fd(base), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      (off_t)extent.file_offset, (off_t)extent.length))
            abort();
    }
}

/* Half of its pages, in runs; some are zeros, some of which have no blocks. */
static void make_base(struct world *world)
{
    struct pcow_create_options options = {.virtual_size = world->size, .cluster_size = 4096};
    pcow_image *base;

    unlink(world->base_path);
    DO(world, pcow_create(world->base_path, &options, &error));
    DO(world, pcow_open(world->base_path, PCOW_OPEN_WRITE, NULL, &base, &error));
    for (uint64_t at = 0; at < world->size;) {
        uint64_t length = (1 + below(&world->seed, below(&world->seed, 4) ? 6 : 200)) * PAGE;

        if (length > world->size - at)
            length = world->size - at;
        if (below(&world->seed, 2)) {
            fill(&world->seed, world->bytes + at, length);
            DO(world, pcow_write(base, at, world->bytes + at, length, &error));
        } else if (below(&world->seed, 8) == 0) {
            make_hole(world, base, at, length);
        }
        at += length;
    }
    DO(world, pcow_seal(base, &error));
    pcow_close(base);
}

void world_map(struct world *world)
{
    struct pcow_map_options options = {
        .engine = world->engine,
        .full_policy = world->policy,
        .vma_budget = world->budget,
        .serves_sigbus = true,
    };

    DO(world, pcow_map_create(world->image, &options, &world->map, &error));
    world->memory = pcow_map_address(world->map);
}

void world_unmap(struct world *world)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(world->map, &stats);
    if (world->policy == PCOW_FULL_WAIT)
        atomic_fetch_add(&figures.waited, stats.pool_full_waits);
    pcow_map_destroy(world->map);
    world->map = NULL;
}

static void choose(struct world *world)
{
    static const uint64_t clusters[] = {4096, 16384, 65536, 2097152};
    struct pcow_create_options options = {.cluster_size = clusters[below(&world->seed, 4)]};
    struct pcow_info info;
    char base[512];

    world->slabs = 3 + (unsigned)below(&world->seed, MAX_SLABS - 2);
    world->size = world->slabs * PCOW_SLAB_SIZE;
    world->has_base = below(&world->seed, 2);
    options.copy_on_read = world->copy_on_read = world->has_base && below(&world->seed, 4) == 0;
    world->engine = PCOW_ENGINE_SIGNAL + (unsigned)below(&world->seed, PCOW_ENGINE_MINOR);
    /* Engine minor has the most states. */
    if (below(&world->seed, 2))
        world->engine = PCOW_ENGINE_MINOR;
    world->asks = below(&world->seed, world->engine == PCOW_ENGINE_MINOR ? 4 : 2) == 0;
    world->policy = below(&world->seed, 3) == 0 ? PCOW_FULL_WAIT : PCOW_FULL_FAIL;
#ifdef __SANITIZE_THREAD__
    world->policy = PCOW_FULL_WAIT;
#endif
    world->budget =
        below(&world->seed, 4) == 0
            ? 0
            : world->slabs + 4 + (unsigned)below(&world->seed, below(&world->seed, 2) ? 20 : 200);
    snprintf(world->path, sizeof world->path, "%s/top.pcow", world->place->directory);
    snprintf(world->base_path, sizeof world->base_path, "%s/base.pcow", world->place->directory);
    memset(world->bytes, 0, world->size);
    if (world->has_base) {
        make_base(world);
        snprintf(base, sizeof base, "%s", world->base_path);
        options.base = base;
    } else {
        options.virtual_size = world->size;
    }
    unlink(world->path);
    DO(world, pcow_create(world->path, &options, &error));
    DO(world, pcow_open(world->path, PCOW_OPEN_WRITE, NULL, &world->image, &error));
    pcow_get_info(world->image, &info);
    figures.persistence = info.persistence;
}

void world_begin(struct world *world, const struct place *place, unsigned round, uint64_t seed)
{
    uint8_t *bytes = world->bytes;

    memset(world, 0, sizeof *world);
    world->bytes = bytes ? bytes : malloc(MAX_SLABS * PCOW_SLAB_SIZE);
    if (!world->bytes)
        abort();
    world->place = place;
    world->round = round;
    world->seed = world->first_seed = seed;
    atomic_store(&world->doing, "begin");
    current_world = world;
    choose(world);
    world_map(world);
    for (unsigned i = 0; i < GUESTS; i++)
        world->guest[i] = (struct guest){.world = world,
                                         .number = i,
                                         .seed = random_next(&world->seed) | 1,
                                         .handler_seed = random_next(&world->seed) | 1,
                                         .focus = MAX_SLABS};
    for (unsigned i = 0; i < GUESTS; i++)
        guest_start(&world->guest[i]);
    beside_start(world);
}

static void compare_range(struct world *world, const uint8_t *found, const uint8_t *expected,
                          uint64_t from, uint64_t to, const char *what)
{
    if (memcmp(found + from, expected + from, to - from) == 0)
        return;
    for (uint64_t i = from; i < to; i++)
        if (found[i] != expected[i])
            wrong(world, "%s: slab %llu page %llu byte %llu is %02x, not %02x", what,
                  (unsigned long long)(i / PCOW_SLAB_SIZE),
                  (unsigned long long)(i / PAGE % PAGES_PER_SLAB), (unsigned long long)(i % PAGE),
                  found[i], expected[i]);
}

static void compare(struct world *world, const uint8_t *found, const uint8_t *expected,
                    const char *what)
{
    compare_range(world, found, expected, 0, world->size, what);
}

void world_compare_slab(struct world *world, uint64_t slab)
{
    compare_range(world, world->memory, world->bytes, slab * PCOW_SLAB_SIZE,
                  (slab + 1) * PCOW_SLAB_SIZE, "a slab in memory");
}

static void compare_view(struct world *world, pcow_image *image, const uint8_t *expected,
                         const char *what)
{
    uint8_t *found = malloc(world->size);

    if (!found)
        abort();
    DO(world, pcow_read(image, 0, found, world->size, &error));
    compare(world, found, expected, what);
    free(found);
}

void world_compare(struct world *world, bool by_memory)
{
    if (by_memory)
        compare(world, world->memory, world->bytes, "memory");
    else
        compare_view(world, world->image, world->bytes, "the image");
}

void world_compare_snapshot(struct world *world, const struct saved *saved)
{
    pcow_image *view;
    char what[64];

    DO(world, pcow_open(world->path, PCOW_OPEN_FORCE_SHARE, saved->name, &view, &error));
    snprintf(what, sizeof what, "snapshot %s", saved->name);
    compare_view(world, view, saved->bytes, what);
    pcow_close(view);
}

static void tell_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    (void)opaque;
    fprintf(stderr, "finding %d: %s\n", (int)kind, message);
}

static void check(struct world *world)
{
    struct pcow_check_result result;
    struct pcow_data_result data;

    DO(world, pcow_check(world->path, 0, tell_finding, NULL, &result, &error));
    if (result.corruptions || result.leaks)
        wrong(world, "check finds %llu corruptions and %llu leaks",
              (unsigned long long)result.corruptions, (unsigned long long)result.leaks);
    DO(world, pcow_check_data(world->path, 0, tell_finding, NULL, NULL, &data, &error));
    if (data.corruptions)
        wrong(world, "checksums find %llu corruptions", (unsigned long long)data.corruptions);
    atomic_fetch_add(&figures.verified, data.verified);
}

void world_end(struct world *world)
{
    atomic_store(&world->doing, "end");
    /* While there is still somebody who gives space to handlers that wait for it. */
    atomic_store(&world->hold_ticker, true);
    for (unsigned i = 0; i < GUESTS; i++)
        guest_take_signals(&world->guest[i], false);
    beside_stop(world);
    for (unsigned i = 0; i < GUESTS; i++)
        guest_end(&world->guest[i]);
    world_compare(world, true);
    world_compare(world, false);
    world_unmap(world);
    world_compare(world, false);
    for (unsigned i = 0; i < world->snapshots; i++)
        world_compare_snapshot(world, &world->saved[i]);
    pcow_close(world->image);
    check(world);
    DO(world, pcow_open(world->path, 0, NULL, &world->image, &error));
    world_compare(world, false);
    pcow_close(world->image);
    for (unsigned i = 0; i < world->snapshots; i++) {
        world_compare_snapshot(world, &world->saved[i]);
        free(world->saved[i].bytes);
    }
    unlink(world->path);
    unlink(world->base_path);
    pool_empty(world, "filler");
    pool_empty(world, "neighbour");
    atomic_fetch_add(&figures.rounds, 1);
}
