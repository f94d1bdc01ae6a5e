/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/lost.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "image/file.h"
#include "util/order.h"

static uint64_t get(const struct file *file, unsigned i)
{
    return __atomic_load_n(&file->lost_pages.page[i], __ATOMIC_ACQUIRE);
}

static bool has_any(const struct file *file)
{
    return __atomic_load_n(&file->lost_pages.any, __ATOMIC_ACQUIRE);
}

/* What the page at an offset shows in each window that there is. */
static int change_windows(struct file *file, uint64_t offset, bool lost)
{
    uint8_t *window[] = {
        __atomic_load_n(&file->window[offset / GROUP_SIZE], __ATOMIC_ACQUIRE),
        __atomic_load_n(&file->settled_window[offset / GROUP_SIZE], __ATOMIC_ACQUIRE)};
    const int flags[] = {file->persist.map_flags, MAP_SHARED};

    for (unsigned i = 0; i < 2; i++)
        if (window[i]
            && order_mmap(window[i] + offset % GROUP_SIZE, PCOW_PAGE_SIZE,
                          PROT_READ | (file->writable ? PROT_WRITE : 0),
                          MAP_FIXED | (lost ? MAP_SHARED : flags[i] | MAP_NORESERVE),
                          lost ? file->lost_pages.nothing : file->fd, lost ? 0 : (off_t)offset)
                   == MAP_FAILED)
            return -errno;
    return 0;
}

bool lost_is_in(const struct file *file, uint64_t offset, uint64_t length)
{
    for (unsigned i = 0; has_any(file) && i < MAX_LOST_PAGES; i++) {
        uint64_t page = get(file, i);

        if (page && page < offset + length && offset < page + PCOW_PAGE_SIZE)
            return true;
    }
    return false;
}

uint64_t lost_next(const struct file *file, uint64_t offset, uint64_t end)
{
    for (unsigned i = 0; has_any(file) && i < MAX_LOST_PAGES; i++) {
        uint64_t page = get(file, i);

        if (page && page >= offset && page < end)
            end = page;
    }
    return end;
}

int lost_add(struct file *file, uint64_t offset)
{
    if (lost_is_in(file, offset, PCOW_PAGE_SIZE))
        return 0;
    if (!has_any(file)) {
        int nothing = memfd_create("pcow-lost", MFD_CLOEXEC), none = 0;

        if (nothing < 0)
            return -errno;
        if (!__atomic_compare_exchange_n(&file->lost_pages.nothing, &none, nothing, false,
                                         __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            close(nothing);
    }
    for (unsigned i = 0; i < MAX_LOST_PAGES; i++) {
        uint64_t none = 0;

        if (__atomic_compare_exchange_n(&file->lost_pages.page[i], &none, offset, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            __atomic_store_n(&file->lost_pages.any, true, __ATOMIC_RELEASE);
            return change_windows(file, offset, true);
        }
    }
    return -ENOSPC;
}

void lost_forget(struct file *file, uint64_t offset, uint64_t length)
{
    for (unsigned i = 0; has_any(file) && i < MAX_LOST_PAGES; i++) {
        uint64_t page = get(file, i);

        /* If it cannot be mapped it stays what it is: nothing that could be taken for data. */
        if (page && page >= offset && page < offset + length
            && change_windows(file, page, false) == 0)
            __atomic_store_n(&file->lost_pages.page[i], 0, __ATOMIC_RELEASE);
    }
}

int lost_cover(const struct file *file, void *address, size_t length, uint64_t offset,
               int protection)
{
    for (unsigned i = 0; has_any(file) && i < MAX_LOST_PAGES; i++) {
        uint64_t page = get(file, i);

        if (page && page >= offset && page < offset + length
            && order_mmap((uint8_t *)address + (page - offset), PCOW_PAGE_SIZE, protection,
                          MAP_SHARED | MAP_FIXED, file->lost_pages.nothing, 0)
                   == MAP_FAILED)
            return -errno;
    }
    return 0;
}

void lost_close(struct file *file)
{
    if (file->lost_pages.nothing > 0)
        close(file->lost_pages.nothing);
}
