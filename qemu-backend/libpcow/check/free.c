/* SPDX-License-Identifier: BSD-3-Clause */
/* Blocks that belong to nobody. */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/error.h"

#define OWNERS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))

/* Some file systems call everything data: then there is nothing to be learnt. */
static bool holes_are_known(const struct check *check)
{
    struct stat st;
    off_t hole = lseek(check->file.fd, 0, SEEK_HOLE);

    return hole >= 0 && fstat(check->file.fd, &st) == 0
           && ((uint64_t)hole < check->file.size
               || (uint64_t)st.st_blocks * 512 >= check->file.size);
}

/* Of the list, the first slab that is not below. */
static uint64_t next_known(const struct check *check, uint64_t slab)
{
    size_t low = 0, high = check->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (check->slabs[middle].slab < slab)
            low = middle + 1;
        else
            high = middle;
    }
    return low < check->count ? check->slabs[low].slab : UINT64_MAX;
}

/* Does a page of the slab table hold no owner word at all? */
static bool page_is_empty(const struct check *check, uint64_t slab)
{
    uint64_t first = slab - slab % OWNERS_PER_PAGE;

    return next_known(check, first) >= first + OWNERS_PER_PAGE;
}

/* Slabs with data, by owner; made when it is asked for. */
struct owned {
    struct check_slab **list;
    size_t count;
};

static int find_owned(struct check *check, struct owned *owned, struct owner owner, bool *found)
{
    size_t low = 0, high;
    int ret = owned->list ? 0
                          : check_sort_by_owner(check, OWNER_DATA, &owned->list, &owned->count);

    if (ret)
        return ret;
    for (high = owned->count; low < high;) {
        size_t middle = low + (high - low) / 2;
        const struct owner *of = &owned->list[middle]->owner;

        if (of->layer < owner.layer || (of->layer == owner.layer && of->number < owner.number))
            low = middle + 1;
        else
            high = middle;
    }
    *found = low < owned->count && owned->list[low]->owner.layer == owner.layer
             && owned->list[low]->owner.number == owner.number;
    return 0;
}

/*
 * Where a writer that was killed had changed the slab table, its mirror tells whose a slab was
 * before. A snapshot keeps each guest slab that it has, in this file slab or in another one; so if
 * it has none, the owner word was lost. But it may have become one since, and have been shrunk
 * before: what it has lost by that lies above the limit that growing sets.
 */
static int was_of_snapshot(struct check *check, struct owned *owned, uint64_t slab,
                           struct owner *owner, bool *lost)
{
    const struct check_layer *layer;
    bool found = false;
    int ret;

    *lost = false;
    if (!check_had_owner(check, slab, owner))
        return 0;
    layer = check_find_layer(check, owner->layer);
    if (!layer || !layer->alive || layer->doubtful || layer->layer.state != LAYER_SNAPSHOT
        || (uint64_t)owner->number << SLAB_BITS >= layer->layer.parent_limit)
        return 0;
    ret = find_owned(check, owned, *owner, &found);
    *lost = !ret && !found;
    return ret;
}

static int lose_blocks(struct check *check, uint64_t slab, struct owner owner)
{
    int ret = check_lose_slab(check, slab, owner);

    if (ret)
        return ret;
    check->gone++;
    check_doubtful(check, DOUBT_LOST,
                   "file slab %llu has blocks, but no owner, and by the mirror it holds guest bytes "
                   "from %llu of layer %u: its owner word was lost",
                   (unsigned long long)slab, (unsigned long long)owner.number << SLAB_BITS,
                   owner.layer);
    return 0;
}

/*
 * A slab with blocks that nobody owns. In a page of the slab table that is empty, though slabs of
 * it have blocks and valid pages, it may be that page that is lost: the pages of such a slab are
 * kept. Not of one whose bitmap says that it was set free, by a revert or a deletion.
 */
static int free_blocks(struct check *check, struct owned *owned, uint64_t slab)
{
    static const struct owner nobody = {.kind = OWNER_NONE};
    size_t before = check->loss_count;
    struct page_set bitmap;
    bool has_pages, lost = false;
    struct owner owner;
    int ret = check_bitmap(check, slab, &bitmap);

    if (ret)
        return ret;
    /* A slab that was taken beforehand, and has nothing yet, names none. */
    has_pages = !page_set_empty(&bitmap) && !bitmap_is_released(bitmap.word);
    if (has_pages)
        ret = was_of_snapshot(check, owned, slab, &owner, &lost);
    if (!ret && lost)
        ret = lose_blocks(check, slab, owner);
    if (ret || lost)
        return ret ? ret : check_punch(check, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    if (!bitmap_is_released(bitmap.word) && page_is_empty(check, slab))
        ret = check_lose_slab(check, slab, nobody);
    if (ret)
        return ret;
    if (check->loss_count > before)
        check_doubtful(check, check->file.heads < MIRROR_HEADS ? DOUBT_LOST : DOUBT_NONE,
                       "file slab %llu has blocks, but no owner, and no more have the slabs beside "
                       "it: what an interrupted operation left, or a page of the slab table was "
                       "lost",
                       (unsigned long long)slab);
    else
        check_leak(check, "file slab %llu has blocks, but no owner", (unsigned long long)slab);
    return check_punch(check, slab << SLAB_BITS, PCOW_SLAB_SIZE);
}

static int free_all_blocks(struct check *check, struct owned *owned)
{
    for (uint64_t slab = 1; slab < check->slab_count; slab++) {
        off_t data = lseek(check->file.fd, (off_t)(slab << SLAB_BITS), SEEK_DATA);
        int ret;

        if (data < 0)
            return errno == ENXIO
                       ? 0
                       : error_set_errno(check->error, -errno, "cannot look for blocks in %s",
                                         check->file.path);
        slab = (uint64_t)data >> SLAB_BITS;
        if (slab >= check->slab_count)
            return 0;
        if (slab_is_group_head(slab, check->file.heads) || next_known(check, slab) == slab
            || (check_is_amending(check) && slab_is_group_head(slab, MIRROR_HEADS)))
            continue;
        ret = free_blocks(check, owned, slab);
        if (ret)
            return ret;
    }
    return 0;
}

int check_free_blocks(struct check *check)
{
    struct owned owned = {0};
    int ret;

    /* Who has the image open keeps slabs ready that have no owner yet. */
    if (!holes_are_known(check) || check->unlocked)
        return 0;
    ret = free_all_blocks(check, &owned);
    free(owned.list);
    return ret;
}
