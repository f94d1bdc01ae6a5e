/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Where a file is mapped for the library's own use: metadata, copies, and the stores that prepare
 * slabs.
 */
#include "image/file.h"

#include <errno.h>
#include <sys/mman.h>

#include "util/map_at.h"

/*
 * Aligned as guest slabs are, so that one entry can map a slab, and a page table fits here and
 * there.
 */
static uint8_t *map_window(const struct file *file, int flags, uint64_t start)
{
    size_t reserved = GROUP_SIZE + PCOW_SLAB_SIZE;
    uint8_t *reservation =
                mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
            *window;

    if (reservation == MAP_FAILED)
        return MAP_FAILED;
    window = (uint8_t *)(((uintptr_t)reservation + PCOW_SLAB_SIZE - 1)
                         & ~(uintptr_t)(PCOW_SLAB_SIZE - 1));
    /*
     * It may reach behind the end of file: only what lies before it is ever touched. In two steps,
     * as a process that has its memory locked (mlockall()) would have all of it filled by the
     * first, up to the end of file, and each hole on tmpfs would take its block.
     */
    if (mmap(window, GROUP_SIZE, PROT_NONE, flags | MAP_NORESERVE | MAP_FIXED, file->fd,
             (off_t)start) == MAP_FAILED
        || mprotect(window, GROUP_SIZE, PROT_READ | (file->writable ? PROT_WRITE : 0))) {
        int saved_errno = errno;

        munmap(reservation, reserved);
        errno = saved_errno;
        return MAP_FAILED;
    }
    if (lost_cover(file, window, GROUP_SIZE, start, PROT_READ | PROT_WRITE)) {
        munmap(reservation, reserved);
        return MAP_FAILED;
    }
    if (window > reservation)
        munmap(reservation, (size_t)(window - reservation));
    if (window < reservation + PCOW_SLAB_SIZE)
        munmap(window + GROUP_SIZE, (size_t)(reservation + PCOW_SLAB_SIZE - window));
    return window;
}

static void *address_in(struct file *file, uint8_t **windows, int flags, uint64_t offset)
{
    uint8_t **slot = &windows[offset / GROUP_SIZE];
    uint8_t *window = __atomic_load_n(slot, __ATOMIC_ACQUIRE);

    if (!window) {
        uint64_t start = offset / GROUP_SIZE * GROUP_SIZE;
        uint8_t *expected = NULL;
        int ret = persist_observe(
            &file->persist,
            (struct observation){.what = OBSERVED_MAP, .offset = start, .length = GROUP_SIZE});

        if (ret) {
            errno = -ret;
            return NULL;
        }

        window = map_window(file, flags, start);
        if (window == MAP_FAILED)
            return NULL;
        if (!__atomic_compare_exchange_n(slot, &expected, window, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE)) {
            munmap(window, GROUP_SIZE);
            window = expected;
        } else if (lost_cover(file, window, GROUP_SIZE, start, PROT_READ | PROT_WRITE)) {
            /* one that came on the list before the window was to be seen */
            return NULL;
        }
    }
    return window + offset % GROUP_SIZE;
}

void *file_address(struct file *file, uint64_t offset)
{
    return address_in(file, file->window, file->persist.map_flags, offset);
}

void *file_address_settled(struct file *file, uint64_t offset)
{
    return file->persist.fixed_blocks ? address_in(file, file->settled_window, MAP_SHARED, offset)
                                      : file_address(file, offset);
}

#define FILLED_SIZE (MAX_FILE_SLABS / 8)

void file_note_filled(struct file *file, uint64_t offset)
{
    uint64_t slab = offset >> SLAB_BITS, *bits = __atomic_load_n(&file->filled, __ATOMIC_ACQUIRE),
             *expected = NULL;

    if (!bits) {
        bits = mmap(NULL, FILLED_SIZE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (bits == MAP_FAILED)
            return;
        if (!__atomic_compare_exchange_n(&file->filled, &expected, bits, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE)) {
            munmap(bits, FILLED_SIZE);
            bits = expected;
        }
    }
    __atomic_fetch_or(&bits[slab / 64], UINT64_C(1) << slab % 64, __ATOMIC_RELAXED);
}

bool file_is_filled(const struct file *file, uint64_t offset)
{
    uint64_t slab = offset >> SLAB_BITS, *bits = __atomic_load_n(&file->filled, __ATOMIC_ACQUIRE);

    return file->persist.persistence == PCOW_PERSISTENCE_PMEM
        || (bits && __atomic_load_n(&bits[slab / 64], __ATOMIC_RELAXED) >> slab % 64 & 1);
}

static void forget_filled(const struct file *file, uint64_t offset, uint64_t length)
{
    uint64_t *bits = __atomic_load_n(&file->filled, __ATOMIC_ACQUIRE);

    for (uint64_t slab = offset >> SLAB_BITS; bits && slab < (offset + length) >> SLAB_BITS; slab++)
        __atomic_fetch_and(&bits[slab / 64], ~(UINT64_C(1) << slab % 64), __ATOMIC_RELAXED);
}

void file_free_filled(struct file *file)
{
    if (file->filled)
        munmap(file->filled, FILLED_SIZE);
}

int file_move_window(struct file *file, void *address, uint64_t offset)
{
    int ret = persist_observe(&file->persist, (struct observation){.what = OBSERVED_MAP,
                                                                   .address = address,
                                                                   .offset = offset,
                                                                   .length = PCOW_SLAB_SIZE});
    void *window = ret ? NULL : file_address_settled(file, offset);

    if (!window)
        return ret ? ret : -errno;
    forget_filled(file, offset, PCOW_SLAB_SIZE);
    window = mremap(window, PCOW_SLAB_SIZE, PCOW_SLAB_SIZE,
                    MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, address);
    return window == MAP_FAILED ? -errno : 0;
}

static bool is_inside(const uint8_t *window, const uint8_t *address)
{
    return window && address >= window && address < window + GROUP_SIZE;
}

bool file_find_window_at(const struct file *file, const uint8_t *address, uint64_t *offset)
{
    for (unsigned g = 0; g < MAX_GROUPS; g++) {
        const uint8_t *window = __atomic_load_n(&file->window[g], __ATOMIC_ACQUIRE);

        if (!is_inside(window, address))
            window = __atomic_load_n(&file->settled_window[g], __ATOMIC_ACQUIRE);
        if (is_inside(window, address)) {
            *offset = g * GROUP_SIZE + (uint64_t)(address - window);
            return true;
        }
    }
    return false;
}

static int empty(const struct file *file, uint8_t *const *windows, int flags, uint64_t offset,
                 uint64_t length)
{
    uint8_t *window = __atomic_load_n(&windows[offset / GROUP_SIZE], __ATOMIC_ACQUIRE);
    int ret = 0;

    if (window)
        ret = map_at(window + offset % GROUP_SIZE, length,
                     PROT_READ | (file->writable ? PROT_WRITE : 0),
                     flags | MAP_NORESERVE | MAP_FIXED, file->fd, (off_t)offset);
    /* One that came on the list before this window was seen to be mapped anew. */
    if (window && !ret)
        ret =
            lost_cover(file, window + offset % GROUP_SIZE, length, offset, PROT_READ | PROT_WRITE);
    return ret;
}

int file_empty_window(const struct file *file, uint64_t offset, uint64_t length)
{
    int ret = persist_observe(
        &file->persist,
        (struct observation){.what = OBSERVED_MAP, .offset = offset, .length = length});

    if (!ret)
        forget_filled(file, offset, length);
    if (!ret)
        ret = empty(file, file->window, file->persist.map_flags, offset, length);
    return ret ? ret : empty(file, file->settled_window, MAP_SHARED, offset, length);
}
