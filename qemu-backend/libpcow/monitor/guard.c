/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "guard": as signal, but where a guest comes back to a slab that nothing older has, the whole slab is mapped once, and what is still
 * absent lies behind guard regions (madvise(2), MADV_GUARD_INSTALL; in mappings of files since Linux 6.15). A store to it traps as before, but to
 * lift the guard takes less than half the time of a mapping, cuts none in three, and needs only the reader's side of the kernel's lock, so that
 * several threads do not wait for each other.
 *
 * A guard cannot let loads pass. The first load of absent memory in such a slab traps, too: then the slab is mapped as it is under signal, and stays
 * so. System calls cannot trap, so who has one load from the range must ask before (pcow_map_resolve()); where that was done the thread that
 * works ahead puts no guards up any more. This is why the engine has to be asked for.
 *
 * Class volatile: elsewhere what lies behind the guards may have no blocks yet, and mappings of fsdax have no guards.
 */
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

#include "monitor/monitor.h"

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

#define AREA_SIZE (2 * PCOW_SLAB_SIZE) /* a slab, aligned as in the range: so the kernel can move its page table as one entry */

static uint8_t *area_of(const struct pcow_map *map)
{
    return (uint8_t *)(((uintptr_t)map->guard_area + PCOW_SLAB_SIZE - 1) & ~(uintptr_t)(PCOW_SLAB_SIZE - 1));
}

void guard_end(struct pcow_map *map)
{
    if (map->guard_area)
        munmap(map->guard_area, AREA_SIZE);
    map->guard_area = NULL;
}

int guard_prepare(struct pcow_map *map, struct pcow_error *error)
{
    void *area = mmap(NULL, AREA_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    (void)error;
    map->guard_area = area == MAP_FAILED ? NULL : area;
    /* An older kernel has no such thing, or not for files, or not in locked memory. */
    if (map->guard_area && map->image->file.writable && map->image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE
        && file_map(&map->image->file, area_of(map), PCOW_PAGE_SIZE, 0, FILE_MAP_LOADS, MAP_FIXED) == 0
        && madvise(area_of(map), PCOW_PAGE_SIZE, MADV_GUARD_INSTALL) == 0)
        return 0;
    guard_end(map);
    map->engine = &signal_engine;
    return 0;
}

/* The file slab that is the only one with anything of this guest slab, and the active layer's. 0: there is none. */
static uint64_t only_slab(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct pcow_image *image = map->image;
    slab_ref head = image->chain->head[guest_slab];
    uint64_t p = slab_ref_slab(head);

    return head && slab_ref_level(head) == image->chain->levels && image->slabs[p].layer == image_active(image) && image->slabs[p].next == 0
           && slab_is_backed(image, p) ? p : 0;
}

static uint64_t wanted_slab(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    bool wanted = map->engine->id == PCOW_ENGINE_GUARD && !__atomic_load_n(&map->guards_refused, __ATOMIC_RELAXED)
        && !slab->guarded && !__atomic_load_n(&slab->loaded, __ATOMIC_RELAXED) && !slab->cold && !slab->behind && !slab->watched
        && !map->lost && !page_set_full(&slab->writable);

    return wanted ? only_slab(map, guest_slab) : 0;
}

bool guard_wants(const struct pcow_map *map, uint64_t guest_slab)
{
    return wanted_slab(map, guest_slab) != 0;
}

bool guard_begin(struct pcow_map *map, uint64_t guest_slab, uint64_t *p)
{
    chain_claim(map->image->chain, guest_slab);
    *p = map->slabs[guest_slab].faults >= GUARD_FAULTS ? wanted_slab(map, guest_slab) : 0;
    chain_release(map->image->chain, guest_slab);
    if (*p == 0)
        return true;
    /*
     * In place of what the last one has left in the area, a mapping with nothing filled in. It must not become one with its neighbours in the range:
     * Linux 6.16 to 6.18.7 forget then that its page table cannot be made anew (CVE-2026-23077), and the guards may go with it. So
     * it differs from them until the last guard is lifted.
     */
    if (file_map(&map->image->file, area_of(map), PCOW_SLAB_SIZE, *p << SLAB_BITS, FILE_MAP_STORES, MAP_FIXED) == 0
        && madvise(area_of(map), PCOW_SLAB_SIZE, MADV_DONTDUMP) == 0 && madvise(area_of(map), PCOW_SLAB_SIZE, MADV_GUARD_INSTALL) == 0)
        return true;
    __atomic_store_n(&map->guards_refused, true, __ATOMIC_RELAXED);
    return false;
}

/* In the area. What is mapped for stores in the range stays accessible all the time: one mapping takes the other one's place at once. */
static int lift_writable(struct pcow_map *map, uint64_t guest_slab)
{
    const struct page_set *writable = &map->slabs[guest_slab].writable;

    for (unsigned page = 0; page < PAGES_PER_SLAB;) {
        unsigned end = page_set_run_end(writable, page, PAGES_PER_SLAB);

        if (page_set_has(writable, page) && madvise(area_of(map) + page * PCOW_PAGE_SIZE, (end - page) * PCOW_PAGE_SIZE, MADV_GUARD_REMOVE))
            return -errno;
        page = end;
    }
    return 0;
}

/* The claim is held. */
static void put_up(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    size_t length = layout_pages(map, guest_slab) * PCOW_PAGE_SIZE;

    /* Either who has a system call load from the slab sees this, or he is seen here, see guard_note_load(). */
    __atomic_store_n(&slab->guarded, GUARDED, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&slab->loaded, __ATOMIC_SEQ_CST) || lift_writable(map, guest_slab)) {
        __atomic_store_n(&slab->guarded, GUARDED_NOT, __ATOMIC_SEQ_CST);
        return;
    }
    if (mremap(area_of(map), length, length, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, map->address + (guest_slab << SLAB_BITS))
        == MAP_FAILED) {
        layout_map_slab(map, guest_slab);      /* perhaps after the old mapping was taken away */
        return;
    }
    vmas_add(map, 1 - (int)slab->pieces);
    slab->pieces = 1;
}

void guard_finish(struct pcow_map *map, uint64_t guest_slab, uint64_t p)
{
    chain_claim(map->image->chain, guest_slab);
    if (wanted_slab(map, guest_slab) == p)
        put_up(map, guest_slab);
    chain_release(map->image->chain, guest_slab);
}

void guard_lifted_all(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    /* One with its neighbours, if it can be. */
    if (slab->guarded == GUARDED)
        madvise(map->address + (guest_slab << SLAB_BITS), layout_pages(map, guest_slab) * PCOW_PAGE_SIZE, MADV_DODUMP);
    __atomic_store_n(&slab->guarded, GUARDED_NOT, __ATOMIC_SEQ_CST);
}

bool guard_lift(const struct pcow_map *map, uint64_t guest_slab, unsigned page, unsigned count)
{
    return map->slabs[guest_slab].guarded == GUARDED
        && madvise(map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE, count * PCOW_PAGE_SIZE, MADV_GUARD_REMOVE) == 0;
}

bool guard_note_load(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    if (map->engine->id != PCOW_ENGINE_GUARD)
        return true;
    if (!__atomic_load_n(&slab->loaded, __ATOMIC_RELAXED))
        __atomic_store_n(&slab->loaded, 1, __ATOMIC_SEQ_CST);
    return !__atomic_load_n(&slab->guarded, __ATOMIC_SEQ_CST);
}
