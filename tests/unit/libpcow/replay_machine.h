/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The medium while a log is replayed: what is on it for certain, and what may be. Shared by
 * replay.c and replay_states.c.
 */
#ifndef PCOW_TEST_REPLAY_MACHINE_H
#define PCOW_TEST_REPLAY_MACHINE_H

#include "replay.h"

/* A store, or the piece of one, in one unit (line or sector). */
struct atom {
    size_t entry;
    unsigned file;
    uint64_t offset, length;
    bool flushed, metadata;
};

/* The pending atoms of one unit: how many there are, in log order. */
struct unit {
    uint64_t key;
    unsigned atoms, chosen;               /* chosen: atoms that are there; */
    bool partial;                         /* of the next one, which is a copy, some words too */
    bool metadata, torn;
};

struct machine {
    struct replay *replay;
    struct content *base, *state;
    uint64_t unit_size;
    struct atom *atom;
    size_t atoms, atom_capacity;
    size_t *operation;                    /* entries of file operations that are not certain */
    size_t operations, operation_capacity;
    struct unit *unit;
    size_t units, unit_capacity;
    const void *expectation;
    size_t point;                         /* entry before which the crash is */
    bool failed;
};

#define PUSH(array, count, capacity, value)                                              \
    do {                                                                                 \
        if ((count) == (capacity)) {                                                     \
            (capacity) = (capacity) ? (capacity) * 2 : 256;                              \
            (array) = realloc((array), (capacity) * sizeof *(array));                    \
            assert_non_null(array);                                                      \
        }                                                                                \
        (array)[(count)++] = (value);                                                    \
    } while (0)

/* Would the atom be gone after this file operation? */
bool operation_covers(const struct entry *operation, const struct atom *atom);
void operation_apply(struct content *content, struct content *below, const struct entry *operation);

/*
 * Judge the state that is in state, if it is new; operations: so many of the uncertain file
 * operations are in it.
 */
void state_judge(struct machine *m, size_t operations);
/* Words of a copy, at random. */
void state_store_some_words(struct machine *m, const struct atom *atom, const uint8_t *bytes);
/* All states that a crash before this entry could leave, or the extreme ones and a sample. */
void states_of_crash(struct machine *m, size_t point);

#endif
