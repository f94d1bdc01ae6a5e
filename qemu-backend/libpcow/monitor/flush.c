/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Making the guest's stores durable when it asks for it (virtio-pmem, pcow_map_flush()).
 *
 * Only own pages that are mapped for stores can hold what is not durable: everything older was made
 * so, or is counted by image_note_stores() (or unknown). Within one flush, data and metadata may
 * reach the medium in any order: a page whose bit or owner is missing reads as before the stores
 * that this flush covers.
 */
#include <errno.h>

#include "chain/chain.h"
#include "monitor/monitor.h"
#include "util/error.h"

/*
 * Class page-cache: each msync() is a commit of the file system's journal and a flush of the
 * device. Up to so many pieces they beat one fdatasync(), which writes everything that is dirty in
 * the file and finds it without help.
 */
#define MAX_PIECES 2u
/*
 * Class pmem: each line of the pages costs a flush instruction, dirty or not. Beyond this many
 * bytes fdatasync() is cheaper: the kernel knows the pages that were stored to since the last one,
 * and write-protects them again.
 */
#define MAX_LINE_FLUSH (UINT64_C(8) << 20)

/*
 * The first guest slab from the one of this offset on that can hold stores; a revert may have the
 * chain apart.
 */
static uint64_t next_used(const struct pcow_map *map, uint64_t offset)
{
    const struct chain *chain = __atomic_load_n(&map->image->chain, __ATOMIC_ACQUIRE);

    return chain ? chain_next_used(chain, offset >> SLAB_BITS) : offset >> SLAB_BITS;
}

typedef int flush_piece_fn(const struct pcow_map *map, uint64_t offset, uint64_t length);

struct walk {
    unsigned pieces;
    uint64_t bytes;
};

static int flush_piece(const struct pcow_map *map, uint64_t offset, uint64_t length)
{
    return persist_range(&map->image->file.persist, map->address + offset, length);
}

/*
 * Count the pieces of [offset, end) that are mapped for stores, and call flush for each of them if
 * it is not NULL.
 */
static int walk_writable(const struct pcow_map *map, uint64_t offset, uint64_t end,
                         struct walk *walk, flush_piece_fn *flush)
{
    while (offset < end) {
        uint64_t guest_slab = next_used(map, offset), from = guest_slab << SLAB_BITS;
        const struct page_set *writable = &map->slabs[guest_slab].writable;

        if (from >= end)
            break;
        if (from > offset)
            offset = from;

        uint64_t last = end - from < PCOW_SLAB_SIZE ? end - from : PCOW_SLAB_SIZE;
        unsigned page = (unsigned)((offset - from) / PCOW_PAGE_SIZE),
                 pages = (unsigned)((last + PCOW_PAGE_SIZE - 1) / PCOW_PAGE_SIZE);

        while (page < pages) {
            unsigned run_end = page_set_run_end(writable, page, pages);

            if (page_set_has(writable, page)) {
                uint64_t bytes = (run_end - page) * PCOW_PAGE_SIZE;
                int ret = flush ? flush(map, from + page * PCOW_PAGE_SIZE, bytes) : 0;

                if (ret)
                    return ret;
                walk->pieces++;
                walk->bytes += bytes;
            }
            page = run_end;
        }
        offset = from + PCOW_SLAB_SIZE;
    }
    return 0;
}

/* There may be stores in pages that are in no set. */
static bool needs_all(const pcow_map *map)
{
    return !image_is_synced(map->image, image_stores(map->image))
           || __atomic_load_n(&map->unknown, __ATOMIC_SEQ_CST)
           || image_must_store_again(map->image);
}

/*
 * Owner word and valid set of the file slabs that hold a range; allocations leave them to the next
 * flush.
 */
static int flush_metadata(pcow_map *map, uint64_t offset, uint64_t end)
{
    const struct chain *chain = __atomic_load_n(&map->image->chain, __ATOMIC_ACQUIRE);
    struct file *file = &map->image->file;

    /*
     * A revert has it apart. What was stored before that is gone, and nobody stores before it is
     * there again.
     */
    if (!chain)
        return image_sync_stores(map->image);
    for (uint64_t v = next_used(map, offset); v << SLAB_BITS < end;
         v = chain_next_used(chain, v + 1)) {
        slab_ref head = __atomic_load_n(&chain->head[v], __ATOMIC_ACQUIRE);
        uint64_t slab = slab_ref_slab(head);
        void *owner, *valid;
        int ret;

        if (!head || slab_ref_level(head) != chain->levels)
            continue;
        owner = file_address(file, owner_offset(slab));
        valid = file_address(file, bitmap_offset(slab));
        if (!owner || !valid)
            return -ENOMEM;
        ret = persist_range(&file->persist, valid, sizeof(struct page_set));
        if (!ret)
            ret = persist_range(&file->persist, owner, sizeof(uint64_t));
        if (ret)
            return ret;
    }
    return 0;
}

/*
 * A page is mapped for stores before it is in the set, and another thread may have stored to it in
 * between. Whoever holds the claim of a slab enters what he has mapped before he gives it back;
 * what is mapped after that holds no store that this flush covers.
 */
void flush_await_mapped(struct pcow_map *map, uint64_t offset, uint64_t end)
{
    struct interrupts interrupts = interrupts_disable();

    gate_enter(map);
    for (uint64_t v = next_used(map, offset); v << SLAB_BITS < end;
         v = next_used(map, (v + 1) << SLAB_BITS)) {
        chain_claim(map->image->chain, v);
        chain_release(map->image->chain, v);
    }
    gate_leave(map);
    interrupts_restore(interrupts);
}

static int flush_range(pcow_map *map, uint64_t offset, uint64_t end)
{
    enum pcow_persistence persistence = map->image->file.persist.persistence;
    struct walk walk = {0};
    int ret;

    if (persistence == PCOW_PERSISTENCE_VOLATILE || !map->image->file.writable)
        return 0;
    if (needs_all(map))
        return image_sync_stores(map->image);
    flush_await_mapped(map, offset, end);
    walk_writable(map, offset, end, &walk, NULL);
    if (persistence == PCOW_PERSISTENCE_PMEM
            ? walk.bytes > MAX_LINE_FLUSH
            : walk.pieces > MAX_PIECES || offset >> SLAB_BITS != (end - 1) >> SLAB_BITS)
        return image_sync_stores(map->image);
    ret = walk_writable(map, offset, end, &walk, flush_piece);
    /*
     * A snapshot since then has emptied the sets that were walked over; or a mapping could not be
     * replaced, and there is a hole in the range (-ENOMEM).
     */
    if ((!ret || ret == -ENOMEM) && needs_all(map))
        return image_sync_stores(map->image);
    /* In class pmem metadata is durable when it is published. */
    if (ret || persistence == PCOW_PERSISTENCE_PMEM)
        return ret;
    return flush_metadata(map, offset, end);
}

int pcow_map_flush(pcow_map *map, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    uint64_t told = file_begin_flush(&map->image->file);
    int ret = 0, lost;

    if (offset > map->size || length > map->size - offset)
        return error_set(error, -EINVAL, "%s: flush beyond its end", map->image->file.path);
    if (image_is_inherited(map->image))
        return image_error_inherited(map->image, error);
    __atomic_fetch_add(&map->stats.flushes, 1, __ATOMIC_RELAXED);
    if (length > 0)
        ret = flush_range(map, offset, offset + length);
    lost = file_end_flush(&map->image->file, told);
    if (!ret)
        ret = lost;
    return ret ? error_set_errno(error, ret, "cannot flush %s", map->image->file.path) : 0;
}
