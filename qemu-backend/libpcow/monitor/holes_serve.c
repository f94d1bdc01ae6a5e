/* SPDX-License-Identifier: BSD-3-Clause */
/* A load has failed, in the program or in the kernel: see that it finds what is there (holes.c). */
#include <errno.h>

#include "chain/index.h"
#include "monitor/monitor.h"
#include "persist/copy.h"
#include "util/signals.h"

/* Tries, while others change what is mapped there. */
#define MOST_TRIES 100u

static enum holes_answer show(struct pcow_map *map, uint64_t offset)
{
    uint64_t guest_slab = offset >> SLAB_BITS;
    struct interrupts interrupts = interrupts_disable();
    enum holes_answer answer;

    gate_enter(map);
    chain_claim(map->image->chain, guest_slab);
    index_update(map->image, guest_slab);
    answer = holes_show(map, guest_slab, (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB));
    chain_release(map->image->chain, guest_slab);
    gate_leave(map);
    /* What has failed may have been a trap, or a load of what an older layer had there. */
    if (answer == HOLES_UNRESOLVED && resolve(map, offset, false, NULL))
        answer = HOLES_NONE;
    interrupts_restore(interrupts);
    return answer;
}

/* What changes all the time, or only seems to, and cannot be loaded all the same, is no hole. */
bool holes_serve(struct pcow_map *map, uint64_t offset)
{
    /* All files of a chain are in one pool. */
    bool possible = map->image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE;

    for (unsigned tries = 0; possible && tries < MOST_TRIES; tries++) {
        enum holes_answer answer = show(map, offset);

        /* None is left: another load, for which there was space by then, may have filled it. */
        if (answer == HOLES_SHOWN || copy_touch(map->address + offset))
            return true;
        if (answer == HOLES_NONE)
            return false;
    }
    return false;
}

int pcow_map_show_holes(pcow_map *map, uint64_t offset, uint64_t length)
{
    int shown = 0;
    uint64_t end;

    if (offset >= map->size)
        return -EFAULT;
    end = length < map->size - offset ? offset + length : map->size;
    for (offset &= ~(PCOW_PAGE_SIZE - 1); offset < end; offset += PCOW_PAGE_SIZE) {
        if (copy_touch(map->address + offset))
            continue;
        if (!holes_serve(map, offset))
            return -EFAULT;
        shown = 1;
    }
    return shown;
}
