/* SPDX-License-Identifier: BSD-3-Clause */
/* Of which metadata the mirror proves that it is right, and what it has where it does not. */
#include "check/check.h"
#include "image/mirror.h"

void check_set_unproven(struct check *check, uint64_t group, unsigned page)
{
    uint64_t bit = group * METADATA_PAGES + page;

    check->unproven[bit / 64] |= UINT64_C(1) << bit % 64;
}

bool check_is_proven(const struct check *check, uint64_t offset)
{
    uint64_t bit = mirror_bit(offset / PCOW_PAGE_SIZE);

    /* What lies in a slab of data, as layer tables do, has no copy. */
    return check->unproven && !((offset >> SLAB_BITS) % SLABS_PER_GROUP)
           && mirror_offset(offset / GROUP_SIZE, METADATA_PAGES) <= check->length
           && !(check->unproven[bit / 64] >> bit % 64 & 1);
}

/* What the mirror has of metadata at an offset. */
static bool read_copy(const struct check *check, uint64_t offset, void *copy, size_t length)
{
    return file_read(&check->file, offset + PCOW_SLAB_SIZE, copy, length) == 0;
}

bool check_had_pages(struct check *check, uint64_t slab)
{
    struct page_set pages;
    uint64_t owner, was;

    return check->file.heads >= MIRROR_HEADS && !check_is_proven(check, bitmap_offset(slab))
           && read_copy(check, bitmap_offset(slab), &pages, sizeof pages)
           && !page_set_empty(&pages)
           && read_copy(check, owner_offset(slab), &was, sizeof was)
           && !check_read(check, owner_offset(slab), &owner, sizeof owner) && owner == was;
}

bool check_had_owner(const struct check *check, uint64_t slab, struct owner *owner)
{
    uint64_t was;

    if (check->file.heads < MIRROR_HEADS || check_is_proven(check, owner_offset(slab))
        || !read_copy(check, owner_offset(slab), &was, sizeof was) || !word_is_valid(was))
        return false;
    *owner = owner_decode(was);
    return owner->kind == OWNER_DATA;
}
