/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Making stores durable, by class:
 *   pmem        flush the cache lines (clwb, else clflushopt, else clflush), then sfence; needs a MAP_SYNC mapping
 *   page-cache  msync
 *   volatile    nothing: the page cache of tmpfs is the medium, and x86 keeps the order of stores for other processes
 * Async-signal-safe throughout: the fault path calls it.
 * Source: Intel SDM vol. 1 ch. 12 (flush instructions), mmap(2) MAP_SYNC.
 */
#ifndef PCOW_PERSIST_PERSIST_H
#define PCOW_PERSIST_PERSIST_H

#include <stddef.h>
#include <stdint.h>

#include "pcow.h"
#include "persist/failures.h"
#include "persist/observer.h"

struct persist {
    enum pcow_persistence persistence;
    int map_flags;                                             /* for mmap() of what is stored to */
    /* class pmem: the file system never moves a block that was written */
    bool fixed_blocks;
    void (*flush_lines)(const void *address, size_t length);   /* class pmem only */
    /* NULL but in tests, see observer.h */
    struct observer *observer;
    /* of all requests to write the file to the medium */
    struct failures failures;
};

/*
 * Choose the instructions for this CPU. With an observer (may be NULL) its class counts, and
 * MAP_SYNC is not asked for.
 */
void persist_init(struct persist *persist, enum pcow_persistence persistence,
                  struct observer *observer);
/*
 * Find out about fixed_blocks, for a file of class pmem that is open for writing; on XFS it may get
 * a flag for that. See blocks.c.
 */
void persist_find_fixed_blocks(struct persist *persist, int fd);

/* Let the observer look; 0, or its verdict. */
static inline int persist_observe(const struct persist *persist, struct observation observation)
{
    if (__builtin_expect(persist->observer == NULL, 1))
        return 0;
    observation.persist = persist;
    return persist->observer->look(persist->observer, &observation);
}

/*
 * The class of the file system of an open, writable or read-only regular file: MAP_SYNC is tried on
 * it.
 */
enum pcow_persistence persist_classify(int fd);

/*
 * Flush and fence [address, address + length). 0 or -EIO (msync), which is counted among the
 * failures.
 */
int persist_range(struct persist *persist, const void *address, size_t length);

/*
 * Stores that are not durable before persist_range(): one aligned word, or a copy whose words may
 * arrive in any order. All metadata is stored through these.
 */
void persist_word(const struct persist *persist, uint64_t *where, uint64_t value);
/* The word, if it is still this one: was it? */
bool persist_word_if(const struct persist *persist, uint64_t *where, uint64_t expected,
                     uint64_t value);
void persist_bytes(const struct persist *persist, void *where, const void *from, size_t length);

/* Order what was flushed before what follows. */
void persist_fence(const struct persist *persist);

/*
 * Copy to persistent memory past the caches where the CPU can; durable after persist_fence(). 0 or
 * -EIO, see copy.h.
 */
int persist_copy(const struct persist *persist, void *to, const void *from, size_t length);

#endif
