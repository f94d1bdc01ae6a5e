/* SPDX-License-Identifier: BSD-3-Clause */
/* The length of the file, and the slab table: who owns what. */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "image/datasum.h"
#include "util/error.h"

/* To whole slabs. */
static int extend(struct check *check)
{
    uint64_t size = check->slab_count << SLAB_BITS;
    int ret = check->repair && check->file.size < size ? file_set_size(&check->file, size) : 0;

    return ret ? error_set_errno(check->error, ret, "cannot extend %s", check->file.path) : 0;
}

int check_length(struct check *check)
{
    /* As it was found: a repair of the header in an image with a mirror has made it longer. */
    uint64_t rounded = (check->length + PCOW_SLAB_SIZE - 1) / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE,
             rest = (rounded >> SLAB_BITS) % SLABS_PER_GROUP;
    int ret;

    /* No group ends before its data. */
    if (rest && rest < check->file.heads)
        rounded += (check->file.heads - rest) << SLAB_BITS;
    check->slab_count = rounded >> SLAB_BITS;
    if (rounded == check->length)
        return 0;
    /* Words that are gone would have told of more. */
    if (check->length % GROUP_SIZE < LAYER_TABLE_OFFSET && (ret = check_lose_unknown(check)))
        return ret;
    check_corruption(check, true,
                     "the length of the file, %llu bytes, %s", (unsigned long long)check->length,
                     check->length % PCOW_SLAB_SIZE
                         ? "is not a multiple of 2 MiB: it was cut short, or something was appended"
                         : "ends inside the metadata: it was cut short");
    /*
     * The length is what tells of a cut: where that is in a slab of data, the file grows when its
     * bitmap names no page behind the end any more, see check_owners().
     */
    return (check->length >> SLAB_BITS) % SLABS_PER_GROUP < check->file.heads ? extend(check) : 0;
}

int check_add_slab(struct check *check, uint64_t slab, struct owner owner)
{
    if (check->count == check->capacity) {
        size_t capacity = check->capacity ? check->capacity * 2 : 256;
        struct check_slab *grown = realloc(check->slabs, capacity * sizeof *grown);

        if (!grown)
            return error_set(check->error, -ENOMEM, "out of memory for the slab table of %s",
                             check->file.path);
        check->slabs = grown;
        check->capacity = capacity;
    }
    check->slabs[check->count++] =
        (struct check_slab){slab, owner, datasum_may_be(&check->file, slab)};
    return 0;
}

int check_free_slab(struct check *check, uint64_t slab, const struct owner *lost)
{
    int ret = 0;

    if (lost) {
        ret = check_lose_slab(check, slab, *lost);
        if (!ret)
            ret = check_raise_generation(check);
    }
    if (!ret)
        ret = check_store64(check, owner_offset(slab), 0);
    return ret || slab >= check->slab_count || slab_is_group_head(slab, check->file.heads) ? ret
        : check_punch(check, slab << SLAB_BITS, PCOW_SLAB_SIZE);
}

int check_drop_slab(struct check *check, struct check_slab *slab, const struct owner *lost)
{
    slab->owner.kind = OWNER_NONE;
    return check_free_slab(check, slab->slab, lost);
}

static bool owner_is_possible(struct owner owner)
{
    switch (owner.kind) {
    case OWNER_DATA:
        return owner.layer && owner.number < MAX_GUEST_SLABS;
    case OWNER_STATE:
        return owner.layer && owner.number < MAX_GUEST_SLABS;
    case OWNER_TABLE:
        return owner.number >= 1 && owner.number <= CHECK_MAX_TABLE;
    case OWNER_NONE:
        break;
    }
    return false;
}

/*
 * An owner word that cannot count. The slab stays on the list without owner, so that its blocks are
 * not found again as a leak.
 */
static int drop_word(struct check *check, uint64_t slab, const struct owner *lost)
{
    int ret = slab < check->slab_count ? check_add_slab(check, slab, (struct owner){0}) : 0;

    return ret ? ret : check_free_slab(check, slab, lost);
}

static int check_word(struct check *check, uint64_t slab, uint64_t word)
{
    static const struct owner nobody = {.kind = OWNER_NONE};
    struct owner owner = owner_decode(word);

    if (!word_is_valid(word)) {
        check_corruption(check, true,
                         "the owner word of file slab %llu is damaged: whose data it holds is lost",
                         (unsigned long long)slab);
        return drop_word(check, slab, slab_is_group_head(slab, check->file.heads) ? NULL : &nobody);
    }
    if (slab_is_group_head(slab, check->file.heads) || !owner_is_possible(owner)) {
        check_corruption(
            check, true,
            "the owner word of file slab %llu is impossible (kind %u, layer %u, number %u)",
            (unsigned long long)slab, (unsigned)owner.kind, owner.layer, owner.number);
        return drop_word(check, slab, slab_is_group_head(slab, check->file.heads) ? NULL : &nobody);
    }
    if (slab >= check->slab_count) {
        check_corruption(check, true,
                         "file slab %llu (guest bytes from %llu of layer %u) lies behind the end "
                         "of file: it was cut short",
                         (unsigned long long)slab, (unsigned long long)owner.number << SLAB_BITS,
                         owner.layer);
        return drop_word(check, slab, owner.kind == OWNER_DATA ? &owner : NULL);
    }
    if (owner.kind == OWNER_TABLE && check->table[owner.number] && check_is_amending(check))
        return check_add_slab(check, slab, owner);
    if (owner.kind == OWNER_TABLE && check->table[owner.number]) {
        check_corruption(
            check, true,
            "file slabs %llu and %llu both say that they are layer table %u; the first counts",
            (unsigned long long)check->table[owner.number], (unsigned long long)slab, owner.number);
        return drop_word(check, slab, NULL);
    }
    if (owner.kind == OWNER_TABLE)
        check->table[owner.number] = slab;
    return check_add_slab(check, slab, owner);
}

/*
 * The file ends inside its last slab: what its owner kept behind the end is gone. Whether VM state
 * reaches so far its record tells, see slabs.c.
 */
static int check_cut_slab(struct check *check, struct check_slab *slab)
{
    bool all = true;
    unsigned first = (unsigned)(check->length % PCOW_SLAB_SIZE / PCOW_PAGE_SIZE);
    struct page_set valid, lost = {{0}};
    int ret;

    if (slab->owner.kind != OWNER_DATA)
        return 0;
    page_set_add_range(&lost, first, PAGES_PER_SLAB - first);
    ret = check_bitmap(check, slab->slab, &valid);
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
        lost.word[w] &= valid.word[w];
        all &= lost.word[w] == valid.word[w];
    }
    if (ret || page_set_empty(&lost))
        return ret;
    check_corruption(check, true,
                     "the file ends inside file slab %llu: %u pages of the guest from byte %llu on "
                     "(layer %u) are lost",
                     (unsigned long long)slab->slab, page_set_count(&lost),
                     ((unsigned long long)slab->owner.number << SLAB_BITS) + first * PCOW_PAGE_SIZE,
                     slab->owner.layer);
    ret = check_lose_pages(check, slab->slab, slab->owner, &lost, PCOW_EXACT);
    if (!ret)
        ret = check_raise_generation(check);
    /* One whose bitmap names no page would be taken for one that has lost it. */
    if (!ret && all)
        return check_drop_slab(check, slab, NULL);
    for (unsigned w = 0; w < PAGE_SET_WORDS && ret == 0; w++)
        if (lost.word[w])
            ret = check_store64(check, bitmap_offset(slab->slab) + w * sizeof(uint64_t),
                                valid.word[w] & ~lost.word[w]);
    return ret;
}

int check_owners(struct check *check)
{
    uint64_t *words = malloc(SLABS_PER_GROUP * sizeof *words);
    int ret = 0;

    if (!words)
        return error_set(check->error, -ENOMEM, "out of memory");
    for (uint64_t first = 0; first < check->slab_count && ret == 0; first += SLABS_PER_GROUP) {
        ret = check_read(check, owner_offset(first), words, SLABS_PER_GROUP * sizeof *words);
        /*
         * Also the words behind the end of file: they tell that it was cut, and would count again
         * when it grows.
         */
        for (uint64_t i = 0; i < SLABS_PER_GROUP && ret == 0; i++)
            if (words[i])
                ret = check_word(check, first + i, words[i]);
    }
    free(words);
    /* Words that are gone would have told of it. */
    if (!ret && check->has_no_tables)
        ret = check_lose_unknown(check);
    if (!ret && check->count && check->slabs[check->count - 1].slab == check->length >> SLAB_BITS)
        ret = check_cut_slab(check, &check->slabs[check->count - 1]);
    return ret ? ret : extend(check);
}
