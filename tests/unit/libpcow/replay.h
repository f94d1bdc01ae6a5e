/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * From a log (recorder.h): every state that a crash could leave on the medium. What is durable is
 * certain; of the rest anything may be there, by these rules:
 *
 *   pmem        A cache line holds some of the stores to it, in order, from the first on: it may be evicted at any time and each line on
 *               its own. A store is certain when its line was flushed after it and a fence came
 *               after that.
 *   page-cache The same with sectors of 512 bytes (the kernel writes pages back when it likes, and
 *   a write may be cut between
 *               sectors), and what makes certain is msync() and fdatasync().
 *   volatile    The crash of the process: everything before it is there, nothing after it.
 *
 * The words of a copy arrive in any order. What the file system was told (end of file, holes) is
 * there up to some point, in order, as a journal keeps it; it is certain after fdatasync() or
 * msync() of the file, and, in class pmem, before the first store to a page that has no block yet
 * (MAP_SYNC). A store to such a page is there only if the operation before it is.
 *
 * Crash points are all those at which something becomes certain or another expectation begins to
 * hold: at each of them, all combinations, or, if they are more than the limit, the extreme ones
 * and a sample.
 */
#ifndef PCOW_TEST_REPLAY_H
#define PCOW_TEST_REPLAY_H

#include "content.h"

struct replay {
    const struct recorder *recorder;      /* the files */
    const struct entry *entry;            /* the log, possibly altered */
    size_t count;
    enum pcow_persistence persistence;
    const char *directory;                /* the files of a state are made here, by their names */
    uint64_t seed;
    unsigned limit;                       /* combinations at a crash point */
    size_t skip;                          /* crash points before this entry are known to be good */
    /* Look at the files in directory. NULL: as it should be; or what is wrong. */
    const char *(*judge)(void *opaque, const void *expectation);
    void *opaque;
    /* states that were judged good under an expectation; may be shared */
    struct seen *seen;

    uint64_t points, built, judged;
    uint64_t sampled;                     /* points with more combinations than the limit */
    char failure[2048];                   /* what was wrong, and with which state */
};

/* All states; false with *failure at the first that is wrong. */
bool replay_run(struct replay *replay);

#endif
