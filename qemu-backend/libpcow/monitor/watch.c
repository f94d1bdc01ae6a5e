/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Finding a store of which nobody knows the address: KVM reports one to a read-only mapping as a
 * bare EFAULT.
 *
 * The watch replaces everything that may not be stored to by anonymous memory that is registered
 * with userfaultfd. When the vCPU runs again, its store is reported with the address, and so is
 * every load in between by anybody. A page that is loaded from is filled with a copy of what it
 * reads as, protected by userfaultfd as well: a store to it is reported in turn, so that an
 * instruction that loads and stores in one page makes progress. The copies cannot become stale:
 * only what may be stored to changes.
 *
 * The first store ends the watch. Slabs that hold copies get their mappings back at once, the
 * others when they are next touched: a trap each, instead of a pause for thousands of system calls.
 */
#include <errno.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "monitor/monitor.h"
#include "util/error.h"
#include "util/order.h"

/* Slabs that are claimed at once: one mapping for all of them if nothing in them is writable. */
#define BATCH 256u

static unsigned pages_in(const struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t left = (map->size - (guest_slab << SLAB_BITS)) / PCOW_PAGE_SIZE;

    return left < PAGES_PER_SLAB ? (unsigned)left : PAGES_PER_SLAB;
}

/* ---- beginning ------------------------------------------------------------------------------- */

/* Put [from, to) of the range under watch. */
static int watch_run(struct pcow_map *map, uint64_t from, uint64_t to)
{
    return to > from ? uffd_map(map, map->address + from, to - from) : 0;
}

/* Slabs [first, end), which are claimed. */
static int watch_slabs(struct pcow_map *map, uint64_t first, uint64_t end)
{
    uint64_t from = first << SLAB_BITS;
    int ret = 0;

    for (uint64_t v = first; v < end && ret == 0; v++) {
        struct slab_map *slab = &map->slabs[v];

        /* Who needs a watch does not ask before. */
        __atomic_store_n(&slab->asked, 1, __ATOMIC_SEQ_CST);
        ret = slab_is_kept(&slab->status) ? layout_map_slab(map, v) : 0;
        if (!ret)
            layout_enter(map, v, slab_is_unmapped(&slab->status) ? SLAB_WATCHED_UNMAPPED
                                                                 : SLAB_WATCHED);
        for (unsigned page = 0; page < pages_in(map, v) && ret == 0;) {
            unsigned next = page_set_run_end(&slab->writable, page, pages_in(map, v));

            if (page_set_has(&slab->writable, page)) {
                ret = watch_run(map, from, (v << SLAB_BITS) + page * PCOW_PAGE_SIZE);
                from = (v << SLAB_BITS) + next * PCOW_PAGE_SIZE;
            }
            page = next;
        }
    }
    if (ret)
        return ret;
    return watch_run(map, from, end << SLAB_BITS < map->size ? end << SLAB_BITS : map->size);
}

/* ---- ending ---------------------------------------------------------------------------------- */

/* The mappings that the slab has without a watch. The claim is held. */
static void restore(struct pcow_map *map, uint64_t guest_slab)
{
    /* The second alternative is for a process that has run out of mappings. */
    if (slab_is_unmapped(&map->slabs[guest_slab].status) || layout_map_slab(map, guest_slab))
        layout_unmap_slab(map, guest_slab);
}

#define WITH_COPIES (SLAB_BIT(SLAB_WATCHED_READ) | SLAB_BIT(SLAB_WATCHED_UNMAPPED_READ))

static void end_watch(struct pcow_map *map)
{
    if (!__atomic_exchange_n(&map->watching, false, __ATOMIC_ACQ_REL))
        return;
    gate_enter(map);
    for (uint64_t v = chain_next_used(map->image->chain, 0); v < map->image->chain->guest_slabs;
         v = chain_next_used(map->image->chain, v + 1)) {
        const struct slab_status *status = &map->slabs[v].status;

        if (!slab_is_one_of(status, WITH_COPIES))
            continue;
        chain_claim(map->image->chain, v);
        if (slab_is_one_of(status, WITH_COPIES))
            restore(map, v);
        chain_release(map->image->chain, v);
    }
    gate_leave(map);
}

void watch_forget(struct pcow_map *map)
{
    __atomic_store_n(&map->watching, false, __ATOMIC_RELEASE);
    __atomic_store_n(&map->watch_found, 0, __ATOMIC_RELAXED);
}

/* ---- serving --------------------------------------------------------------------------------- */

/* What the page reads as, in memory that reports a store. */
static int copy_in(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    static const uint8_t zeros[PCOW_PAGE_SIZE];
    struct place place = chain_find(map->image, guest_slab, page, 1);
    /* Of a hole in a full pool nothing can be loaded, see holes.c. */
    const void *source =
        place.present && !holes_at(map, guest_slab, page)
            ? file_address(&map->image->chain->file[place.level]->file, place.offset)
            : zeros;
    struct uffdio_copy copy = {
        .dst = (uintptr_t)map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
        .src = (uintptr_t)source,
        .len = PCOW_PAGE_SIZE,
        .mode = UFFDIO_COPY_MODE_WP,
    };

    if (!source)
        return -ENOMEM;
    /* EEXIST: two loads of one page were reported. */
    return ioctl(map->uffd, UFFDIO_COPY, &copy) && errno != EEXIST ? -errno : 0;
}

/* The claim is held. */
static void serve_load(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    if (page_set_has(&slab->writable, page))
        return;                        /* it has become own meanwhile */
    if (__atomic_load_n(&map->watching, __ATOMIC_ACQUIRE) && copy_in(map, guest_slab, page) == 0) {
        layout_enter(map, guest_slab, slab_is_unmapped(&slab->status) ? SLAB_WATCHED_UNMAPPED_READ
                                                                      : SLAB_WATCHED_READ);
        return;
    }
    /*
     * An unreadable source is restored too: its mapping gives the error to whoever touches it. It
     * is not watched then.
     */
    __atomic_store_n(&map->watching, false, __ATOMIC_RELEASE);
    restore(map, guest_slab);
}

static void serve_store(struct pcow_map *map, uint64_t offset)
{
    uint64_t guest_slab = offset >> SLAB_BITS;

    if (resolve(map, offset, true, NULL)) {
        /* Not here, where everybody would wait: say where it was, and let it trap again. */
        __atomic_store_n(&map->watch_found, offset + 1, __ATOMIC_RELEASE);
        gate_enter(map);
        chain_claim(map->image->chain, guest_slab);
        if (slab_is_watched(&map->slabs[guest_slab].status))
            restore(map, guest_slab);
        chain_release(map->image->chain, guest_slab);
        gate_leave(map);
    }
    uffd_wake(map, map->address + (guest_slab << SLAB_BITS), PCOW_SLAB_SIZE);
    end_watch(map);
}

/* An access to a slab that may be watched, in the userfaultfd thread. */
static void watch_serve(struct pcow_map *map, uint64_t offset, bool write)
{
    uint64_t guest_slab = offset >> SLAB_BITS;
    bool watched, looking;

    gate_enter(map);
    chain_claim(map->image->chain, guest_slab);
    looking = __atomic_load_n(&map->watching, __ATOMIC_ACQUIRE);
    watched = slab_is_watched(&map->slabs[guest_slab].status);
    if (watched && !write)
        serve_load(map, guest_slab, (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB));
    /* It could not be unmapped, and is under watch still. */
    if (!watched && slab_is_unmapped(&map->slabs[guest_slab].status))
        layout_map_slab(map, guest_slab);
    chain_release(map->image->chain, guest_slab);
    gate_leave(map);
    /* Also if the slab was mapped by somebody else meanwhile: this was the store. */
    if (write && (watched || looking))
        serve_store(map, offset);
}

/* ---- public ---------------------------------------------------------------------------------- */

/*
 * A page that is mapped for stores. The kernel may want space for its neighbours as well, see
 * image/folio.c.
 */
static bool can_store(const pcow_map *map, uint64_t offset)
{
    uint64_t guest_slab = offset >> SLAB_BITS;
    struct interrupts interrupts;
    bool can;

    if (map->image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
        return true;
    interrupts = interrupts_disable();
    gate_enter((pcow_map *)map);
    chain_claim(map->image->chain, guest_slab);
    can =
        layout_prepare_store(map, guest_slab, (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB))
        == 0;
    chain_release(map->image->chain, guest_slab);
    gate_leave((pcow_map *)map);
    interrupts_restore(interrupts);
    return can;
}

bool pcow_map_is_accessible(const pcow_map *map, uint64_t offset, bool write)
{
    const struct slab_map *slab;

    if (offset >= map->size)
        return false;
    slab = &map->slabs[offset >> SLAB_BITS];
    if (!slab_was_asked(map, offset >> SLAB_BITS))
        return false;
    if (!write)
        return !slab_is_unmapped(&slab->status);
    return page_set_has(&slab->writable, (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB))
           && can_store(map, offset);
}

int pcow_map_watch(pcow_map *map, struct pcow_error *error)
{
    const uint64_t slabs = (map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;
    int ret;

    if (!map->image->file.writable)
        return error_set(error, -EROFS, "%s is open for reading only", map->image->file.path);
    pthread_mutex_lock(&map->watch_lock);
    ret = uffd_open(map, error);
    if (!ret)
        ret = uffd_start(map, watch_serve, error);
    /* What another vCPU is looking for does not matter: every store is reported. */
    if (!ret && !__atomic_load_n(&map->watching, __ATOMIC_ACQUIRE)) {
        __atomic_fetch_add(&map->stats.watches, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&map->watch_found, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&map->watching, true, __ATOMIC_RELEASE);
        for (uint64_t first = 0; first < slabs && ret == 0; first += BATCH) {
            uint64_t end = first + BATCH < slabs ? first + BATCH : slabs;
            struct interrupts interrupts = interrupts_disable();

            gate_enter(map);
            for (uint64_t v = first; v < end; v++)
                chain_claim(map->image->chain, v);
            ret = watch_slabs(map, first, end);
            for (uint64_t v = first; v < end; v++) {
                if (ret)
                    restore(map, v);
                chain_release(map->image->chain, v);
            }
            gate_leave(map);
            interrupts_restore(interrupts);
        }
        if (ret) {
            __atomic_store_n(&map->watching, false, __ATOMIC_RELEASE);
            error_set_errno(error, ret, "%s: its memory cannot be watched", map->image->file.path);
        }
    }
    pthread_mutex_unlock(&map->watch_lock);
    return ret;
}

bool pcow_map_watch_found(const pcow_map *map, uint64_t *offset)
{
    uint64_t found = __atomic_load_n(&map->watch_found, __ATOMIC_ACQUIRE);

    *offset = found - 1;
    return found != 0;
}
