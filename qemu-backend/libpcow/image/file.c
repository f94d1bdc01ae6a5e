/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "util/error.h"
#include "util/signals.h"
#include "util/map_at.h"

/*
 * Sparse and free: growing in steps keeps the fault path from extending the file at every new slab.
 */
#define GROW_STEP (UINT64_C(64) << SLAB_BITS)
#define WRITE_PIECE (UINT64_C(128) << 10)

int file_read(const struct file *file, uint64_t offset, void *buffer, size_t length)
{
    char *at = buffer;

    if (lost_is_in(file, offset, length))
        return -EIO;
    while (length > 0) {
        ssize_t got = pread(file->fd, at, length, (off_t)offset);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -ENODATA;
        at += got;
        offset += (uint64_t)got;
        length -= (size_t)got;
    }
    return 0;
}

/* Also where the file was mapped before, no lost page of it shows for a moment. */
static int map_around_lost(const struct file *file, uint8_t *address, uint64_t offset, uint64_t end,
                           int protection, int flags)
{
    while (offset < end) {
        uint64_t lost = lost_next(file, offset, end);

        int ret = lost > offset
                      ? map_at(address, lost - offset, protection, flags, file->fd, (off_t)offset)
                      : 0;

        if (!ret && lost < end)
            ret = lost_cover(file, address + (lost - offset), PCOW_PAGE_SIZE, lost, PROT_NONE);
        if (ret)
            return ret;
        address += lost + PCOW_PAGE_SIZE - offset;
        offset = lost + PCOW_PAGE_SIZE;
    }
    return 0;
}

int file_map(const struct file *file, void *address, size_t length, uint64_t offset,
             enum file_map_for what, int fixed)
{
    int ret = persist_observe(&file->persist, (struct observation){.what = OBSERVED_MAP,
                                                                   .address = address,
                                                                   .offset = offset,
                                                                   .length = length});
    bool plain = what == FILE_MAP_LOADS || (what == FILE_MAP_SETTLED && file->persist.fixed_blocks);

    if (ret)
        return ret;
    return map_around_lost(file, address, offset, offset + length,
                           what == FILE_MAP_LATER   ? PROT_NONE
                           : what == FILE_MAP_LOADS ? PROT_READ
                                                    : PROT_READ | PROT_WRITE,
                           fixed | (plain ? MAP_SHARED : file->persist.map_flags));
}

static void note_change(struct file *file)
{
    __atomic_fetch_add(&file->changes, 1, __ATOMIC_SEQ_CST);
}

int file_set_size(struct file *file, uint64_t size)
{
    int ret = persist_observe(&file->persist,
                              (struct observation){.what = OBSERVED_TRUNCATE, .length = size});

    if (ret)
        return ret;
    if (ftruncate(file->fd, (off_t)size))
        return -errno;
    note_change(file);
    __atomic_store_n(&file->size, size, __ATOMIC_RELEASE);
    return 0;
}

int file_grow(struct file *file, uint64_t size)
{
    /* A trap grows it, too: one in a handler of this thread would wait for itself. */
    struct interrupts interrupts = interrupts_disable();
    int ret = 0;

    for (unsigned tries = 0; __atomic_exchange_n(&file->growing, true, __ATOMIC_ACQUIRE); tries++) {
        static const struct timespec moment = {0, 20000};

        if (tries < 64)
            sched_yield();
        else
            nanosleep(&moment, NULL);  /* who holds it may have a lower priority than who waits */
    }
    if (size > __atomic_load_n(&file->size, __ATOMIC_ACQUIRE)) {
        uint64_t step = file->grows_exactly ? PCOW_SLAB_SIZE : GROW_STEP;

        size = (size + step - 1) / step * step;
        /*
         * Under the claim only: two ftruncate() calls in the wrong order would cut off slabs in
         * use.
         */
        ret = file_set_size(file, size);
    }
    __atomic_store_n(&file->growing, false, __ATOMIC_RELEASE);
    interrupts_restore(interrupts);
    return ret;
}

int file_allocate(const struct file *file, uint64_t offset, uint64_t length)
{
    int ret = persist_observe(
        &file->persist,
        (struct observation){.what = OBSERVED_ALLOCATE, .offset = offset, .length = length});

    if (ret)
        return ret;
    do {
        ret = fallocate(file->fd, 0, (off_t)offset, (off_t)length);
    } while (ret && errno == EINTR);
    if (ret == 0)
        return 0;
    /* A file system that is out of quota is full as well. */
    return errno == EDQUOT || errno == ENOMEM ? -ENOSPC : -errno;
}

int file_allocate_holes(const struct file *file, uint64_t offset, uint64_t length)
{
    /*
     * SEEK_HOLE looks on until it finds one. Over the pages of a file on tmpfs that takes 10 ns for
     * each, 40 ms for 16 GiB; fallocate() there looks at the range alone, and asks for no space
     * that is there. Other file systems look at extents, but may want free space for nothing.
     */
    if (file->persist.persistence != PCOW_PERSISTENCE_VOLATILE
        && !file_has_hole(file, offset, length))
        return 0;
    return file_allocate(file, offset, length);
}

int file_allocate_metadata(const struct file *file, uint64_t offset, uint64_t length)
{
    uint64_t first = offset & ~(PCOW_PAGE_SIZE - 1),
             end = (offset + length + PCOW_PAGE_SIZE - 1) & ~(PCOW_PAGE_SIZE - 1);
    int ret = file_unshare(file, first, end - first);

    if (file->persist.persistence != PCOW_PERSISTENCE_VOLATILE)
        return ret ? ret : file_allocate_holes(file, first, end - first);
    /*
     * On tmpfs a page is there or not, and to ask that costs less than to have it allocated once
     * more.
     */
    for (; first < end && !ret; first += PCOW_PAGE_SIZE)
        if (lseek(file->fd, (off_t)first, SEEK_DATA) != (off_t)first)
            ret = file_allocate(file, first, PCOW_PAGE_SIZE);
    return ret;
}

int file_punch(struct file *file, uint64_t offset, uint64_t length)
{
    int ret = persist_observe(
        &file->persist,
        (struct observation){.what = OBSERVED_PUNCH, .offset = offset, .length = length});

    if (ret)
        return ret;
    do {
        ret = fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                        (off_t)length);
    } while (ret && errno == EINTR);
    note_change(file);
    if (ret)
        return -errno;
    lost_forget(file, offset, length);
    return 0;
}

int file_allocate_written(const struct file *file, uint64_t offset, uint64_t length)
{
    static const char zeros[PCOW_PAGE_SIZE] __attribute__((aligned(64)));
    struct iovec pages[WRITE_PIECE / PCOW_PAGE_SIZE];
    int ret = file_allocate(file, offset, length);

    if (ret || file->persist.persistence != PCOW_PERSISTENCE_PMEM)
        return ret;
    for (unsigned i = 0; i < WRITE_PIECE / PCOW_PAGE_SIZE; i++)
        pages[i] = (struct iovec){(void *)(uintptr_t)zeros, sizeof zeros};
    /*
     * All of it was allocated as one extent; it is written in pieces, as nobody can read the file
     * meanwhile.
     */
    while (length > 0) {
        unsigned count = (unsigned)((length < WRITE_PIECE ? length : WRITE_PIECE) / PCOW_PAGE_SIZE);
        ssize_t put = pwritev(file->fd, pages, (int)count, (off_t)offset);

        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return put == 0 || errno == EDQUOT ? -ENOSPC : -errno;
        /* zeros over zeros: a part of a page is written again */
        put -= put % (ssize_t)PCOW_PAGE_SIZE;
        offset += (uint64_t)put;
        length -= (uint64_t)put;
    }
    return 0;
}

bool file_is_hole(const struct file *file, uint64_t offset, uint64_t length)
{
    off_t data = lseek(file->fd, (off_t)offset, SEEK_DATA);

    return data < 0 ? errno == ENXIO : (uint64_t)data >= offset + length;
}

uint64_t file_next_data(const struct file *file, uint64_t offset, uint64_t end)
{
    off_t data = lseek(file->fd, (off_t)offset, SEEK_DATA);

    if (data < 0)
        return errno == ENXIO ? end : offset;
    return (uint64_t)data < end ? (uint64_t)data / PCOW_PAGE_SIZE * PCOW_PAGE_SIZE : end;
}

bool file_has_hole(const struct file *file, uint64_t offset, uint64_t length)
{
    off_t hole = lseek(file->fd, (off_t)offset, SEEK_HOLE);

    return hole < 0 || (uint64_t)hole < offset + length;
}

int file_write(const struct file *file, uint64_t offset, const void *from, size_t length)
{
    const char *at = from;
    int ret = persist_observe(&file->persist, (struct observation){.what = OBSERVED_WRITE,
                                                                   .offset = offset,
                                                                   .from = from,
                                                                   .length = length});

    if (ret)
        return ret;
    while (length > 0) {
        ssize_t put = pwrite(file->fd, at, length, (off_t)offset);

        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return errno == EDQUOT ? -ENOSPC : errno == EFAULT ? -EIO : -errno;
        at += put;
        offset += (uint64_t)put;
        length -= (size_t)put;
    }
    return 0;
}

int file_write_data(struct file *file, uint64_t offset, const void *from, size_t length)
{
    /*
     * One system call allocates, copies, and reports a full pool or an unreadable source as an
     * error, not as a signal. In class pmem, too: stores through the window would cost a commit of
     * the journal for every page whose block was never written, this costs one for everything up to
     * the next file_settle(). The kernel writes past the caches of the CPU there.
     */
    int ret = file_write(file, offset, from, length);

    if (ret == 0 && file->persist.persistence == PCOW_PERSISTENCE_PMEM)
        note_change(file);
    return ret;
}

int file_overwrite(struct file *file, uint64_t offset, const void *from, size_t length)
{
    void *to;
    int ret;

    if (lost_is_in(file, offset, length))
        return -EIO;
    if (file->persist.persistence != PCOW_PERSISTENCE_PMEM)
        return file_write(file, offset, from, length);
    to = file_address(file, offset);
    if (!to)
        return -errno;
    /*
     * A page that was made to read as zeros has no block; and those that are shared with a copy of
     * the file are none of its own.
     */
    ret = file_unshare(file, offset, length);
    if (!ret)
        ret = file_allocate(file, offset, length);
    if (ret)
        return ret;
    ret = persist_copy(&file->persist, to, from, length);
    persist_fence(&file->persist);
    return ret;
}

int file_sync(struct file *file)
{
    uint64_t since = failures_count(&file->persist.failures);
    int ret;

    if (file->persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
        return file_settle(file);
    ret = file_commit(file);
    return ret ? ret : file_check_since(file, since);
}

int file_check_since(struct file *file, uint64_t since)
{
    return failures_await(&file->persist.failures) == since ? 0 : -EIO;
}

int file_commit(struct file *file)
{
    uint64_t changes = __atomic_load_n(&file->changes, __ATOMIC_SEQ_CST), committed;
    struct request request;
    int ret;

    if (file->persist.persistence == PCOW_PERSISTENCE_VOLATILE)
        return 0;
    ret = persist_observe(&file->persist, (struct observation){.what = OBSERVED_SYNC});
    if (ret) {
        failures_add(&file->persist.failures);
        return ret;
    }
    request = failures_begin(&file->persist.failures);
    ret = fdatasync(file->fd) ? -errno : 0;
    failures_end(&file->persist.failures, &request, ret != 0);
    if (ret)
        return ret;
    /* What was counted before the call is on the medium, and not before the call is over. */
    committed = __atomic_load_n(&file->committed, __ATOMIC_SEQ_CST);
    while (committed < changes
           && !__atomic_compare_exchange_n(&file->committed, &committed, changes, true,
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
    return 0;
}

uint64_t file_begin_flush(const struct file *file)
{
    return __atomic_load_n(&file->told, __ATOMIC_SEQ_CST);
}

int file_end_flush(struct file *file, uint64_t told)
{
    uint64_t count = failures_await(&file->persist.failures),
             last = __atomic_load_n(&file->told, __ATOMIC_SEQ_CST);

    if (count == told)
        return 0;
    while (last < count
           && !__atomic_compare_exchange_n(&file->told, &last, count, true, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST))
        ;
    return -EIO;
}

int file_settle(struct file *file)
{
    return __atomic_load_n(&file->committed, __ATOMIC_SEQ_CST)
                   < __atomic_load_n(&file->changes, __ATOMIC_SEQ_CST)
               ? file_commit(file)
               : 0;
}

int file_put_on_medium(struct file *file, const void *where, size_t length, uint64_t since)
{
    int ret = persist_range(&file->persist, where, length);

    if (!ret && file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        ret = file_check_since(file, since);
    /* It was stored, and whoever asked for that takes it for not done. */
    if (ret)
        file_become_unsure(file);
    return ret;
}
