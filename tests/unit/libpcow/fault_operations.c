/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults.h"

#include <stdio.h>
#include <string.h>

#define WORDS 512u

/* ---- operations ------------------------------------------------------------------------------ */

static int put_pages(pcow_image *image, unsigned first, unsigned count, uint16_t generation,
                     struct pcow_error *error)
{
    uint64_t words[8 * WORDS];

    assert_true(count <= 8);
    for (unsigned i = 0; i < count; i++)
        page_fill(words + i * WORDS, first + i, generation);
    return pcow_write(image, first * UINT64_C(4096), words, count * UINT64_C(4096), error);
}

static void model_put(struct world *world, unsigned first, unsigned count, uint16_t generation)
{
    for (unsigned page = first; page < first + count; page++) {
        struct cell *cell = &world->active.page[page];

        /* Page by page it may have happened or not. */
        view_put(&world->active, page, generation);
        assert_true(cell->count > 1);
    }
}

#define WRITE(name, first, count)                                                           \
    static int name(struct crash *c, struct pcow_error *error)                              \
    {                                                                                       \
        int ret = put_pages(c->image, first, count, 900, error);                            \
                                                                                            \
        return ret ? ret : pcow_flush(c->image, error);                                     \
    }                                                                                       \
    static void name##_model(struct world *world)                                           \
    {                                                                                       \
        model_put(world, first, count, 900);                                                \
    }

WRITE(write_new, 900, 5)
WRITE(write_hiding, 3, 5)
WRITE(write_own, 9, 3)
WRITE(write_mixed, 1, 8)

static int write_zeroes(struct crash *c, struct pcow_error *error)
{
    int ret = pcow_write_zeroes(c->image, 3 * UINT64_C(4096), 8 * UINT64_C(4096), error);

    return ret ? ret : pcow_flush(c->image, error);
}

static void write_zeroes_model(struct world *world)
{
    model_put(world, 3, 8, 0);
}

static int create(struct crash *c, struct pcow_error *error)
{
    return pcow_snapshot_create(c->image, "new", error);
}

static void create_model(struct world *world)
{
    struct saved *saved = &world->saved[world->snapshots++];

    memset(saved, 0, sizeof *saved);
    strcpy(saved->name, "new");
    strcpy(saved->parent, "s2");
    saved->view = world->active;
}

static int revert(struct crash *c, struct pcow_error *error)
{
    return pcow_snapshot_revert(c->image, "s1", error);
}

static void revert_model(struct world *world)
{
    world->active = world_find(world, "s1")->view;
}

static int delete_first(struct crash *c, struct pcow_error *error)
{
    return pcow_snapshot_delete(c->image, "s1", NULL, error);
}

static void delete_first_model(struct world *world)
{
    world_remove(world, "s1");
}

static int delete_second(struct crash *c, struct pcow_error *error)
{
    return pcow_snapshot_delete(c->image, "s2", NULL, error);
}

static void delete_second_model(struct world *world)
{
    world_remove(world, "s2");
}

/* What was dropped is given back now, and not by whoever comes next. */
static int revert_and_reclaim(struct crash *c, struct pcow_error *error)
{
    int ret = revert(c, error);

    return ret ? ret : pcow_reclaim(c->image, NULL, error);
}

static int delete_and_reclaim(struct crash *c, struct pcow_error *error)
{
    int ret = pcow_snapshot_delete(c->image, "s1", NULL, error);

    if (ret == -ENOENT)
        ret = 0;                               /* deleted before, but not given back */
    return ret ? ret : pcow_reclaim(c->image, NULL, error);
}

static int rename_first(struct crash *c, struct pcow_error *error)
{
    return pcow_snapshot_rename(c->image, "s1", "new", error);
}

static void rename_first_model(struct world *world)
{
    strcpy(world_find(world, "s1")->name, "new");
    strcpy(world_find(world, "s2")->parent, "new");
}

static void set_size(struct world *world, uint64_t size)
{
    for (uint64_t page = size / 4096; page < world->active.size / 4096 && page < CRASH_PAGES;
         page++)
        world->active.page[page].count = 0;
    world->active.size = size;
}

static int grow(struct crash *c, struct pcow_error *error)
{
    return pcow_resize(c->image, 6 * MIB, false, error);
}

static void grow_model(struct world *world)
{
    set_size(world, 6 * MIB);
}

static int shrink(struct crash *c, struct pcow_error *error)
{
    return pcow_resize(c->image, 2 * MIB, true, error);
}

static void shrink_model(struct world *world)
{
    set_size(world, 2 * MIB);
}

static int keep_state(struct crash *c, struct pcow_error *error)
{
    uint64_t words[2048];
    int ret;

    state_fill(words, 2048, 7);
    ret = pcow_snapshot_write_state(c->image, "s2", 0, words, sizeof words, error);
    return ret ? ret : pcow_snapshot_set_state_size(c->image, "s2", sizeof words, error);
}

static void keep_state_model(struct world *world)
{
    world_find(world, "s2")->state_size = 16384;
    world_find(world, "s2")->state_generation = 7;
}

static int rebase(struct crash *c, struct pcow_error *error)
{
    return pcow_rebase(c->image, NULL, NULL, false, NULL, NULL, error);
}

static int commit(struct crash *c, struct pcow_error *error)
{
    return pcow_commit(c->image, NULL, NULL, error);
}

static void no_change(struct world *world)
{
    (void)world;
}

static int flush_only(struct crash *c, struct pcow_error *error)
{
    return pcow_flush(c->image, error);
}

static int seal(struct crash *c, struct pcow_error *error)
{
    return pcow_seal(c->image, error);
}

static void seal_model(struct world *world)
{
    world->sealed = true;
}

/* The guest is about to store: what it reads stays the same. */
static int resolve_new(struct crash *c, struct pcow_error *error)
{
    return pcow_map_resolve(c->map, 900 * UINT64_C(4096), 4096, true, error);
}

static int resolve_hiding(struct crash *c, struct pcow_error *error)
{
    return pcow_map_resolve(c->map, 3 * UINT64_C(4096), 4 * UINT64_C(4096), true, error);
}

static int map_again(struct crash *c, struct pcow_error *error)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    pcow_map_destroy(c->map);
    c->map = NULL;
    return pcow_map_create(c->image, &options, &c->map, error);
}

static int map_flush(struct crash *c, struct pcow_error *error)
{
    return pcow_map_flush(c->map, 8 * UINT64_C(4096), 3 * UINT64_C(4096), error);
}

/* Mapped, the thread gives back what was dropped, and the fault may be its: it tries again. */
const struct operation fault_operations[] = {
    {"write, nothing below", crash_two_snapshots, write_new, write_new_model, false, -ENOSPC, 0},
    {"write, hiding a snapshot", crash_two_snapshots, write_hiding, write_hiding_model, false,
     -ENOSPC, 0},
    {"write, own pages", crash_two_snapshots, write_own, write_own_model, false, false, 0},
    {"write, all of these", crash_two_snapshots, write_mixed, write_mixed_model, false, -ENOSPC, 0},
    {"write over a base", crash_on_a_base, write_mixed, write_mixed_model, false, -ENOSPC, 0},
    {"write zeroes", crash_two_snapshots, write_zeroes, write_zeroes_model, false, false, 0},
    {"flush", crash_two_snapshots, flush_only, no_change, false, false, 0},
    {"snapshot create", crash_two_snapshots, create, create_model, false, false, -EEXIST},
    {"snapshot revert", crash_two_snapshots, revert, revert_model, false, false, 0},
    {"snapshot delete, the first", crash_two_snapshots, delete_first, delete_first_model, false,
     false, -ENOENT},
    {"snapshot delete, the second", crash_two_snapshots, delete_second, delete_second_model, false,
     false, -ENOENT},
    {"revert and reclaim", crash_two_snapshots, revert_and_reclaim, revert_model, false, false, 0},
    {"delete and reclaim", crash_two_snapshots, delete_and_reclaim, delete_first_model, false,
     false, 0},
    {"snapshot rename", crash_two_snapshots, rename_first, rename_first_model, false, false,
     -ENOENT},
    {"VM state", crash_two_snapshots, keep_state, keep_state_model, false, -ENOSPC, 0},
    {"grow", crash_two_snapshots, grow, grow_model, false, false, 0},
    {"shrink", crash_two_snapshots, shrink, shrink_model, false, false, 0},
    {"rebase", crash_on_a_base, rebase, no_change, false, -ENOSPC, 0},
    {"commit", crash_on_a_base, commit, no_change, false, -ENOSPC, 0},
    {"seal", crash_two_snapshots, seal, seal_model, false, false, 0},
    {"map", crash_two_snapshots, map_again, no_change, true, false, 0},
    {"resolve, nothing below", crash_two_snapshots, resolve_new, no_change, true, true, 0},
    {"resolve, copy-on-write", crash_two_snapshots, resolve_hiding, no_change, true, true, 0},
    {"flush, mapped", crash_two_snapshots, map_flush, no_change, true, false, 0},
    {"snapshot create, mapped", crash_two_snapshots, create, create_model, true, false, -EEXIST},
    {"snapshot revert, mapped", crash_two_snapshots, revert, revert_model, true, true, 0},
    {"snapshot delete, mapped", crash_two_snapshots, delete_second, delete_second_model, true, true,
     -ENOENT},
};
const size_t fault_operation_count = sizeof fault_operations / sizeof fault_operations[0];

const struct fault_call fault_calls[FAULT_CALLS] = {
    {OBSERVED_ALLOCATE, "fallocate", {-ENOSPC, -EIO}},
    {OBSERVED_PUNCH, "punch hole", {-EIO, -ENOSPC}},
    {OBSERVED_TRUNCATE, "ftruncate", {-ENOSPC, -EIO}},
    {OBSERVED_WRITE, "pwrite", {-ENOSPC, -EIO}},
    {OBSERVED_SYNC, "fdatasync", {-EIO, -ENOSPC}},
    {OBSERVED_MSYNC, "msync", {-EIO, -ENOSPC}},
    {OBSERVED_MAP, "mmap", {-ENOMEM, -EAGAIN}},
};
