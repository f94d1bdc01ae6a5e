/* SPDX-License-Identifier: BSD-3-Clause */
/* Sets of the 512 pages of a slab: one cache line. */
#ifndef PCOW_UTIL_BITS_H
#define PCOW_UTIL_BITS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define PAGES_PER_SLAB 512u
#define PAGE_SET_WORDS (PAGES_PER_SLAB / 64)

struct page_set {
    _Alignas(64) uint64_t word[PAGE_SET_WORDS];
};

/*
 * Words are read and written whole with relaxed atomics: the fault path reads sets that another
 * thread may be extending.
 */
static inline uint64_t page_set_word(const struct page_set *set, unsigned w)
{
    return __atomic_load_n(&set->word[w], __ATOMIC_ACQUIRE);
}

static inline bool page_set_has(const struct page_set *set, unsigned page)
{
    return page_set_word(set, page / 64) >> (page % 64) & 1;
}

/* What pages [first, first + count) are of this word, which has one of them at least. */
static inline uint64_t page_range_word(unsigned first, unsigned count, unsigned w)
{
    unsigned from = first > w * 64 ? first - w * 64 : 0;
    unsigned end = first + count < (w + 1) * 64 ? first + count - w * 64 : 64;

    return (end < 64 ? UINT64_C(1) << end : 0) - (UINT64_C(1) << from);
}

static inline void page_set_add_range(struct page_set *set, unsigned first, unsigned count)
{
    for (unsigned w = first / 64; count > 0 && w <= (first + count - 1) / 64; w++)
        set->word[w] |= page_range_word(first, count, w);
}

static inline unsigned page_set_count(const struct page_set *set)
{
    unsigned count = 0;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        count += (unsigned)__builtin_popcountll(page_set_word(set, w));
    return count;
}

static inline bool page_set_empty(const struct page_set *set)
{
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (page_set_word(set, w))
            return false;
    return true;
}

static inline bool page_set_full(const struct page_set *set)
{
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (page_set_word(set, w) != UINT64_MAX)
            return false;
    return true;
}

/* First page >= page whose membership is not that of page, at most end. */
static inline unsigned page_set_run_end(const struct page_set *set, unsigned page, unsigned end)
{
    bool member = page_set_has(set, page);

    while (page < end) {
        uint64_t differs = (member ? ~page_set_word(set, page / 64) : page_set_word(set, page / 64))
                           >> (page % 64);

        if (differs) {
            page += (unsigned)__builtin_ctzll(differs);
            return page < end ? page : end;
        }
        page = (page / 64 + 1) * 64;
    }
    return end;
}

#endif
