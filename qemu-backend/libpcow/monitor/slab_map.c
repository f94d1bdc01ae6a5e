/* SPDX-License-Identifier: BSD-3-Clause */
/* What is known of one slab of the range, without a look at how it is mapped. */
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "monitor/monitor.h"

unsigned layout_pages(const struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t left = (map->size - (guest_slab << SLAB_BITS)) / PCOW_PAGE_SIZE;

    return left < PAGES_PER_SLAB ? (unsigned)left : PAGES_PER_SLAB;
}

unsigned layout_count_pieces(const struct pcow_map *map, uint64_t guest_slab)
{
    return chain_count_pieces(map->image, guest_slab, layout_pages(map, guest_slab));
}

void layout_enter(struct pcow_map *map, uint64_t guest_slab, enum slab_state state)
{
    struct slab_status *status = &map->slabs[guest_slab].status;
    enum slab_state from = slab_state(status);

    slab_enter(status, state);
    __atomic_fetch_add(&map->bounced, (uint64_t)(state == SLAB_BOUNCE) - (from == SLAB_BOUNCE),
                       __ATOMIC_RELAXED);
}

bool minor_shows(const struct pcow_map *map, uint64_t guest_slab, unsigned page, uint64_t offset)
{
    return slab_state(&map->slabs[guest_slab].status) == SLAB_MINOR
           && offset
                  == (slab_ref_slab(map->image->chain->head[guest_slab]) << SLAB_BITS)
                         + page * PCOW_PAGE_SIZE;
}

void minor_is_whole(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint8_t *address = map->address + (guest_slab << SLAB_BITS);
    struct uffdio_range range = {(uintptr_t)address,
                                 layout_pages(map, guest_slab) * PCOW_PAGE_SIZE};

    if (slab_state(&slab->status) != SLAB_MINOR)
        return;
    /* If the kernel refuses, its pages go on to be let in. */
    if (ioctl(map->minor.fd, UFFDIO_UNREGISTER, &range) == 0) {
        madvise(address, range.len, MADV_DOFORK);      /* one with its neighbours, if it can be */
        layout_enter(map, guest_slab, SLAB_MAPPED);
    }
}
