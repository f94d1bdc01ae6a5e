/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The log of everything that is done to the files of an image: stores, flushes, fences, file
 * operations (persist/observer.h), the guest's own stores, and marks that say what must hold from
 * there on. It can also let the n-th call of a kind fail.
 */
#ifndef PCOW_TEST_RECORDER_H
#define PCOW_TEST_RECORDER_H

#include <pthread.h>

#include "support.h"
#include "image/image.h"

#define RECORDED_FILES 3u
#define RECORDED_OPENS 3u

enum entry_kind {
    ENTRY_STORE,               /* bytes at offset; torn: its 8-byte words arrive in any order */
    /* pmem: the lines of [offset, offset + length); counts at the next fence */
    ENTRY_FLUSH,
    ENTRY_FENCE,
    /* page-cache: the pages of the range, and what the file system was told about the file */
    ENTRY_MSYNC,
    ENTRY_SYNC,                /* fdatasync(): all of the file */
    ENTRY_PUNCH,
    ENTRY_SIZE,                /* length: the new end of file */
    ENTRY_MARK,
};

struct entry {
    enum entry_kind kind;
    unsigned file;
    uint64_t offset, length;
    uint8_t *bytes;
    bool torn;
    const void *expectation;
};

struct recorder {
    struct observer observer;
    pthread_mutex_t lock;
    pcow_map *map;                        /* to translate addresses of the guest's range */
    struct recorded_file {
        char path[512];
        const struct file *open[RECORDED_OPENS];  /* by the writer, and beside him */
        uint64_t size;                    /* at the beginning */
        /* what it held then, without its holes */
        struct page { uint64_t number; uint8_t *bytes; } *page;
        size_t pages;
    } file[RECORDED_FILES];
    unsigned files;
    struct entry *entry;
    size_t count, capacity;

    /*
     * Called when what makes something certain in this thread is in the log: what others may do at
     * this moment.
     */
    void (*meanwhile)(void *opaque);
    void *opaque;
    pthread_t thread;

    /*
     * The pool is full: what would take a block of this file, -1: of none, is refused, and not in
     * the log.
     */
    int full;

    /*
     * Fault injection, with the lock held: the call number fail_at (from 1) of a kind fails with
     * fail_code; calls counts them.
     */
    bool injecting;
    enum observed fail_what;
    unsigned fail_at, calls;
    int fail_code;
};

void recorder_init(struct recorder *recorder, enum pcow_persistence persistence);
void recorder_free(struct recorder *recorder);
/*
 * From now on the call number n (from 1) of a kind fails, and calls of it are counted; no more of
 * that, and how many there were.
 */
void recorder_fail(struct recorder *recorder, enum observed what, int code, unsigned n);
unsigned recorder_fail_no_more(struct recorder *recorder);
/* From now on the pool of an open file is full; -1: of none. */
void recorder_fill(struct recorder *recorder, int fd);
/* What must hold from here on. */
void recorder_mark(struct recorder *recorder, const void *expectation);
/* The guest stores to its mapped memory / flushes what it stored. */
void recorder_guest_store(struct recorder *recorder, uint64_t offset, const void *from,
                          size_t length);
void recorder_guest_flush(struct recorder *recorder, uint64_t offset, size_t length);
/* What a store or flush touches, in words ("active_layer", "bitmap", ...). */
const char *recorder_describe(const struct entry *entry);

#endif
