/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Class page-cache: what a store costs that is made to a page with a block. The page cache keeps a
 * file in folios, of 2 MiB at the most, which span holes where somebody has read the file in
 * sequence (a backup, cp). The first store to one makes the file system reserve blocks for all of
 * it (ext4 from Linux 6.16 on, XFS), and if the pool has none that is SIGBUS, though the page has
 * its own. No file can be kept free of such folios, as whoever reads it makes them. So what is
 * about to be stored to is asked for with MADV_POPULATE_WRITE, which tells the same as an error;
 * and then its folios are written and dropped, and come back page by page.
 *
 * Source: Linux, fs/ext4/inode.c, ext4_page_mkwrite(); fs/iomap/buffered-io.c,
 * iomap_page_mkwrite(); mm/filemap.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "image/file.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22          /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24        /* Linux 5.18 */
#endif

#define TRIES 3u                       /* others may bring back what is dropped */

/*
 * Kernels that do not know the question know no such folios on ext4, and on XFS nothing can be
 * done.
 */
static bool is_refused(void *address, size_t length, int advice)
{
    int ret;

    do {
        ret = madvise(address, length, advice);
    } while (ret && (errno == EINTR || errno == EAGAIN));
    return ret && errno == EFAULT;
}

/* Out of a page table: only then the page cache lets go of a folio. */
static void unmap(uint8_t *address, size_t length)
{
    if (madvise(address, length, MADV_DONTNEED) && errno == EINVAL)
        madvise(address, length, MADV_DONTNEED_LOCKED);
}

/* In the guest's range: there may be memory of its own as well, which nothing would bring back. */
static void unmap_pages(uint8_t *slab, const struct page_set *mapped)
{
    for (unsigned page = 0; page < PAGES_PER_SLAB;) {
        unsigned end = page_set_run_end(mapped, page, PAGES_PER_SLAB);

        if (page_set_has(mapped, page))
            unmap(slab + page * PCOW_PAGE_SIZE, (end - page) * PCOW_PAGE_SIZE);
        page = end;
    }
}

/*
 * The folios of a slab. What could not be written stays where it is, as it is in no other place,
 * and counts as a flush that failed, as the kernel tells that once. From then on nothing is
 * dropped: such a page is clean to the kernel, and looks like any other.
 */
static int drop(struct file *file, uint8_t *slab, const struct page_set *mapped,
                uint64_t slab_offset)
{
    uint8_t *window = __atomic_load_n(&file->window[slab_offset / GROUP_SIZE], __ATOMIC_ACQUIRE);
    uint8_t *settled =
        __atomic_load_n(&file->settled_window[slab_offset / GROUP_SIZE], __ATOMIC_ACQUIRE);
    struct request request;
    int ret;

    if (failures_count(&file->persist.failures))
        return -EIO;
    request = failures_begin(&file->persist.failures);
    ret = sync_file_range(file->fd, (off_t)slab_offset, (off_t)PCOW_SLAB_SIZE,
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE
                              | SYNC_FILE_RANGE_WAIT_AFTER);
    failures_end(&file->persist.failures, &request, ret != 0);
    /* Another thread may have been told, see failures.h. */
    if (failures_await(&file->persist.failures))
        return -EIO;
    if (mapped)
        unmap_pages(slab, mapped);
    if (window)
        unmap(window + slab_offset % GROUP_SIZE, PCOW_SLAB_SIZE);
    if (settled)
        unmap(settled + slab_offset % GROUP_SIZE, PCOW_SLAB_SIZE);
    posix_fadvise(file->fd, (off_t)slab_offset, (off_t)PCOW_SLAB_SIZE, POSIX_FADV_DONTNEED);
    return 0;
}

int file_prepare_store(struct file *file, void *address, const struct page_set *mapped,
                       uint64_t offset, size_t length)
{
    uint8_t *first = (uint8_t *)((uintptr_t)address & ~(uintptr_t)(PCOW_PAGE_SIZE - 1));
    uint8_t *slab = (uint8_t *)((uintptr_t)address & ~(uintptr_t)(PCOW_SLAB_SIZE - 1));
    size_t pages = ((uintptr_t)address + length - (uintptr_t)first + PCOW_PAGE_SIZE - 1)
                   & ~(PCOW_PAGE_SIZE - 1);

    if (file->persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE || file->persist.observer)
        return 0;
    for (unsigned tries = 0; is_refused(first, pages, MADV_POPULATE_WRITE); tries++) {
        int ret;

        if (is_refused(first, pages, MADV_POPULATE_READ))
            return -EIO;               /* it cannot be read either */
        if (tries == TRIES)
            return -ENOSPC;
        ret = drop(file, slab, mapped, offset & ~(PCOW_SLAB_SIZE - 1));
        if (ret)
            return ret;
    }
    return 0;
}
