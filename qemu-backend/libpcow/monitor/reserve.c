/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The address space of the range, and how the first layout comes into it.
 *
 * A mapping over a reserved place makes the kernel cut the reservation, which takes half as long
 * again as one where nothing is. So the first layout, of which nobody knows the address yet, gives
 * the reservation back in stripes just before it maps them. Whatever else runs in the process may
 * get a place in that hole for memory of its own, which must then be neither replaced nor unmapped:
 * in the hole all is mapped with MAP_FIXED_NOREPLACE, from its beginning to its end, and when
 * somebody has come between, the range is reserved elsewhere and laid out without holes.
 */
#include <string.h>
#include <sys/mman.h>

#include "monitor/monitor.h"
#include "util/error.h"
#include "util/map_at.h"

#define STRIPE (UINT64_C(64) << 20)
#define NOTHING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

int reserve_range(struct pcow_map *map, struct pcow_error *error)
{
    map->reservation_size = map->size + PCOW_SLAB_SIZE;
    map->reservation = mmap(NULL, map->reservation_size, PROT_NONE, NOTHING, -1, 0);
    if (map->reservation == MAP_FAILED) {
        map->reservation = NULL;
        return error_set(error, -ENOMEM, "no address space for %llu bytes of %s",
                         (unsigned long long)map->size, map->image->file.path);
    }
    map->address = (uint8_t *)(((uintptr_t)map->reservation + PCOW_SLAB_SIZE - 1)
                               & ~(uintptr_t)(PCOW_SLAB_SIZE - 1));
    return 0;
}

/* But not the hole: what is there is not ours. */
void reserve_release(struct pcow_map *map)
{
    uint8_t *hole = map->address + map->hole.from, *behind = map->address + map->hole.to;

    if (map->reservation) {
        munmap(behind, (size_t)(map->reservation + map->reservation_size - behind));
        if (hole > map->reservation)
            munmap(map->reservation, (size_t)(hole - map->reservation));
    }
    map->reservation = NULL;
    map->hole = (struct hole){0};
}

/* Let the hole reach up to there, a guest offset, if it does not. */
static int widen(struct pcow_map *map, uint64_t to)
{
    uint64_t end = map->size & ~(PCOW_PAGE_SIZE - 1), from = map->hole.to;

    if (to <= from)
        return 0;
    if (to < from + STRIPE)
        to = from + STRIPE < end ? from + STRIPE : end;
    if (munmap(map->address + from, to - from))
        return -errno;
    map->hole.to = to;
    return 0;
}

int reserve_next(struct pcow_map *map, uint64_t from, uint64_t to, bool in_steps)
{
    int ret;

    if (!map->hole.wanted)
        return MAP_FIXED;
    ret = widen(map, to);
    if (ret == 0 && in_steps) {
        ret =
            map_at(map->address + from, to - from, PROT_NONE, NOTHING | MAP_FIXED_NOREPLACE, -1, 0);
        if (ret == 0)
            reserve_taken(map, to);
    }
    return ret ? ret : in_steps ? MAP_FIXED : MAP_FIXED_NOREPLACE;
}

void reserve_taken(struct pcow_map *map, uint64_t to)
{
    if (map->hole.wanted)
        map->hole.from = to;
}

int reserve_again(struct pcow_map *map, uint64_t from, uint64_t to)
{
    int fixed = reserve_next(map, from, to, false);
    int ret = fixed < 0 ? fixed
                        : map_at(map->address + from, to - from, PROT_NONE, NOTHING | fixed, -1, 0);

    if (ret == 0)
        reserve_taken(map, to);
    return ret;
}
