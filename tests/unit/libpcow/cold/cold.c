/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The keeper of slabs in state COLD, see cold.h. It is told of every trap there, and before the
 * slab is mapped for another reason. A snapshot may freeze the layer that holds it meanwhile: the
 * bytes come back to the same place of the file.
 *
 * What it would take more to be of use: to choose slabs; a file that survives a crash, in which
 * their bytes are found by whoever opens the image; and that nobody looks at their place in the
 * file, or gives it away, before they are back (pcow_read() beside a map, the merge of a snapshot's
 * deletion, revert, resize).
 */
#include "cold.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "util/error.h"

struct cold {
    struct slab_keeper keeper;
    int fd;
    uint8_t *storage;                  /* of the size of the map: at the guest offset */
};

static struct cold *cold_of(const struct pcow_map *map)
{
    return (struct cold *)map->keepers[SLAB_COLD];
}

static bool find_place(const struct pcow_map *map, uint64_t guest_slab, struct place *place)
{
    *place = chain_find(map->image, guest_slab, 0, PAGES_PER_SLAB);
    return place->present && place->pages == PAGES_PER_SLAB
           && slab_ref_level(map->image->chain->head[guest_slab]) == map->image->chain->levels;
}

/* In a trap: no memory, no lock. A full pool is told to whoever traps, as for any store. */
static int bring_back(struct pcow_map *map, uint64_t guest_slab)
{
    const struct cold *cold = cold_of(map);
    uint64_t at = guest_slab << SLAB_BITS;
    struct place place;
    int ret = -EIO;

    if (find_place(map, guest_slab, &place))
        ret = file_write(&map->image->file, place.offset, cold->storage + at, PCOW_SLAB_SIZE);
    if (ret)
        return ret;
    fallocate(cold->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, PCOW_SLAB_SIZE);
    layout_enter(map, guest_slab, SLAB_UNKNOWN);
    return 0;
}

static int serve(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool write)
{
    int ret = bring_back(map, guest_slab);

    (void)page;
    (void)write;
    return ret ? ret : KEEPER_GO_ON;
}

static int put_away(struct pcow_map *map, uint64_t guest_slab)
{
    const struct cold *cold = cold_of(map);
    struct slab_map *slab = &map->slabs[guest_slab];
    struct place place;
    int ret;

    if (slab_state(&slab->status) != SLAB_MAPPED || slab_is_stale(&slab->status)
        || !page_set_full(&slab->writable) || !find_place(map, guest_slab, &place))
        return -EAGAIN;
    /* From here on nobody stores to it. */
    layout_unmap_slab(map, guest_slab);
    if (slab_state(&slab->status) != SLAB_UNMAPPED)
        return -EAGAIN;
    ret = file_read(&map->image->file, place.offset, cold->storage + (guest_slab << SLAB_BITS),
                    PCOW_SLAB_SIZE);
    if (ret)
        return ret;
    layout_enter(map, guest_slab, SLAB_COLD);
    return file_punch(&map->image->file, place.offset, PCOW_SLAB_SIZE);
}

typedef int slab_fn(struct pcow_map *map, uint64_t guest_slab);

static int with_claim(struct pcow_map *map, uint64_t guest_slab, slab_fn *work)
{
    struct interrupts interrupts = interrupts_disable();
    int ret;

    gate_enter(map);
    chain_claim(map->image->chain, guest_slab);
    ret = work(map, guest_slab);
    chain_release(map->image->chain, guest_slab);
    gate_leave(map);
    interrupts_restore(interrupts);
    return ret;
}

int cold_put_away(struct pcow_map *map, uint64_t guest_slab, struct pcow_error *error)
{
    int ret = with_claim(map, guest_slab, put_away);

    return ret ? error_set_errno(error, ret, "%s: guest slab %llu cannot be put away",
                                 map->image->file.path, (unsigned long long)guest_slab)
               : 0;
}

int cold_begin(struct pcow_map *map, const char *path, struct pcow_error *error)
{
    struct cold *cold = malloc(sizeof *cold);

    if (!cold)
        return error_set(error, -ENOMEM, "out of memory");
    *cold = (struct cold){.keeper = {.serve = serve, .leave = bring_back}};
    cold->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cold->storage = MAP_FAILED;
    if (cold->fd >= 0 && ftruncate(cold->fd, (off_t)map->size) == 0)
        cold->storage = mmap(NULL, map->size, PROT_READ | PROT_WRITE, MAP_SHARED, cold->fd, 0);
    if (cold->storage == MAP_FAILED) {
        int ret = error_set_errno(error, -errno, "cannot keep cold slabs in %s", path);

        if (cold->fd >= 0)
            close(cold->fd);
        free(cold);
        return ret;
    }
    map->keepers[SLAB_COLD] = &cold->keeper;
    return 0;
}

static int take_back(struct pcow_map *map, uint64_t guest_slab)
{
    return slab_state(&map->slabs[guest_slab].status) == SLAB_COLD
               ? layout_map_slab(map, guest_slab)
               : 0;
}

int cold_end(struct pcow_map *map, struct pcow_error *error)
{
    struct cold *cold = cold_of(map);

    for (uint64_t v = 0; v < map->size >> SLAB_BITS; v++) {
        int ret = with_claim(map, v, take_back);

        if (ret)
            return error_set_errno(error, ret, "%s: guest slab %llu cannot be brought back",
                                   map->image->file.path, (unsigned long long)v);
    }
    map->keepers[SLAB_COLD] = NULL;
    munmap(cold->storage, map->size);
    close(cold->fd);
    free(cold);
    return 0;
}
