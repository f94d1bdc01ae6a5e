/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A look at everything that is done to an image file, before it is done: stores, flushes, fences,
 * file operations. The crash tests record with it what power loss could undo, and let calls fail.
 * It hangs on the file that was opened with it and is inherited by what is opened on the way
 * (bases). A file without one pays one branch for each of these.
 */
#ifndef PCOW_PERSIST_OBSERVER_H
#define PCOW_PERSIST_OBSERVER_H

#include <stddef.h>
#include <stdint.h>

#include "pcow.h"

struct persist;

enum observed {
    OBSERVED_OPEN,             /* a file was opened or made: path */
    OBSERVED_CLOSE,
    /* its window, or a piece of the guest's range, is about to be mapped: offset, length */
    OBSERVED_MAP,
    OBSERVED_STORE,            /* one aligned 8-byte store: address, from */
    /* a copy: address, from, length; its 8-byte words arrive in any order */
    OBSERVED_COPY,
    OBSERVED_FLUSH,            /* class pmem: address, length; counts at the next fence */
    OBSERVED_FENCE,            /* class pmem */
    OBSERVED_MSYNC,            /* class page-cache: address, length */
    OBSERVED_ALLOCATE,         /* offset, length */
    OBSERVED_PUNCH,            /* offset, length */
    OBSERVED_TRUNCATE,         /* length: the new end of file */
    OBSERVED_WRITE,            /* pwrite(): offset, from, length */
    OBSERVED_SYNC,             /* fdatasync() or fsync() */
};

struct observation {
    enum observed what;
    const struct persist *persist;     /* of the file; a fence has it too, but orders everything */
    const void *address;
    uint64_t offset, length;
    const void *from;                  /* what is stored */
    const char *path;
};

struct observer {
    /* the class that its files are taken to be in, whatever they lie on */
    enum pcow_persistence persistence;
    /*
     * 0, or a negative errno: the operation does not happen and fails with it. What cannot fail
     * (stores, flushes, fences, open, close) ignores it. Called wherever the library stores, so it
     * must be async-signal-safe if traps are taken.
     */
    int (*look)(struct observer *observer, const struct observation *observation);
};

#endif
