/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A set of numbers below a limit, mostly few of very many: to walk over it takes time in proportion
 * to what is in it. Numbers come in, in any thread, and stay. Three levels of bits, where one of a
 * higher level tells that there may be some in a word of the one below: so it comes first, and who
 * finds a bit of the lowest level set knows that the others are. Memory that is never touched costs
 * nothing. Async-signal-safe but for the first and the last.
 */
#ifndef PCOW_UTIL_SPARSE_SET_H
#define PCOW_UTIL_SPARSE_SET_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/* 64^3 words of the highest level would be enough for anything; here it has a few dozen */
#define SPARSE_LEVELS 3u

struct sparse_set {
    uint64_t *level[SPARSE_LEVELS];    /* the lowest first */
    uint64_t limit;
};

static inline void sparse_set_free(struct sparse_set *set)
{
    for (unsigned l = 0; l < SPARSE_LEVELS; l++) {
        free(set->level[l]);
        set->level[l] = NULL;
    }
}

static inline bool sparse_set_init(struct sparse_set *set, uint64_t limit)
{
    uint64_t bits = set->limit = limit;

    for (unsigned l = 0; l < SPARSE_LEVELS; l++) {
        uint64_t words = bits / 64 + 1;

        set->level[l] = calloc(words, sizeof(uint64_t));
        if (!set->level[l]) {
            sparse_set_free(set);
            return false;
        }
        bits = words;
    }
    return true;
}

static inline void sparse_set_add(struct sparse_set *set, uint64_t number)
{
    if (__atomic_load_n(&set->level[0][number / 64], __ATOMIC_RELAXED) >> number % 64 & 1)
        return;
    for (unsigned l = SPARSE_LEVELS; l-- > 0;) {
        uint64_t bit = number >> (6 * l);

        __atomic_fetch_or(&set->level[l][bit / 64], UINT64_C(1) << bit % 64, __ATOMIC_SEQ_CST);
    }
}

/* The first bit of a level from one on; UINT64_MAX: none below so many. */
static inline uint64_t sparse_set_find(const uint64_t *level, uint64_t from, uint64_t bits)
{
    while (from < bits) {
        uint64_t word = __atomic_load_n(&level[from / 64], __ATOMIC_SEQ_CST) >> from % 64;

        if (word) {
            from += (unsigned)__builtin_ctzll(word);
            return from < bits ? from : UINT64_MAX;
        }
        from = (from / 64 + 1) * 64;
    }
    return UINT64_MAX;
}

/* The first number in the set from one on; the limit: there is none. */
static inline uint64_t sparse_set_next(const struct sparse_set *set, uint64_t from)
{
    while (from < set->limit) {
        uint64_t end = (from / 64 + 1) * 64,
                 found = sparse_set_find(set->level[0], from, end < set->limit ? end : set->limit),
                 word, top;

        if (found != UINT64_MAX)
            return found;
        /*
         * The next word of the lowest level that may have some: in the same word of the one above,
         * or by the highest.
         */
        word = from / 64 + 1;
        found = sparse_set_find(set->level[1], word, (word / 64 + 1) * 64);
        if (found == UINT64_MAX) {
            top = sparse_set_find(set->level[2], word / 64 + 1, set->limit / 4096 + 1);
            if (top == UINT64_MAX)
                return set->limit;
            found = sparse_set_find(set->level[1], top * 64, (top + 1) * 64);
            if (found == UINT64_MAX)
                found = (top + 1) * 64;        /* it has just come in */
        }
        from = found * 64;
    }
    return set->limit;
}

#endif
