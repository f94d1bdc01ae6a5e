/* SPDX-License-Identifier: BSD-3-Clause */
#include "replay_machine.h"

#include <stdlib.h>
#include <string.h>

/* ---- what becomes certain -------------------------------------------------------------------- */

/* All operations up to the last one on this file are certain. */
static void commit_operations(struct machine *m, unsigned file)
{
    const struct entry *log = m->replay->entry;
    size_t last = 0, kept = 0;

    for (size_t i = 0; i < m->operations; i++)
        if (log[m->operation[i]].file == file)
            last = i + 1;
    for (size_t i = 0; i < last; i++) {
        const struct entry *operation = &log[m->operation[i]];

        operation_apply(m->base, NULL, operation);
        /* What was stored before and is now gone whether it was there or not. */
        kept = 0;
        for (size_t a = 0; a < m->atoms; a++)
            if (m->atom[a].entry > m->operation[i] || !operation_covers(operation, &m->atom[a]))
                m->atom[kept++] = m->atom[a];
        m->atoms = kept;
    }
    m->operations -= last;
    if (m->operations)
        memmove(m->operation, m->operation + last, m->operations * sizeof *m->operation);
}

/* The pending atoms for which this holds are certain from now on. */
static void settle(struct machine *m, bool flushed_only, unsigned file, uint64_t from, uint64_t to)
{
    size_t kept = 0;

    for (size_t a = 0; a < m->atoms; a++) {
        const struct atom *atom = &m->atom[a];
        const struct entry *entry = &m->replay->entry[atom->entry];

        if (flushed_only ? atom->flushed
                         : atom->file == file && atom->offset >= from && atom->offset < to)
            content_store(m->base, NULL, atom->file, atom->offset,
                          entry->bytes + (atom->offset - entry->offset), atom->length);
        else
            m->atom[kept++] = *atom;
    }
    m->atoms = kept;
}

/* ---- through the log ------------------------------------------------------------------------- */

static bool is_data(const struct entry *entry)
{
    bool head = (entry->offset >> SLAB_BITS) % SLABS_PER_GROUP == 0;

    /* The copy of the header is nobody's but check -r's. */
    return entry->torn
           && (!head
               || (entry->offset >= HEADER_COPY_OFFSET
                   && entry->offset < HEADER_COPY_OFFSET + HEADER_SIZE));
}

static void add_atoms(struct machine *m, size_t at)
{
    const struct entry *entry = &m->replay->entry[at];
    struct atom atom = {.entry = at, .file = entry->file, .metadata = !is_data(entry)};

    for (uint64_t offset = entry->offset, end = offset + entry->length; offset < end;
         offset += atom.length) {
        atom.offset = offset;
        atom.length = m->unit_size - offset % m->unit_size;
        if (atom.length > end - offset)
            atom.length = end - offset;
        /*
         * MAP_SYNC: the fault that gives the page its block commits what the file system was told
         * so far.
         */
        if (m->replay->persistence == PCOW_PERSISTENCE_PMEM
            && (offset % PAGE == 0 || offset == entry->offset)) {
            bool touched = content_find(m->base, content_key(entry->file, offset / PAGE))->key;
            size_t emptied = 0;

            for (size_t i = 0; i < m->operations; i++)
                if (operation_covers(&m->replay->entry[m->operation[i]], &atom)) {
                    touched = false;
                    emptied = m->operation[i];
                }
            for (size_t a = 0; a < m->atoms && !touched; a++)
                touched = m->atom[a].file == entry->file
                          && m->atom[a].offset / PAGE == offset / PAGE
                          && m->atom[a].entry > emptied;
            if (!touched && m->operations) {
                states_of_crash(m, at);
                commit_operations(m, entry->file);
            }
        }
        PUSH(m->atom, m->atoms, m->atom_capacity, atom);
    }
}

static void flush(struct machine *m, const struct entry *entry)
{
    uint64_t from = entry->offset / m->unit_size * m->unit_size, to = entry->offset + entry->length;

    for (size_t a = 0; a < m->atoms; a++)
        if (m->atom[a].file == entry->file && m->atom[a].offset >= from
            && m->atom[a].offset < (to + 63) / 64 * 64)
            m->atom[a].flushed = true;
}

static void step(struct machine *m, size_t at)
{
    const struct entry *entry = &m->replay->entry[at];
    uint64_t first = entry->offset / PAGE * PAGE,
             last = (entry->offset + entry->length + PAGE - 1) / PAGE * PAGE;

    switch (entry->kind) {
    case ENTRY_STORE:
        add_atoms(m, at);
        break;
    case ENTRY_FLUSH:
        flush(m, entry);
        break;
    case ENTRY_FENCE:
        states_of_crash(m, at);
        settle(m, true, 0, 0, 0);
        break;
    case ENTRY_MSYNC:
        states_of_crash(m, at);
        commit_operations(m, entry->file);
        settle(m, false, entry->file, first, last);
        break;
    case ENTRY_SYNC:
        states_of_crash(m, at);
        commit_operations(m, entry->file);
        settle(m, false, entry->file, 0, UINT64_MAX);
        break;
    case ENTRY_PUNCH:
    case ENTRY_SIZE:
        PUSH(m->operation, m->operations, m->operation_capacity, at);
        break;
    case ENTRY_MARK:
        states_of_crash(m, at);
        m->expectation = entry->expectation;
        break;
    }
}

/* Class volatile: the process dies between two stores, or in a copy. */
static void step_and_die(struct machine *m, size_t at)
{
    const struct entry *entry = &m->replay->entry[at];

    content_clear(m->state);
    memcpy(m->state->size, m->base->size, sizeof m->state->size);
    m->point = at;
    switch (entry->kind) {
    case ENTRY_STORE: {
        struct atom whole = {
            .entry = at, .file = entry->file, .offset = entry->offset, .length = entry->length};

        for (unsigned i = 0; entry->torn && i < 2 && m->expectation; i++) {
            state_store_some_words(m, &whole, entry->bytes);
            state_judge(m, 0);
            content_clear(m->state);
        }
        content_store(m->base, NULL, entry->file, entry->offset, entry->bytes, entry->length);
        break;
    }
    case ENTRY_PUNCH:
    case ENTRY_SIZE:
        operation_apply(m->base, NULL, entry);
        break;
    case ENTRY_MARK:
        m->expectation = entry->expectation;
        break;
    default:
        return;
    }
    memcpy(m->state->size, m->base->size, sizeof m->state->size);
    if (!m->expectation)
        return;
    m->replay->points++;
    state_judge(m, 0);
}

bool replay_run(struct replay *replay)
{
    struct machine m = {
        .replay = replay, .base = calloc(1, sizeof *m.base), .state = calloc(1, sizeof *m.state)};
    bool kill = replay->persistence == PCOW_PERSISTENCE_VOLATILE;

    assert_non_null(m.base);
    assert_non_null(m.state);
    m.unit_size = replay->persistence == PCOW_PERSISTENCE_PMEM ? 64 : 512;
    for (unsigned file = 0; file < replay->recorder->files; file++) {
        const struct recorded_file *from = &replay->recorder->file[file];

        m.base->size[file] = from->size;
        for (size_t i = 0; i < from->pages; i++)
            content_store(m.base, NULL, file, from->page[i].number * PAGE, from->page[i].bytes,
                          PAGE);
    }
    replay->failure[0] = 0;
    for (size_t at = 0; at < replay->count && !m.failed; at++)
        (kill ? step_and_die : step)(&m, at);
    if (!kill)
        states_of_crash(&m, replay->count);
    content_free(m.base);
    content_free(m.state);
    free(m.atom);
    free(m.operation);
    free(m.unit);
    return !m.failed;
}
