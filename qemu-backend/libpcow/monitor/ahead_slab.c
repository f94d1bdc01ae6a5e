/* SPDX-License-Identifier: BSD-3-Clause */
/* What the thread that works ahead does to one guest slab. */
#include <errno.h>

#include "image/prepare.h"
#include "image/remains.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"
#include "persist/copy.h"

/* Pages that are worked on under one claim: a trap may be waiting for it. */
#define CHUNK 16u

typedef int prepare_fn(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count);

/*
 * What has to be done to the pages that are not valid and not prepared; only if the guest slab's
 * file slab is the one that is meant.
 */
static int complete_chunk(struct pcow_map *map, uint64_t guest_slab, unsigned first,
                          uint64_t *meant, prepare_fn *prepare)
{
    struct pcow_image *image = map->image;
    slab_ref head = image->chain->head[guest_slab];
    uint64_t p = slab_ref_slab(head);
    int ret = 0;

    if (!head || slab_ref_level(head) != image->chain->levels
        || image->slabs[p].layer != image_active(image) || (*meant && *meant != p))
        return -ESTALE;
    *meant = p;
    for (unsigned page = first; page < first + CHUNK && ret == 0;) {
        unsigned end = page_set_run_end(&image->valid[p], page, first + CHUNK);

        if (!page_set_has(&image->valid[p], page) && !prepared_run(image, p, page, &end))
            ret = prepare(image, p, page, end - page);
        page = end;
    }
    return ret;
}

/* A chunk at a time, as a trap may wait for the slab. */
static int complete_chunks(struct pcow_map *map, uint64_t guest_slab, uint64_t *meant,
                           prepare_fn *prepare)
{
    int ret = 0;

    for (unsigned page = 0; page < PAGES_PER_SLAB && ret == 0; page += CHUNK) {
        if (ahead_is_stopping(&map->ahead) || prepare_room(map->image) == 0)
            return -ECANCELED;
        map->ahead.holding = true;
        turnstile_take(map);
        chain_claim(map->image->chain, guest_slab);
        ret = complete_chunk(map, guest_slab, page, meant, prepare);
        chain_release(map->image->chain, guest_slab);
        turnstile_release(map);
    }
    return ret;
}

/*
 * Half done: some pages have blocks and do not count as prepared, so nothing else would give them
 * back.
 */
static void undo_blocks(struct pcow_map *map, uint64_t guest_slab, uint64_t p)
{
    struct pcow_image *image = map->image;

    turnstile_take(map);
    chain_claim(image->chain, guest_slab);
    /* What does not succeed is in the way of nobody, and found when the slab is free. */
    if (slab_holds(image, p, guest_slab))
        remains_empty_pages(image, p, true);
    chain_release(image->chain, guest_slab);
    turnstile_release(map);
}

void ahead_complete_blocks(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t meant = 0;
    int ret;

    if (!prepare_is_of_use(map->image))
        return;
    ret = complete_chunks(map, guest_slab, &meant, prepare_blocks);
    if (!ret && map->image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        ret = file_commit(&map->image->file);
    if (!ret)
        ret = complete_chunks(map, guest_slab, &meant, prepare_pages);
    if (ret && meant)
        undo_blocks(map, guest_slab, meant);
}

void ahead_touch_source(struct pcow_map *map, uint64_t guest_slab, bool expected)
{
    struct pcow_image *image = map->image;

    for (unsigned page = 0;
         page < layout_pages(map, guest_slab) && !ahead_is_stopping(&map->ahead);) {
        const uint8_t *source = NULL;
        struct place place;

        turnstile_take(map);
        place = chain_find(image, guest_slab, page, CHUNK);
        if (place.present && !place.own) {
            struct file *file = &image->chain->file[place.level]->file;

            if (expected || file->persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
                source = file_address(file, place.offset);
        }
        /*
         * By loads: without the lock that a trap's mmap() needs, and most of them find what the
         * fault of another has brought in. Whether it can be read is found out, and told, by who
         * copies it.
         */
        for (unsigned i = 0; source && i < place.pages && copy_touch(source + i * PCOW_PAGE_SIZE);
             i++)
            ;
        if (source)
            file_note_filled(&image->chain->file[place.level]->file, place.offset);
        turnstile_release(map);
        page += place.pages;
    }
}

void ahead_complete_pages(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    unsigned pages = layout_pages(map, guest_slab);
    uint64_t copied = 0;
    int ret = 0;

    for (unsigned page = 0; page < pages && ret == 0 && !ahead_is_stopping(&map->ahead);
         page += CHUNK) {
        bool room = prepare_room(map->image) > 0;

        turnstile_take(map);
        chain_claim(map->image->chain, guest_slab);
        ret = slab_is_unmapped(&slab->status) || slab_is_watched(&slab->status) || !slab->queued
                  ? -ESTALE
              : !room ? -ENOSPC
                      : 0;
        if (!ret)
            ret = layout_own(map, guest_slab, page, pages - page < CHUNK ? pages - page : CHUNK,
                             &copied);
        if (!ret && page + CHUNK >= pages) {
            ret = layout_map_slab(map, guest_slab);
            if (!ret)
                layout_populate(map, guest_slab, 0, pages);
            __atomic_fetch_add(&map->ahead.completed, 1, __ATOMIC_RELAXED);
        }
        /* Another trap may ask for it again, when there is space. */
        if (ret)
            slab_set_queued(slab, false);
        chain_release(map->image->chain, guest_slab);
        turnstile_release(map);
    }
}
