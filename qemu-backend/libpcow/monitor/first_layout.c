/* SPDX-License-Identifier: BSD-3-Clause */
/* The first layout of a range: without holes for others, if that can be (reserve.c). */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "monitor/monitor.h"

/* MAP_SYNC needs MAP_SHARED_VALIDATE, with which the kernel does not take MAP_FIXED_NOREPLACE. */
static bool may_have_holes(const struct file *file)
{
    return !file->writable || file->persist.map_flags == MAP_SHARED;
}

int layout_begin(struct pcow_map *map, struct pcow_error *error)
{
    const struct chain *chain = map->image->chain;
    struct pcow_error reason;
    int ret;

    if (!may_have_holes(&map->image->file))
        return layout_map_all(map, error);
    map->hole.wanted = true;
    ret = layout_map_all(map, &reason);
    if (ret == -EEXIST) {
        reserve_release(map);
        vmas_add(map, -(int)map->vmas);
        for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs;
             v = chain_next_used(chain, v + 1))
            memset(&map->slabs[v], 0, sizeof map->slabs[v]);
        map->slabs_counted = 0;
        ret = reserve_range(map, error);
        return ret ? ret : layout_map_all(map, error);
    }
    if (ret) {
        if (error)
            *error = reason;
        return ret;
    }
    map->hole = (struct hole){0};      /* it is full */
    return 0;
}
