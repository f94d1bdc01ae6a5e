/* SPDX-License-Identifier: BSD-3-Clause */
/* What snapshot operations want of a map: nobody stores to the range meanwhile. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "monitor/monitor.h"
#include "util/error.h"
#include "util/order.h"

/* A stretch of slabs that are used and mapped; between them may be others that are absent. */
static int protect_slabs(struct pcow_map *map, uint64_t first, uint64_t end)
{
    uint64_t from = first << SLAB_BITS,
             to = end << SLAB_BITS < map->size ? end << SLAB_BITS : map->size;

    return mprotect(map->address + from, to - from, PROT_READ) ? -errno : 0;
}

static int protect(struct pcow_map *map)
{
    const struct chain *chain = map->image->chain;
    uint64_t v = chain_next_used(chain, 0);
    int ret = 0;

    while (v < chain->guest_slabs && !ret) {
        uint64_t first = v, end = v;

        /*
         * What is not used is read-only, and protecting it once more costs nothing where it lies
         * between.
         */
        while (v < chain->guest_slabs && !slab_is_unmapped(&map->slabs[v].status)) {
            end = v + 1;
            v = chain_next_used(chain, end);
        }
        if (end > first)
            ret = protect_slabs(map, first, end);
        else
            v = chain_next_used(chain, v + 1);
    }
    return ret;
}

int monitor_freeze(struct pcow_map *map, struct pcow_error *error)
{
    int ret;

    retire_tables(map);
    /* What is mapped for stores is not known of every slab: none may stay. */
    ret = map->unknown ? -ENOMEM : protect(map);

    if (!ret)
        ret = lost_hide_again(map);
    /* They leave the sets below, and may hold stores that no flush has covered. */
    image_note_stores(map->image);

    watch_forget(map);
    ahead_froze(map);
    /*
     * A page that stayed writable would change the snapshot. Without any mapping every access
     * traps: slower, but right.
     */
    if (ret)
        return monitor_unmap_all(map, error);
    for (uint64_t v = chain_next_used(map->image->chain, 0); v < map->image->chain->guest_slabs;
         v = chain_next_used(map->image->chain, v + 1)) {
        memset(&map->slabs[v].writable, 0, sizeof map->slabs[v].writable);
        /*
         * Each page that is mapped counts as if it had cut a mapping; from one snapshot to the next
         * that would add up.
         */
        if (map->slabs[v].faults)
            layout_recount(map, v);
        map->slabs[v].faults = 0;
        slab_set_queued(&map->slabs[v], false);
        if (slab_is_kept(&map->slabs[v].status))
            slab_keeper(map, v)->freeze(map, v);
        slab_freeze_stale(&map->slabs[v].status);
        map->slabs[v].loaded = 0;
        map->slabs[v].grown = 0;
        map->slabs[v].run = 0;
        /*
         * What has become an older layer is to be copied when it is read. If it cannot be unmapped,
         * it is read where it is.
         */
        if (!slab_is_unmapped(&map->slabs[v].status) && layout_is_to_be_copied(map, v))
            layout_unmap_slab(map, v);
    }
    return 0;
}

/*
 * At the kernel's limit of mappings none can be put in the place of all. But all of them can be
 * made inaccessible as they are, which splits none: every access traps, and is mapped then.
 */
static int make_inaccessible(const struct pcow_map *map)
{
    return mprotect(map->address, map->size, PROT_NONE) ? -errno : 0;
}

static void forget_slab(struct pcow_map *map, uint64_t guest_slab, bool still_mapped)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint16_t pieces = still_mapped ? slab->pieces : 0;

    /* Not what retire.c has: it is still there. */
    if (!still_mapped)
        vmas_add(map, -(int)slab->pieces);
    memset(slab, 0, offsetof(struct slab_map, status));
    slab->pieces = pieces;
    slab_refresh(&slab->status);
    layout_enter(map, guest_slab, SLAB_UNMAPPED);
}

/*
 * used_only: all of it is about to be mapped again, by which time nobody has stored or loaded. What
 * is not used needs no state of its own until then, which would take time and memory in proportion
 * to the size of the image.
 */
static int unmap(struct pcow_map *map, bool used_only, struct pcow_error *error)
{
    const struct chain *chain = map->image->chain;
    uint64_t slabs = (map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;
    bool still_mapped = false;
    int ret;

    order_acquire(map);
    ret = reserve_again(map, 0, map->size);
    if (ret && make_inaccessible(map) == 0) {
        still_mapped = true;
        ret = 0;
    }
    if (ret)
        return error_set_errno(error, ret,
                               "%s: its memory cannot be write-protected; stop the VM now, "
                               "or what it writes changes the snapshot",
                               map->image->file.path);
    watch_forget(map);
    image_note_stores(map->image);
    /* one mapping in place of all needs no other to be split */
    __atomic_store_n(&map->unknown, false, __ATOMIC_SEQ_CST);
    if (used_only && chain)
        for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs;
             v = chain_next_used(chain, v + 1))
            forget_slab(map, v, still_mapped);
    else
        for (uint64_t v = 0; v < slabs; v++) {
            forget_slab(map, v, still_mapped);
            if (map->image->chain)
                sparse_set_add(&map->image->chain->used, v);
        }
    order_release(map);
    return 0;
}

int monitor_unmap_all(struct pcow_map *map, struct pcow_error *error)
{
    return unmap(map, false, error);
}

int monitor_map_all(struct pcow_map *map, struct pcow_error *error)
{
    /*
     * Half a layout would be wrong. With none at all every access traps, and what it needs is
     * mapped then.
     */
    return layout_map_all(map, error) ? monitor_unmap_all(map, error) : 0;
}

int monitor_map_changed(struct pcow_map *map, const struct layout_lists *lists,
                        struct pcow_error *error)
{
    int ret;

    if (lists && !image_copies_on_read(map->image)) {
        watch_forget(map);
        order_acquire(map);
        ret = layout_map_changed(map, lists);
        order_release(map);
        if (!ret)
            return 0;
    }
    ret = unmap(map, true, error);
    return ret ? ret : monitor_map_all(map, error);
}
