/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Should a trap fill the page table for all of its window? It spares each further page a fault (1.2
 * us), and costs as much as the one that the trap's own store would take. That is worth it if the
 * guest goes on in the window, and only the page table knows whether it does. So one window in
 * SAMPLE is left to the faults, and looked at when the next one is due.
 *
 * The same for slabs: a guest that has filled FILLED of them, most of those that it began, is given
 * the next ones whole, but for one in SAMPLE_SLABS, which has to be filled again. Who stops to do
 * so gets that many less one too much, once: about what was filled before.
 */
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "persist/copy.h"

#define SAMPLE 16u
#define SAMPLE_SLABS 8u
#define FILLED 8u
#define MAX_LOOKED_AT 16u              /* pages of a window */
#define DENSE 4u                       /* of them, with the one that trapped */
/* Linux, mm/memory.c: what a load's fault brings in of what is in the page cache. */
#define FAULT_AROUND (UINT64_C(64) << 10)
#define PAGEMAP_PRESENT (UINT64_C(1) << 63)   /* Linux, Documentation/admin-guide/mm/pagemap.rst */

void density_open(struct density *density)
{
    density->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    density->dense = true;
}

void density_close(struct density *density)
{
    if (density->pagemap >= 0)
        close(density->pagemap);
    density->pagemap = -1;
}

int density_present(const struct density *density, const uint8_t *address, unsigned pages)
{
    uint64_t entry[MAX_LOOKED_AT];
    int present = 0;

    if (pread(density->pagemap, entry, pages * sizeof *entry,
              (off_t)((uintptr_t)address / PCOW_PAGE_SIZE * sizeof *entry))
        != (ssize_t)(pages * sizeof *entry))
        return -1;
    for (unsigned i = 0; i < pages; i++)
        present += (entry[i] & PAGEMAP_PRESENT) != 0;
    return present;
}

/*
 * Linux 6.7, Documentation/admin-guide/mm/pagemap.rst; the headers that we build with may be older.
 */
struct page_region {
    uint64_t start, end, categories;
};

struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
        category_mask, category_anyof_mask, return_mask;
};

#define PAGEMAP_SCAN_REQUEST _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_CATEGORY_HUGE (UINT64_C(1) << 6)

bool density_is_huge(const struct density *density, const uint8_t *address)
{
    struct page_region region;
    struct pm_scan_arg scan = {
        .size = sizeof scan,
        .start = (uintptr_t)address,
        .end = (uintptr_t)address + PCOW_PAGE_SIZE,
        .vec = (uintptr_t)&region,
        .vec_len = 1,
        .category_mask = PAGE_CATEGORY_HUGE,
        .return_mask = PAGE_CATEGORY_HUGE,
    };

    return ioctl(density->pagemap, PAGEMAP_SCAN_REQUEST, &scan) == 1;
}

static void look(struct density *density, const uint8_t *address)
{
    int present = density_present(density, address, MAX_LOOKED_AT);

    if (present >= 0)
        __atomic_store_n(&density->dense, present >= (int)DENSE, __ATOMIC_RELAXED);
}

bool density_is_high(const struct density *density)
{
    return __atomic_load_n(&density->dense, __ATOMIC_RELAXED);
}

bool density_wants(struct density *density, const uint8_t *window, unsigned pages)
{
    const uint8_t *sample;

    if (density->pagemap < 0 || pages < MAX_LOOKED_AT)
        return density_is_high(density);
    if (__atomic_fetch_add(&density->windows, 1, __ATOMIC_RELAXED) % SAMPLE)
        return density_is_high(density);
    sample = __atomic_exchange_n(&density->sample, window, __ATOMIC_RELAXED);
    if (sample)
        look(density, sample);
    return false;
}

void density_forget(struct density *density, const uint8_t *from, size_t length)
{
    const uint8_t *sample = __atomic_load_n(&density->sample, __ATOMIC_RELAXED);

    if (sample >= from && sample < from + length)
        __atomic_compare_exchange_n(&density->sample, &sample, NULL, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
}

bool density_begin_slab(struct density *density)
{
    uint32_t trust = __atomic_load_n(&density->trust, __ATOMIC_RELAXED);

    if (trust >= FILLED && __atomic_fetch_add(&density->slabs, 1, __ATOMIC_RELAXED) % SAMPLE_SLABS)
        return true;
    /* Two threads may count as one here: it is a guess. */
    if (trust > 0)
        __atomic_store_n(&density->trust, trust - 1, __ATOMIC_RELAXED);
    return false;
}

void density_completed(struct density *density)
{
    uint32_t trust = __atomic_load_n(&density->trust, __ATOMIC_RELAXED);

    __atomic_store_n(&density->trust, trust + 2 < FILLED ? trust + 2 : FILLED, __ATOMIC_RELAXED);
}

void layout_populate(const struct pcow_map *map, uint64_t guest_slab, unsigned first,
                     unsigned count)
{
    const uint8_t *from = map->address + (guest_slab << SLAB_BITS) + first * PCOW_PAGE_SIZE;

    /*
     * In a slab that is unmapped, as it could not be mapped, this would trap, and wait for the
     * claim that it holds.
     */
    if (map->image->file.persist.persistence != PCOW_PERSISTENCE_VOLATILE
        || slab_is_unmapped(&map->slabs[guest_slab].status))
        return;
    /*
     * By loads and not with MADV_POPULATE_READ: faults of several threads do not wait for each
     * other. In assembly, because the other threads' stores that a sanitizer would see it race with
     * do not matter. A page that was own before may have become unreadable; whoever accesses it is
     * told.
     */
    for (size_t at = 0; at < count * PCOW_PAGE_SIZE; at += FAULT_AROUND)
        copy_touch(from + at);
}
