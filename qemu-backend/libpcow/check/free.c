/* SPDX-License-Identifier: BSD-3-Clause */
/* Blocks that belong to nobody. */
#include "check/check.h"

#include <errno.h>
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

/* A writer that is killed leaves slabs in a page of the slab table that nothing was in before. */
static enum check_doubt doubt_of(const struct check *check, uint64_t slab)
{
    return check->file.heads >= MIRROR_HEADS && !check_was_used(check, owner_offset(slab))
               ? DOUBT_NONE
               : DOUBT_LOST;
}

/*
 * A slab with blocks that nobody owns. In a page of the slab table that is empty, though slabs of
 * it have blocks and valid pages, it may be that page that is lost: the pages of such a slab are
 * kept. Not of one whose bitmap says that it was set free, by a revert or a deletion.
 */
static int free_blocks(struct check *check, uint64_t slab)
{
    static const struct owner nobody = {.kind = OWNER_NONE};
    size_t before = check->loss_count;
    struct page_set bitmap;
    int ret = check_bitmap(check, slab, &bitmap);

    if (!ret && !bitmap_is_released(bitmap.word) && page_is_empty(check, slab))
        ret = check_lose_slab(check, slab, nobody);
    if (ret)
        return ret;
    if (check->loss_count > before) {
        check->gone += check->file.heads >= MIRROR_HEADS
                       && check_was_used(check, owner_offset(slab));
        check_doubtful(check, doubt_of(check, slab),
                       "file slab %llu has blocks, but no owner, and no more have the slabs beside "
                       "it: what an interrupted operation left, or a page of the slab table was "
                       "lost",
                       (unsigned long long)slab);
    } else {
        check_leak(check, "file slab %llu has blocks, but no owner", (unsigned long long)slab);
    }
    return check_punch(check, slab << SLAB_BITS, PCOW_SLAB_SIZE);
}

int check_free_blocks(struct check *check)
{
    /* Who has the image open keeps slabs ready that have no owner yet. */
    if (!holes_are_known(check) || check->unlocked)
        return 0;
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
        if (slab_is_group_head(slab, check->file.heads) || next_known(check, slab) == slab)
            continue;
        ret = free_blocks(check, slab);
        if (ret)
            return ret;
    }
    return 0;
}
