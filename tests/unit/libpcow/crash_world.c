/* SPDX-License-Identifier: BSD-3-Clause */
#include "crash_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chain/chain.h"

/* The verdict; good until the next one. */
static char wrong[1500];

#define WRONG(...) (snprintf(wrong, sizeof wrong, __VA_ARGS__), wrong)

void page_fill(uint64_t *words, uint64_t page, uint16_t generation)
{
    for (unsigned i = 0; i < 512; i++)
        words[i] = generation ? (page + 1) << 32 | generation : 0;
}

void state_fill(uint64_t *words, size_t count, uint16_t generation)
{
    for (size_t i = 0; i < count; i++)
        words[i] = i < STATE_EDGE || i + STATE_EDGE >= count
                       ? UINT64_C(1) << 63 | (uint64_t)generation << 32 | i
                       : 0;
}

void view_put(struct view *view, unsigned page, uint16_t generation)
{
    struct cell *cell = &view->page[page];

    assert_true(cell->count < 4 && page < CRASH_PAGES);
    if (cell->count == 0)
        cell->generation[cell->count++] = 0;
    cell->generation[cell->count++] = generation;
}

void cell_settle(struct cell *cell)
{
    if (cell->count > 1) {
        cell->generation[0] = cell->generation[cell->count - 1];
        cell->count = 1;
    }
}

void view_settle(struct view *view)
{
    for (unsigned page = 0; page < CRASH_PAGES; page++)
        cell_settle(&view->page[page]);
}

struct saved *world_find(struct world *world, const char *name)
{
    for (unsigned i = 0; i < world->snapshots; i++)
        if (strcmp(world->saved[i].name, name) == 0)
            return &world->saved[i];
    return NULL;
}

void world_remove(struct world *world, const char *name)
{
    struct saved *gone = world_find(world, name);
    char parent[16];

    assert_non_null(gone);
    memcpy(parent, gone->parent, sizeof parent);
    *gone = world->saved[--world->snapshots];
    for (unsigned i = 0; i < world->snapshots; i++)
        if (strcmp(world->saved[i].parent, name) == 0)
            memcpy(world->saved[i].parent, parent, sizeof parent);
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool allows(const struct cell *cell, uint64_t page, uint64_t word)
{
    if (cell->count == 0)
        return word == 0;
    for (unsigned i = 0; i < cell->count; i++)
        if (word == (cell->generation[i] ? (page + 1) << 32 | cell->generation[i] : 0))
            return true;
    return false;
}

bool view_allows(const struct view *view, unsigned page, uint64_t word)
{
    return allows(&view->page[page], page, word);
}

static const char *describe(const struct cell *cell)
{
    static char text[64];

    snprintf(text, sizeof text, "0");
    for (unsigned i = 0, used = 0; i < cell->count; i++)
        used += (unsigned)snprintf(text + used, sizeof text - used, "%s%u", i ? " or " : "",
                                   cell->generation[i]);
    return text;
}

static const char *compare_page(pcow_image *image, const struct view *view, unsigned page,
                                bool present, uint16_t *newest, const char *what)
{
    const struct cell *cell = &view->page[page];
    uint64_t words[512];
    struct pcow_error error;

    if (!present)
        return allows(cell, page, 0)
                   ? NULL
                   : WRONG("%s: page %u is absent, not generation %s", what, page, describe(cell));
    if (pcow_read(image, page * UINT64_C(4096), words, sizeof words, &error))
        return WRONG("%s: page %u: %s", what, page, error.message);
    for (unsigned i = 0; i < 512; i++) {
        if (i && words[i] == words[i - 1])
            continue;
        if (!allows(cell, page, words[i]))
            return WRONG("%s: page %u word %u is %#llx (generation %u), not generation %s", what,
                         page, i, (unsigned long long)words[i], (unsigned)(words[i] & 0xffff),
                         describe(cell));
        if ((words[i] & 0xffff) > *newest)
            *newest = (uint16_t)(words[i] & 0xffff);
    }
    return NULL;
}

/* skip: pages that are not looked at (may be NULL). */
static const char *compare_view(pcow_image *image, const struct view *view, const bool *skip,
                                uint16_t *newest, const char *what)
{
    if (pcow_size(image) != view->size)
        return WRONG("%s: size is %llu, not %llu", what, (unsigned long long)pcow_size(image),
                     (unsigned long long)view->size);
    for (uint64_t offset = 0; offset < view->size;) {
        struct pcow_extent extent;
        struct pcow_error error;

        if (pcow_get_extent(image, offset, view->size - offset, &extent, &error))
            return WRONG("%s: %s", what, error.message);
        for (uint64_t end = offset + extent.length; offset < end; offset += 4096) {
            unsigned page = (unsigned)(offset / 4096);
            const char *bad = skip && skip[page]
                                  ? NULL
                                  : compare_page(image, view, page, extent.present, newest, what);

            if (bad)
                return bad;
        }
    }
    return NULL;
}

/* Let the open image show this layer, as pcow_open() with the name of its snapshot would. */
static void look_at(pcow_image *image, uint32_t layer)
{
    chain_free(image);
    image->view = layer;
    image->size = layer_find(image, layer)->virtual_size;
}

static const char *compare_state(pcow_image *image, const struct saved *saved)
{
    uint64_t *words = malloc(2 * saved->state_size + 8), *expected = words + saved->state_size / 8;
    const char *bad = NULL;
    struct pcow_error error;

    assert_non_null(words);
    state_fill(expected, saved->state_size / 8, saved->state_generation);
    if (pcow_snapshot_read_state(image, saved->name, 0, words, saved->state_size, &error))
        bad = WRONG("%s: %s", saved->name, error.message);
    else if (memcmp(words, expected, saved->state_size))
        bad = WRONG("%s: the VM state is not what was stored", saved->name);
    free(words);
    return bad;
}

static const char *compare_snapshots(pcow_image *image, const struct world *world, uint16_t *newest)
{
    const char *bad = NULL;
    struct pcow_snapshot *list;
    size_t count;

    MUST(pcow_snapshot_list(image, &list, &count, &error));
    if (count != world->snapshots)
        bad = WRONG("%zu snapshots, not %u", count, world->snapshots);
    for (size_t i = 0; i < count && !bad; i++) {
        const struct saved *saved = world_find((struct world *)world, list[i].name);
        const char *parent = "";

        for (size_t p = 0; p < count; p++)
            if (list[p].id == list[i].parent_id)
                parent = list[p].name;
        if (!saved)
            bad = WRONG("there is a snapshot '%s'", list[i].name);
        else if (strcmp(parent, saved->parent))
            bad = WRONG("%s stands on '%s', not '%s'", saved->name, parent, saved->parent);
        else if (list[i].state_size != saved->state_size)
            bad = WRONG("%s: VM state of %llu bytes, not %llu", saved->name,
                        (unsigned long long)list[i].state_size,
                        (unsigned long long)saved->state_size);
        else if (saved->state_size)
            bad = compare_state(image, saved);
        if (bad)
            break;
        look_at(image, list[i].id);
        bad = compare_view(image, &saved->view, NULL, newest, saved->name);
    }
    look_at(image, image_active(image));
    free(list);
    return bad;
}

static const char *compare_world(pcow_image *image, const struct world *world,
                                 const struct expectation *expectation)
{
    struct pcow_info info;
    uint16_t newest = 0;
    const char *bad = compare_view(image, &world->active, NULL, &newest, "active");

    if (!bad)
        bad = compare_snapshots(image, world, &newest);
    if (bad)
        return bad;
    pcow_get_info(image, &info);
    if (info.sealed != world->sealed)
        return WRONG("sealed: %d, not %d", info.sealed, world->sealed);
    if ((newest >= expectation->first_generation || world->changed)
        && info.generation <= expectation->image_generation)
        return WRONG("the content changed, but the generation (%llu) did not",
                     (unsigned long long)info.generation);
    return NULL;
}

/* Which of the worlds it is: a bit for each, 0: none. */
static unsigned compare(pcow_image *image, const struct expectation *expectation,
                        unsigned candidates, char *reasons, size_t room)
{
    unsigned matching = 0;
    size_t used = 0;

    for (unsigned i = 0; i < expectation->worlds; i++) {
        const char *bad;

        if (!(candidates >> i & 1))
            continue;
        bad = compare_world(image, expectation->world[i], expectation);
        if (!bad)
            matching |= 1u << i;
        else if (used < room)
            used +=
                (size_t)snprintf(reasons + used, room - used, "%s%s", used ? "; and: " : "", bad);
    }
    return matching;
}

static bool settle_as_read(pcow_image *image, struct view *view)
{
    for (unsigned page = 0; page < CRASH_PAGES; page++) {
        struct cell *cell = &view->page[page];
        uint64_t words[512];

        if (cell->count < 2)
            continue;
        MUST(pcow_read(image, page * UINT64_C(4096), words, sizeof words, &error));
        if (memcmp(words, words + 1, sizeof words - sizeof words[0]))
            return false;
        cell->generation[0] = (uint16_t)words[0];
        cell->count = 1;
    }
    return true;
}

bool world_recognize(const char *path, const struct expectation *expectation, struct world *world)
{
    char reasons[1200];
    pcow_image *image;
    unsigned matching;
    bool whole = false;

    if (pcow_open(path, 0, NULL, &image, NULL))
        return false;
    matching = compare(image, expectation, 3, reasons, sizeof reasons);
    if (matching) {
        *world = *expectation->world[matching & 1 ? 0 : 1];
        whole = settle_as_read(image, &world->active);
    }
    for (unsigned i = 0; i < world->snapshots && whole; i++) {
        look_at(image, layer_find_name(image, world->saved[i].name)->id);
        whole = settle_as_read(image, &world->saved[i].view);
    }
    pcow_close(image);
    return whole;
}

unsigned world_compare(pcow_image *image, const struct expectation *expectation, char *reasons,
                       size_t room)
{
    return compare(image, expectation, 3, reasons, room);
}

/* ---- judging --------------------------------------------------------------------------------- */

struct found {
    /* but VM state without a length, and a first store without a bitmap, which stay */
    uint64_t foreign_leaks;
    char text[600];
};

static void collect(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    struct found *found = opaque;

    if (kind == PCOW_FINDING_LEAK && !strstr(message, "behind its end")
        && !strstr(message, "a first store"))
        found->foreign_leaks++;
    if (kind == PCOW_FINDING_CORRUPTION || (kind == PCOW_FINDING_LEAK && !found->text[0]))
        snprintf(found->text, sizeof found->text, "%s", message);
}

const char *world_check(const char *path, const char *when, bool tidied)
{
    struct pcow_check_result result;
    struct pcow_data_result data;
    struct pcow_error error;
    struct found found = {0};

    if (pcow_check(path, 0, collect, &found, &result, &error))
        return WRONG("check %s: %s", when, error.message);
    if (result.corruptions)
        return WRONG("check %s: %s", when, found.text);
    if (pcow_check_data(path, 0, collect, NULL, &found, &data, &error))
        return WRONG("check of data %s: %s", when, error.message);
    if (data.corruptions)
        return WRONG("check of data %s: %s", when, found.text);
    /*
     * Where leaks may be: what an interrupted operation and what a killed writer has left, until
     * the next writer closes.
     */
    if (tidied && found.foreign_leaks)
        return WRONG("check %s: %s", when, found.text);
    return NULL;
}

/*
 * Life goes on: pages that were never there come up as zeros, and a snapshot can be taken, left and
 * deleted.
 */
const char *world_live_on(pcow_image *image, const struct world *world)
{
    bool touched[CRASH_PAGES] = {false};
    uint64_t word = UINT64_C(0xfeed), words[512];
    uint16_t newest = 0;
    const char *bad;
    struct pcow_error error;

    for (uint64_t slab = 0; slab < world->active.size; slab += PCOW_SLAB_SIZE)
        for (uint64_t offset = slab; offset < slab + PCOW_SLAB_SIZE; offset += 4096) {
            struct pcow_extent extent;

            if (pcow_get_extent(image, offset, 4096, &extent, &error))
                return WRONG("looking: %s", error.message);
            if (extent.present)
                continue;
            if (pcow_write(image, offset + 128, &word, sizeof word, &error)
                || pcow_read(image, offset, words, sizeof words, &error))
                return WRONG("writing: %s", error.message);
            touched[offset / 4096] = true;
            for (unsigned i = 0; i < 512; i++)
                if (words[i] != (i == 16 ? word : 0))
                    return WRONG("page %llu came up with %#llx", (unsigned long long)offset / 4096,
                                 (unsigned long long)words[i]);
            break;
        }
    if (pcow_snapshot_create(image, "later", &error)
        || pcow_write(image, 0, &word, sizeof word, &error)
        || pcow_snapshot_revert(image, "later", &error))
        return WRONG("living on: %s", error.message);
    bad = compare_view(image, &world->active, touched, &newest, "later");
    if (!bad && pcow_snapshot_delete(image, "later", NULL, &error))
        bad = WRONG("living on: %s", error.message);
    return bad ? bad : compare_view(image, &world->active, touched, &newest, "at last");
}

static const char *judge_base(const char *path, const struct world *world)
{
    const char *bad = world_check(path, "of the base", false);
    struct pcow_error error;
    pcow_image *image;
    uint16_t newest = 0;

    if (bad)
        return bad;
    if (pcow_open(path, 0, NULL, &image, &error))
        return WRONG("the base: %s", error.message);
    bad = compare_view(image, &world->base, NULL, &newest, "base");
    pcow_close(image);
    return bad;
}

/* What who opens it is told to do: check -r, if it is the header. */
static const char *mend_header(const char *path)
{
    struct pcow_check_result result;
    struct pcow_error error;
    pcow_image *image;
    int ret = pcow_open(path, 0, NULL, &image, &error);

    if (ret != -EBADMSG) {
        pcow_close(image);
        return NULL;
    }
    if (pcow_check(path, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error))
        return WRONG("repairing the header: %s", error.message);
    return result.losses || result.corruptions != result.corruptions_fixed
               ? WRONG("the repair of the header has losses")
               : NULL;
}

static const char *amend_again(const char *path)
{
    struct pcow_error error;
    pcow_image *image;
    int ret = pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, &error);

    pcow_close(image);
    if (ret == -EROFS)
        ret = pcow_add_mirror(path, &error);
    return ret ? WRONG("amending again: %s", error.message) : NULL;
}

const char *world_judge(const char *directory, const char *top, const char *base,
                        const struct expectation *expectation)
{
    char path[1024], base_path[1024], reasons[1200];
    const struct world *world = expectation->world[0];
    const char *bad = NULL;
    struct pcow_error error;
    unsigned matching, still;
    pcow_image *image;

    snprintf(path, sizeof path, "%s/%s", directory, top);
    snprintf(base_path, sizeof base_path, "%s/%s", directory, base ? base : "");
    if (base && world->has_base_view)
        bad = judge_base(base_path, world);
    if (!bad && world->amending)
        bad = mend_header(path);
    if (!bad)
        bad = world_check(path, "after the crash", false);
    if (bad)
        return bad;
    if (pcow_open(path, 0, NULL, &image, &error))
        return WRONG("after the crash: %s", error.message);
    matching = compare(image, expectation, 3, reasons, sizeof reasons);
    pcow_close(image);
    if (!matching)
        return WRONG("after the crash: %s", reasons);
    if (expectation->world[matching & 1 ? 0 : 1]->sealed)
        return NULL;
    if (world->amending && (bad = amend_again(path)))
        return bad;
    if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, &error))
        return WRONG("opening for writing: %s", error.message);
    still = compare(image, expectation, matching, reasons, sizeof reasons);
    if (!still)
        bad = WRONG("after opening for writing: %s", reasons);
    pcow_close(image);
    if (!bad)
        bad = world_check(path, "after opening for writing", true);
    if (bad)
        return bad;
    if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, &error))
        return WRONG("opening for writing again: %s", error.message);
    bad = world_live_on(image, expectation->world[still & 1 ? 0 : 1]);
    pcow_close(image);
    return bad ? bad : world_check(path, "after living on", true);
}
