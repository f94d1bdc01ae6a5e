/* SPDX-License-Identifier: BSD-3-Clause */
#include "crash_steps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "chain/chain.h"
#include "image/known.h"
#include "image/mirror_follow.h"
#include "monitor/monitor.h"

/* ---- what must hold -------------------------------------------------------------------------- */

static void *keep(struct crash *c, const void *what, size_t size)
{
    void *copy = malloc(size);

    c->kept = realloc(c->kept, (c->kept_count + 1) * sizeof *c->kept);
    assert_true(copy && c->kept);
    memcpy(copy, what, size);
    c->kept[c->kept_count++] = copy;
    return copy;
}

/* From here on the image is as the model is now, or, if before is not NULL, as it was before. */
void step_expect(struct crash *c, const struct world *before)
{
    struct expectation expectation = c->expects;

    if (!c->recording)
        return;
    if (before)
        expectation.world[expectation.worlds++] = keep(c, before, sizeof *before);
    expectation.world[expectation.worlds++] = keep(c, &c->now, sizeof c->now);
    recorder_mark(&c->recorder, keep(c, &expectation, sizeof expectation));
}

/* A killed process loses nothing of what was done. */
static void done(struct crash *c)
{
    if (c->persistence != PCOW_PERSISTENCE_VOLATILE && c->recording)
        return;
    view_settle(&c->now.active);
    step_expect(c, NULL);
}

/* What the library itself copies in class pmem is durable at once. */
static void written(struct crash *c, unsigned first, unsigned count)
{
    done(c);
    if (c->persistence != PCOW_PERSISTENCE_PMEM || !c->recording)
        return;
    for (unsigned page = first; page < first + count; page++)
        cell_settle(&c->now.active.page[page]);
    step_expect(c, NULL);
}

/* ---- what is done ---------------------------------------------------------------------------- */

void step_put(struct crash *c, unsigned first, unsigned count)
{
    uint64_t *words = malloc(count * 4096);

    assert_non_null(words);
    c->generation++;
    for (unsigned i = 0; i < count; i++) {
        page_fill(words + i * 512, first + i, c->generation);
        view_put(&c->now.active, first + i, c->generation);
    }
    step_expect(c, NULL);
    MUST(pcow_write(c->image, first * UINT64_C(4096), words, count * UINT64_C(4096), &error));
    written(c, first, count);
    free(words);
}

void step_zero(struct crash *c, unsigned first, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        view_put(&c->now.active, first + i, 0);
    step_expect(c, NULL);
    MUST(pcow_write_zeroes(c->image, first * UINT64_C(4096), count * UINT64_C(4096), &error));
    done(c);
}

void step_flush(struct crash *c)
{
    MUST(pcow_flush(c->image, &error));
    view_settle(&c->now.active);
    step_expect(c, NULL);
}

/* The guest stores to a page of its memory. Class pmem: it does not flush yet. */
void step_guest_store(struct crash *c, unsigned page)
{
    uint64_t words[512];

    /* What the trap does may change nothing that can be read. */
    MUST(pcow_map_resolve(c->map, page * UINT64_C(4096), 4096, true, &error));
    page_fill(words, page, ++c->generation);
    view_put(&c->now.active, page, c->generation);
    step_expect(c, NULL);
    recorder_guest_store(&c->recorder, page * UINT64_C(4096), words, sizeof words);
    c->stores_left |= c->persistence == PCOW_PERSISTENCE_PMEM;
    done(c);
}

void step_guest_flush(struct crash *c, unsigned page)
{
    struct cell *cell = &c->now.active.page[page];

    recorder_guest_flush(&c->recorder, page * UINT64_C(4096), 4096);
    /* It may flush more than it was asked to. */
    cell_settle(cell);
    step_expect(c, NULL);
}

void step_map(struct crash *c)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    MUST(pcow_map_create(c->image, &options, &c->map, &error));
    c->recorder.map = c->map;
}

/*
 * Slabs are taken, emptied and filled with zeros ahead of the guest, and have no owner yet. In
 * class page-cache none is.
 */
void step_map_prepared(struct crash *c)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL, .prepared_slabs = 3};
    struct pcow_map_stats stats;

    MUST(pcow_map_create(c->image, &options, &c->map, &error));
    c->recorder.map = c->map;
    for (unsigned tries = 0; tries < 5000; tries++) {
        pcow_map_get_stats(c->map, &stats);
        if (stats.slabs_ready >= 3 || c->persistence == PCOW_PERSISTENCE_PAGE_CACHE)
            return;
        usleep(1000);
    }
    fail_msg("no slab is prepared");
}

void step_follow(struct crash *c)
{
    static struct mirror_round round;
    struct file *file = &c->image->file;

    if (c->persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        return;
    turnstile_take(c->map);
    while (mirror_take_pages(file, &(struct mirror_known){known_page, c->image}, &round))
        ;
    turnstile_release(c->map);
    assert_int_equal(round.left, 0);
    assert_true(round.count > 0);
    assert_int_equal(mirror_end_round(file, &round), 0);
}

void step_keep_spare(struct crash *c, bool keep)
{
    struct pcow_map_stats stats;
    unsigned wanted = keep ? 3 : 0;

    MUST(pcow_map_keep_spare(c->map, keep, 3 * MIB, &error));
    for (unsigned tries = 0; tries < 5000; tries++) {
        pcow_map_get_stats(c->map, &stats);
        if (stats.slabs_spare == wanted)
            return;
        usleep(1000);
    }
    fail_msg("%u spare slabs", stats.slabs_spare);
}

void step_unmap(struct crash *c)
{
    c->recorder.map = NULL;
    pcow_map_destroy(c->map);
    c->map = NULL;
}

static const char *current(pcow_image *image)
{
    static char name[PCOW_SNAPSHOT_NAME_SIZE];
    struct pcow_snapshot *list;
    size_t count;

    name[0] = 0;
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    for (size_t i = 0; i < count; i++)
        if (list[i].current)
            memcpy(name, list[i].name, sizeof name);
    free(list);
    return name;
}

static void add_saved(struct crash *c, const char *name)
{
    struct saved *saved = &c->now.saved[c->now.snapshots++];

    assert_true(c->now.snapshots <= CRASH_SNAPSHOTS);
    memset(saved, 0, sizeof *saved);
    snprintf(saved->name, sizeof saved->name, "%s", name);
    snprintf(saved->parent, sizeof saved->parent, "%s", current(c->image));
    /*
     * Class page-cache: it flushes everything first. Class pmem: what the guest did not flush stays
     * as uncertain as it was.
     */
    if (c->persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        view_settle(&c->now.active);
    saved->view = c->now.active;
}

void step_snapshot(struct crash *c, const char *name)
{
    OPERATION(c, add_saved(c, name), pcow_snapshot_create(c->image, name, &error));
}

static void flush_map(struct crash *c)
{
    MUST(pcow_map_flush(c->map, 0, CRASH_SIZE, &error));
    view_settle(&c->now.active);
    step_expect(c, NULL);
}

void step_prepare(struct crash *c, const char *name)
{
    int ret;

    while ((ret = pcow_snapshot_prepare(c->image, name, 1, 2, &c->token, NULL)) == PCOW_FLUSH_FIRST)
        flush_map(c);
    assert_int_equal(ret, 0);
    c->now.changed = true;
    step_expect(c, NULL);
}

void step_freeze(struct crash *c, const char *name)
{
    struct saved *frozen = &c->frozen;

    memset(frozen, 0, sizeof *frozen);
    snprintf(frozen->name, sizeof frozen->name, "%s", name);
    snprintf(frozen->parent, sizeof frozen->parent, "%s", current(c->image));
    frozen->view = c->now.active;
    MUST(pcow_snapshot_freeze(c->image, c->token, &error));
    step_expect(c, NULL);
}

void step_finish(struct crash *c)
{
    struct world before = c->now;
    int ret;

    /* When there is a snapshot it is whole, whatever the guest has flushed itself. */
    view_settle(&c->frozen.view);
    c->now.saved[c->now.snapshots++] = c->frozen;
    assert_true(c->now.snapshots <= CRASH_SNAPSHOTS);
    step_expect(c, &before);
    while ((ret = pcow_snapshot_finish(c->image, c->token, NULL, NULL)) == PCOW_FLUSH_FIRST)
        MUST(pcow_map_flush(c->map, 0, CRASH_SIZE, &error));
    assert_int_equal(ret, 0);
    if (c->persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        view_settle(&c->now.active);
    step_expect(c, NULL);
}

void step_abandon(struct crash *c)
{
    MUST(pcow_snapshot_abandon(c->image, c->token, &error));
    step_expect(c, NULL);
}

void step_revert(struct crash *c, const char *name)
{
    OPERATION(c, c->now.active = world_find(&c->now, name)->view,
              pcow_snapshot_revert(c->image, name, &error));
}

void step_revert_to_base(struct crash *c)
{
    OPERATION(c, c->now.active = c->below, pcow_snapshot_revert(c->image, NULL, &error));
}

void step_delete(struct crash *c, const char *which)
{
    char name[16];

    /* It may be a name in the model, which goes. */
    snprintf(name, sizeof name, "%s", which);
    OPERATION(c, world_remove(&c->now, name), pcow_snapshot_delete(c->image, name, NULL, &error));
}

/* What nothing shows any more leaves the file: nothing that can be read changes. */
void step_reclaim(struct crash *c)
{
    step_expect(c, NULL);
    MUST(pcow_reclaim(c->image, NULL, &error));
}

static void rename_in(struct world *world, const char *name, const char *new_name)
{
    for (unsigned i = 0; i < world->snapshots; i++) {
        struct saved *saved = &world->saved[i];

        if (strcmp(saved->name, name) == 0)
            snprintf(saved->name, sizeof saved->name, "%s", new_name);
        if (strcmp(saved->parent, name) == 0)
            snprintf(saved->parent, sizeof saved->parent, "%s", new_name);
    }
}

void step_rename(struct crash *c, const char *name, const char *new_name)
{
    OPERATION(c, rename_in(&c->now, name, new_name),
              pcow_snapshot_rename(c->image, name, new_name, &error));
}

void step_resize(struct crash *c, uint64_t size)
{
    struct view *view = &c->now.active;

    OPERATION(c, {
        for (uint64_t page = size / 4096; page < view->size / 4096; page++)
            view->page[page].count = 0;
        view->size = size;
    }, pcow_resize(c->image, size, true, &error));
}

void step_vm_state(struct crash *c, const char *name, size_t size)
{
    const size_t edge = STATE_EDGE * sizeof(uint64_t);
    uint64_t *words = malloc(size);
    struct saved *saved = world_find(&c->now, name);

    assert_non_null(words);
    state_fill(words, size / 8, ++c->generation);
    if (size <= 2 * edge) {
        MUST(pcow_snapshot_write_state(c->image, name, 0, words, size, &error));
    } else {
        MUST(pcow_snapshot_write_state(c->image, name, 0, words, edge, &error));
        MUST(pcow_snapshot_write_state(c->image, name, size - edge, (char *)words + size - edge,
                                       edge, &error));
    }
    OPERATION(c, (saved->state_size = size, saved->state_generation = c->generation),
              pcow_snapshot_set_state_size(c->image, name, size, &error));
    free(words);
}

void step_last_vm_state(struct crash *c, const char *name, size_t size)
{
    struct pcow_map_stats stats;

    recorder_fill(&c->recorder, c->image->file.fd);
    pcow_map_use_spare(c->map, true);
    step_vm_state(c, name, size);
    pcow_map_get_stats(c->map, &stats);
    assert_true(stats.slabs_spare < stats.slabs_spare_wanted);
    pcow_map_use_spare(c->map, false);
    recorder_fill(&c->recorder, -1);
}
