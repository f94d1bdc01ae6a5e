/* SPDX-License-Identifier: BSD-3-Clause */
#include "replay_machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool operation_covers(const struct entry *operation, const struct atom *atom)
{
    if (operation->file != atom->file)
        return false;
    if (operation->kind == ENTRY_PUNCH)
        return atom->offset >= operation->offset
               && atom->offset < operation->offset + operation->length;
    return atom->offset >= operation->length;     /* behind the end of file that it sets */
}

void operation_apply(struct content *content, struct content *below, const struct entry *operation)
{
    if (operation->kind == ENTRY_PUNCH) {
        content_wipe(content, below, operation->file, operation->offset, operation->length);
        return;
    }
    if (operation->length < content->size[operation->file])
        content_wipe(content, below, operation->file, operation->length,
                     content->size[operation->file] - operation->length);
    content->size[operation->file] = operation->length;
}

/* ---- one state ------------------------------------------------------------------------------- */

static bool is_zero(const uint8_t *bytes)
{
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, PAGE - 1) == 0;
}

static void write_file(struct machine *m, unsigned file, int fd)
{
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(ftruncate(fd, (off_t)m->state->size[file]), 0);
    for (unsigned pass = 0; pass < 2; pass++) {
        struct content *content = pass ? m->state : m->base;

        for (unsigned i = 0; i < content->count; i++) {
            const struct content_page *slot = &content->slot[content->used[i]];
            uint64_t at = (slot->key & ((UINT64_C(1) << 48) - 1)) * PAGE;

            if (slot->key >> 48 != file + 1 || at >= m->state->size[file] || is_zero(slot->bytes)
                || (pass == 0 && content_find(m->state, slot->key)->key))
                continue;
            assert_int_equal(pwrite(fd, slot->bytes, PAGE, (off_t)at), PAGE);
        }
    }
}

static void materialize(struct machine *m)
{
    for (unsigned file = 0; file < m->replay->recorder->files; file++) {
        const char *path = m->replay->recorder->file[file].path;
        char copy[1024];
        int fd;

        snprintf(copy, sizeof copy, "%s%s", m->replay->directory, strrchr(path, '/'));
        fd = open(copy, O_RDWR | O_CREAT, 0600);
        assert_true(fd >= 0);
        write_file(m, file, fd);
        close(fd);
    }
}

static uint64_t state_hash(struct machine *m)
{
    uint64_t hash = 0;

    for (unsigned i = 0; i < m->base->count; i++) {
        struct content_page *slot = &m->base->slot[m->base->used[i]];

        if (!content_find(m->state, slot->key)->key)
            hash += content_hash(slot) & ~UINT64_C(1);
    }
    for (unsigned i = 0; i < m->state->count; i++)
        hash += content_hash(&m->state->slot[m->state->used[i]]) & ~UINT64_C(1);
    for (unsigned file = 0; file < m->replay->recorder->files; file++)
        hash = hash_mix(hash, m->state->size[file]);
    return hash_mix(hash, (uintptr_t)m->expectation);
}

static void tell(struct machine *m, const char *wrong, size_t operations)
{
    struct replay *replay = m->replay;
    size_t used = 0, room = sizeof replay->failure;
    const struct entry *next = m->point < replay->count ? &replay->entry[m->point] : NULL;

    used += (size_t)snprintf(
        replay->failure, room,
        "%s\n  crash before entry %zu of %zu (%s); %zu of %zu file operations; there:", wrong,
        m->point, replay->count, next ? recorder_describe(next) : "the end", operations,
        m->operations);
    for (size_t u = 0; u < m->units && used + 100 < room; u++) {
        const struct unit *unit = &m->unit[u];
        struct entry at = {.kind = ENTRY_STORE,
                           .offset = (unit->key & ((UINT64_C(1) << 48) - 1)) * m->unit_size};

        if (unit->metadata)
            used += (size_t)snprintf(replay->failure + used, room - used, " [%s %#llx: %u%s of %u]",
                                     recorder_describe(&at), (unsigned long long)at.offset,
                                     unit->chosen, unit->partial ? "+" : "", unit->atoms);
    }
    m->failed = true;
}

void state_judge(struct machine *m, size_t operations)
{
    uint64_t hash = state_hash(m);
    const char *wrong;

    m->replay->built++;
    if (m->failed || seen_has(m->replay->seen, hash))
        return;
    materialize(m);
    m->replay->judged++;
    wrong = m->replay->judge(m->replay->opaque, m->expectation);
    if (wrong)
        tell(m, wrong, operations);
    else
        seen_add(m->replay->seen, hash);
}

void state_store_some_words(struct machine *m, const struct atom *atom, const uint8_t *bytes)
{
    uint64_t coins = random_next(&m->replay->seed);

    for (uint64_t at = 0; at < atom->length;) {
        uint64_t offset = atom->offset + at, piece = 8 - offset % 8;

        if (piece > atom->length - at)
            piece = atom->length - at;
        if (coins & 1)
            content_store(m->state, m->base, atom->file, offset, bytes + at, piece);
        coins = coins >> 1 | coins << 63;
        at += piece;
    }
}

static struct unit *unit_of(struct machine *m, const struct atom *atom)
{
    uint64_t key = (uint64_t)atom->file << 48 | atom->offset / m->unit_size;

    for (size_t u = m->units; u-- > 0;)
        if (m->unit[u].key == key)
            return &m->unit[u];
    return NULL;
}

/* The state that the chosen atoms and the first operations make. */
static void build(struct machine *m, size_t operations)
{
    const struct entry *log = m->replay->entry;
    size_t next = 0;

    content_clear(m->state);
    memcpy(m->state->size, m->base->size, sizeof m->state->size);
    for (size_t u = 0; u < m->units; u++)
        m->unit[u].atoms = 0;
    for (size_t a = 0; a < m->atoms; a++) {
        const struct atom *atom = &m->atom[a];
        struct unit *unit = unit_of(m, atom);
        const uint8_t *bytes = log[atom->entry].bytes + (atom->offset - log[atom->entry].offset);
        bool late = false;

        while (next < operations && m->operation[next] < atom->entry)
            operation_apply(m->state, m->base, &log[m->operation[next++]]);
        /* On top of an operation that is not there: neither is this. */
        for (size_t i = operations; i < m->operations && m->operation[i] < atom->entry; i++)
            late |= log[m->operation[i]].kind == ENTRY_PUNCH
                    && operation_covers(&log[m->operation[i]], atom);
        if (unit->atoms < unit->chosen && !late && atom->offset < m->state->size[atom->file])
            content_store(m->state, m->base, atom->file, atom->offset, bytes, atom->length);
        else if (unit->atoms == unit->chosen && unit->partial && !late
                 && atom->offset < m->state->size[atom->file])
            state_store_some_words(m, atom, bytes);
        unit->atoms++;
    }
    while (next < operations)
        operation_apply(m->state, m->base, &log[m->operation[next++]]);
    state_judge(m, operations);
}

/* ---- all states of a crash point ------------------------------------------------------------- */

static void find_units(struct machine *m)
{
    m->units = 0;
    for (size_t a = 0; a < m->atoms; a++) {
        const struct atom *atom = &m->atom[a];
        struct unit *unit = unit_of(m, atom);

        if (!unit) {
            struct unit fresh = {.key = (uint64_t)atom->file << 48 | atom->offset / m->unit_size};

            PUSH(m->unit, m->units, m->unit_capacity, fresh);
            unit = &m->unit[m->units - 1];
        }
        unit->atoms++;
        unit->metadata |= atom->metadata;
        unit->torn |= m->replay->entry[atom->entry].torn;
    }
}

/* Ways in which a unit can be: the number of its atoms there, and of a copy some words. */
static unsigned ways(const struct unit *unit)
{
    return unit->torn ? unit->atoms * 2 + 1 : unit->atoms + 1;
}

static void choose(struct unit *unit, unsigned way)
{
    unit->chosen = unit->torn ? way / 2 : way;
    unit->partial = unit->torn && way % 2;
}

static void choose_all(struct machine *m, bool metadata, bool there)
{
    for (size_t u = 0; u < m->units; u++)
        if (m->unit[u].metadata == metadata)
            choose(&m->unit[u], there ? ways(&m->unit[u]) - 1 : 0);
}

static void choose_any(struct machine *m, bool metadata)
{
    for (size_t u = 0; u < m->units; u++)
        if (m->unit[u].metadata == metadata)
            choose(&m->unit[u], (unsigned)(random_next(&m->replay->seed) % ways(&m->unit[u])));
}

/* Guest data: nothing of it, all, or anything. There are too many lines to go through. */
static void build_with_data(struct machine *m, size_t operations)
{
    bool data = false;

    for (size_t u = 0; u < m->units; u++)
        data |= !m->unit[u].metadata;
    for (unsigned way = 0; way < (data ? 3 : 1) && !m->failed; way++) {
        if (way < 2)
            choose_all(m, false, way == 1);
        else
            choose_any(m, false);
        build(m, operations);
    }
}

/* How many combinations; limit + 1 if they are more than the limit. */
static uint64_t combinations(const struct machine *m)
{
    uint64_t all = m->operations + 1;

    for (size_t u = 0; u < m->units && all <= m->replay->limit; u++)
        if (m->unit[u].metadata)
            all *= ways(&m->unit[u]);
    return all <= m->replay->limit ? all : m->replay->limit + UINT64_C(1);
}

static void build_combination(struct machine *m, uint64_t number)
{
    size_t operations = number % (m->operations + 1);

    number /= m->operations + 1;
    for (size_t u = 0; u < m->units; u++)
        if (m->unit[u].metadata) {
            choose(&m->unit[u], (unsigned)(number % ways(&m->unit[u])));
            number /= ways(&m->unit[u]);
        }
    build_with_data(m, operations);
}

/* One unit that differs from all the others tells most. */
static void build_extremes(struct machine *m)
{
    for (unsigned there = 0; there < 2; there++)
        for (unsigned operations = 0; operations < 2; operations++) {
            choose_all(m, true, there);
            build_with_data(m, operations ? m->operations : 0);
            for (size_t u = 0; u < m->units && !m->failed; u++) {
                if (!m->unit[u].metadata)
                    continue;
                choose_all(m, true, there);
                choose(&m->unit[u], there ? 0 : ways(&m->unit[u]) - 1);
                build_with_data(m, operations ? m->operations : 0);
            }
        }
}

void states_of_crash(struct machine *m, size_t point)
{
    uint64_t all;

    m->point = point;
    if (m->failed || point < m->replay->skip || !m->expectation)
        return;
    m->replay->points++;
    find_units(m);
    all = combinations(m);
    if (all <= m->replay->limit) {
        for (uint64_t i = 0; i < all && !m->failed; i++)
            build_combination(m, i);
        return;
    }
    m->replay->sampled++;
    build_extremes(m);
    for (uint64_t i = 0; i < m->replay->limit && !m->failed; i++) {
        choose_any(m, true);
        build_with_data(m, random_next(&m->replay->seed) % (m->operations + 1));
    }
}
