/* SPDX-License-Identifier: BSD-3-Clause */
/* What the guest sees of a place in memory that the library has of a file. */
#include <errno.h>
#include <sys/mman.h>

#include "chain/chain.h"
#include "monitor/monitor.h"
#include "util/error.h"

static bool find_in_file(const struct pcow_map *map, const struct pcow_image *image,
                         uint64_t offset, uint64_t *guest_offset)
{
    uint64_t slab = offset >> SLAB_BITS, page = offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB,
             guest_slab;
    struct slab owner;
    struct place place;

    /* During a revert there are no lists: nobody is to load from there then. */
    if (image->format1 || slab >= image_slab_count(image)
        || !__atomic_load_n(&map->image->chain, __ATOMIC_ACQUIRE))
        return false;
    owner = slab_peek(image, slab);
    guest_slab = owner.number;
    if (owner.kind != OWNER_DATA || guest_slab << SLAB_BITS >= map->size)
        return false;
    place = chain_find(map->image, guest_slab, (unsigned)page, 1);
    if (!place.present || map->image->chain->file[place.level] != image
        || place.offset != (offset & ~(PCOW_PAGE_SIZE - 1)))
        return false;                  /* a snapshot's, or of a page that was copied since */
    *guest_offset = (guest_slab << SLAB_BITS) + offset % PCOW_SLAB_SIZE;
    return true;
}

bool pcow_map_find(const pcow_map *map, const void *address, uint64_t *offset)
{
    const uint8_t *at = address;
    uint64_t in_file;

    if (at >= map->address && at < map->address + map->size) {
        *offset = (uint64_t)(at - map->address);
        return true;
    }
    for (const struct pcow_image *image = map->image; image; image = image->base)
        if (file_find_window_at(&image->file, at, &in_file))
            return find_in_file(map, image, in_file, offset);
    return false;
}

/* The claim is held, or everybody stopped. */
static int hide(const struct pcow_map *map, const struct file *file, uint64_t in_file,
                uint64_t guest_offset)
{
    if (slab_is_unmapped(&map->slabs[guest_offset >> SLAB_BITS].status))
        return 0;                      /* who maps it will see to that */
    return lost_cover(file, map->address + guest_offset, PCOW_PAGE_SIZE, in_file, PROT_NONE);
}

static int lose(struct pcow_map *map, uint64_t offset)
{
    unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB);
    struct place place = chain_find(map->image, offset >> SLAB_BITS, page, 1);
    struct file *file = place.present ? &map->image->chain->file[place.level]->file : NULL;
    int ret;

    if (!file || file->persist.persistence == PCOW_PERSISTENCE_VOLATILE)
        return 0;
    ret = lost_add(file, place.offset);
    if (ret)
        return ret;
    __atomic_store_n(&map->lost, true, __ATOMIC_RELEASE);
    /*
     * Before it is hidden: a flush of its lines that begins later would trap as a load does, in a
     * thread that has nowhere to go with the error.
     */
    __atomic_fetch_and(&map->slabs[offset >> SLAB_BITS].writable.word[page / 64],
                       ~(UINT64_C(1) << (page % 64)), __ATOMIC_SEQ_CST);
    return hide(map, file, place.offset, offset);
}

int pcow_map_lose(pcow_map *map, uint64_t offset, struct pcow_error *error)
{
    struct interrupts interrupts;
    int ret;

    if (offset >= map->size)
        return error_set(error, -EINVAL, "%s: no page at %llu", map->image->file.path,
                         (unsigned long long)offset);
    interrupts = interrupts_disable();
    gate_enter(map);
    chain_claim(map->image->chain, offset >> SLAB_BITS);
    ret = lose(map, offset & ~(PCOW_PAGE_SIZE - 1));
    chain_release(map->image->chain, offset >> SLAB_BITS);
    gate_leave(map);
    interrupts_restore(interrupts);
    if (ret == -ENOSPC)
        return error_set(error, ret,
                         "%s: more than %u pages are lost: stop the VM, or it may see something "
                         "else in the place of the others",
                         map->image->file.path, MAX_LOST_PAGES);
    return ret ? error_set_errno(error, ret, "%s: cannot keep a lost page apart",
                                 map->image->file.path)
               : 0;
}

bool lost_in_map(const struct pcow_map *map, uint64_t offset)
{
    struct place place;

    if (!__atomic_load_n(&map->lost, __ATOMIC_ACQUIRE))
        return false;
    place = chain_find(map->image, offset >> SLAB_BITS,
                       (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB), 1);
    return place.present
           && lost_is_in(&map->image->chain->file[place.level]->file, place.offset, PCOW_PAGE_SIZE);
}

void lost_take_out(const struct pcow_map *map, uint64_t guest_slab, struct page_set *pages)
{
    const struct file *file = &map->image->file;

    if (!__atomic_load_n(&map->lost, __ATOMIC_ACQUIRE))
        return;
    for (unsigned page = 0; page < PAGES_PER_SLAB;) {
        struct place place = chain_find(map->image, guest_slab, page, PAGES_PER_SLAB - page);
        uint64_t end = place.offset + place.pages * PCOW_PAGE_SIZE;

        for (uint64_t at = place.own ? lost_next(file, place.offset, end) : end; at < end;
             at = lost_next(file, at + PCOW_PAGE_SIZE, end)) {
            unsigned lost = page + (unsigned)((at - place.offset) / PCOW_PAGE_SIZE);

            pages->word[lost / 64] &= ~(UINT64_C(1) << (lost % 64));
        }
        page += place.pages;
    }
}

int lost_hide_again(const struct pcow_map *map)
{
    for (const struct pcow_image *image = map->lost ? map->image : NULL; image;
         image = image->base) {
        /*
         * What the guest sees of a place in such a file cannot be found: everything has to be
         * mapped anew.
         */
        if (image->format1 && image->file.lost_pages.any)
            return -ENOTSUP;
        for (unsigned i = 0; i < MAX_LOST_PAGES; i++) {
            uint64_t in_file = image->file.lost_pages.page[i], offset;
            int ret = in_file && find_in_file(map, image, in_file, &offset)
                          ? hide(map, &image->file, in_file, offset)
                          : 0;

            if (ret)
                return ret;
        }
    }
    return 0;
}
