/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the layers own: slabs of the dead, pages held twice, VM state, and blocks that belong to
 * nobody.
 */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/error.h"

int check_dead_slabs(struct check *check)
{
    int ret = 0;

    for (size_t i = 0; i < check->count && ret == 0; i++) {
        struct check_slab *slab = &check->slabs[i];
        const struct check_layer *found = check_find_layer(check, slab->owner.layer);

        if (slab->owner.kind == OWNER_NONE || slab->owner.kind == OWNER_TABLE
            || (found && found->alive))
            continue;
        check_leak(check, "file slab %llu belongs to layer %u, which is deleted",
                   (unsigned long long)slab->slab, slab->owner.layer);
        ret = check_drop_slab(check, slab, NULL);
    }
    return ret;
}

/*
 * A slab whose bitmap names no page. Either it never came to that (class page-cache: a host crash
 * may keep the owner word of a first store and lose the bitmap; and a resize empties bitmaps), or
 * the bitmap is what was lost. If it holds nothing, no matter: the next store there uses it.
 */
static int check_empty_slab(struct check *check, struct check_slab *slab)
{
    struct page_set pages;
    int ret = check_bitmap(check, slab->slab, &pages);

    if (ret || !page_set_empty(&pages))
        return ret;
    check_content(check, slab->slab, &pages);
    if (page_set_empty(&pages))
        return 0;
    check_doubtful(check,
                   "file slab %llu (guest bytes from %llu of layer %u) has %u pages of content, "
                   "and its bitmap names none: what a crash or a resize left, or the bitmap is what "
                   "was lost",
                   (unsigned long long)slab->slab,
                   (unsigned long long)slab->owner.number << SLAB_BITS, slab->owner.layer,
                   page_set_count(&pages));
    ret = check_lose_pages(check, slab->slab, slab->owner, &pages, PCOW_ESTIMATE);
    return ret ? ret : check_drop_slab(check, slab, NULL);
}

int check_empty_slabs(struct check *check)
{
    int ret = 0;

    /* Who has the image open is about to fill some. */
    for (size_t i = 0; i < check->count && ret == 0 && !check->unlocked; i++) {
        struct check_slab *slab = &check->slabs[i];
        const struct check_layer *found = slab->owner.kind == OWNER_DATA
                                              ? check_find_layer(check, slab->owner.layer)
                                              : NULL;

        /* A deletion takes pages out of hidden layers. */
        if (found && found->alive && found->layer.state != LAYER_HIDDEN)
            ret = check_empty_slab(check, slab);
    }
    return ret;
}

/* ---- two file slabs of one layer and one guest slab, or one piece of VM state ---------------- */

static int by_owner(const void *left, const void *right)
{
    const struct check_slab *a = *(struct check_slab *const *)left,
                            *b = *(struct check_slab *const *)right;

    if (a->owner.layer != b->owner.layer)
        return a->owner.layer < b->owner.layer ? -1 : 1;
    if (a->owner.number != b->owner.number)
        return a->owner.number < b->owner.number ? -1 : 1;
    return a->slab < b->slab ? -1 : a->slab > b->slab;
}

/* Those of one kind by owner; the caller frees the list. */
static int sort_by_owner(struct check *check, enum owner_kind kind, struct check_slab ***sorted,
                         size_t *count)
{
    *count = 0;
    *sorted = malloc((check->count + 1) * sizeof **sorted);
    if (!*sorted)
        return error_set(check->error, -ENOMEM, "out of memory");
    for (size_t i = 0; i < check->count; i++)
        if (check->slabs[i].owner.kind == kind)
            (*sorted)[(*count)++] = &check->slabs[i];
    qsort(*sorted, *count, sizeof **sorted, by_owner);
    return 0;
}

static bool same_owner(const struct check_slab *a, const struct check_slab *b)
{
    return a->owner.layer == b->owner.layer && a->owner.number == b->owner.number;
}

/* Take pages out of a slab: first they stop to be valid, then their blocks go. */
static int clear_pages(struct check *check, uint64_t slab, const struct page_set *valid,
                       const struct page_set *pages)
{
    int ret = check_raise_generation(check);

    for (unsigned w = 0; w < PAGE_SET_WORDS && ret == 0; w++)
        if (valid->word[w] & pages->word[w])
            ret = check_store64(check, bitmap_offset(slab) + w * sizeof(uint64_t),
                                valid->word[w] & ~pages->word[w]);
    for (unsigned page = 0; page < PAGES_PER_SLAB && ret == 0;) {
        unsigned end = page_set_run_end(pages, page, PAGES_PER_SLAB);

        if (page_set_has(pages, page))
            ret = check_punch(check, (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                              (end - page) * PCOW_PAGE_SIZE);
        page = end;
    }
    return ret;
}

/*
 * first to last - 1 have one owner. Lookup begins with the highest file slab, so that one's pages
 * are what the guest sees.
 */
static int check_group(struct check *check, struct check_slab *const *first,
                       struct check_slab *const *last)
{
    struct page_set seen = {{0}};

    while (last > first) {
        const struct check_slab *slab = *--last;
        struct page_set valid, twice = {{0}};
        int ret = check_bitmap(check, slab->slab, &valid);

        if (ret)
            return ret;
        for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
            twice.word[w] = seen.word[w] & valid.word[w];
            seen.word[w] |= valid.word[w];
        }
        if (page_set_empty(&twice))
            continue;
        check_corruption(check, true,
                         "layer %u holds %u pages of the 2 MiB from guest byte %llu on twice; "
                         "those in file slab %llu are "
                         "hidden by others",
                         slab->owner.layer, page_set_count(&twice),
                         (unsigned long long)slab->owner.number << SLAB_BITS,
                         (unsigned long long)slab->slab);
        ret = clear_pages(check, slab->slab, &valid, &twice);
        if (ret)
            return ret;
    }
    return 0;
}

int check_overlaps(struct check *check)
{
    struct check_slab **sorted;
    size_t count;
    int ret = sort_by_owner(check, OWNER_DATA, &sorted, &count);

    for (size_t i = 0, end; ret == 0 && i < count; i = end) {
        for (end = i + 1; end < count && same_owner(sorted[i], sorted[end]); end++)
            ;
        if (end - i > 1)
            ret = check_group(check, sorted + i, sorted + end);
    }
    free(sorted);
    return ret;
}

/* ---- VM state -------------------------------------------------------------------------------- */

/* The slab that holds this piece; 0: there is none. */
static uint64_t find_piece(struct check_slab *const *sorted, size_t count, uint64_t number)
{
    size_t low = 0, high = count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (sorted[middle]->owner.number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && sorted[low]->owner.number == number ? sorted[low]->slab : 0;
}

/* Are all pieces there, and the last one up to its end? */
static bool state_is_whole(const struct check *check, uint64_t size,
                           struct check_slab *const *sorted, size_t count)
{
    for (uint64_t offset = 0; offset < size; offset += PCOW_SLAB_SIZE) {
        uint64_t slab = find_piece(sorted, count, offset >> SLAB_BITS), rest = size - offset;

        if (!slab
            || (slab << SLAB_BITS) + (rest < PCOW_SLAB_SIZE ? rest : PCOW_SLAB_SIZE)
                   > check->length)
            return false;
    }
    return true;
}

static int give_state_up(struct check *check, struct check_layer *found,
                         struct check_slab *const *sorted, size_t count, uint64_t needed)
{
    int ret = 0;

    check_corruption(check, true,
                     "the VM state of snapshot '%s' is not whole and is given up; its memory "
                     "can still be used",
                     found->layer.name);
    for (uint64_t number = 0; number < needed && ret == 0; number++)
        ret = check_lose_state(check, found, number, find_piece(sorted, count, number));
    found->layer.state_size = 0;
    return ret ? ret
               : check_store64(check,
                               check_record_offset(check, found->layer.slot)
                                   + offsetof(struct layer_record, state_size),
                               0);
}

/* The pieces of one layer, by number. */
static int check_pieces(struct check *check, struct check_layer *found,
                        struct check_slab *const *sorted, size_t count)
{
    uint64_t needed = (found->layer.state_size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS,
             previous = UINT64_MAX;
    int ret = 0;

    if (found->layer.state != LAYER_SNAPSHOT)
        needed = 0;
    if (needed && !state_is_whole(check, found->layer.state_size, sorted, count)) {
        ret = give_state_up(check, found, sorted, count, needed);
        needed = 0;
    }
    for (size_t i = 0; i < count && ret == 0; i++) {
        struct check_slab *slab = sorted[i];

        if (slab->owner.number >= needed) {
            check_leak(check, "file slab %llu holds VM state of layer %u behind its end",
                       (unsigned long long)slab->slab, found->layer.id);
            ret = check_drop_slab(check, slab, NULL);
        } else if (slab->owner.number == previous) {
            check_corruption(check, true,
                             "file slab %llu holds a piece of the VM state of snapshot '%s' for "
                             "the second time; "
                             "the first counts",
                             (unsigned long long)slab->slab, found->layer.name);
            ret = check_drop_slab(check, slab, NULL);
        } else {
            previous = slab->owner.number;
        }
    }
    return ret;
}

int check_state(struct check *check)
{
    struct check_slab **sorted;
    size_t count, at = 0;
    int ret = sort_by_owner(check, OWNER_STATE, &sorted, &count);

    /* Both lists are in order of layers. Slabs of dead layers are gone by now. */
    for (size_t i = 0; i < check->layer_count && ret == 0; i++) {
        size_t first = at;

        if (!check->layers[i].alive)
            continue;
        while (at < count && sorted[at]->owner.layer == check->layers[i].layer.id)
            at++;
        ret = check_pieces(check, &check->layers[i], sorted + first, at - first);
    }
    free(sorted);
    return ret;
}

/* ---- blocks of free slabs -------------------------------------------------------------------- */

/* Some file systems call everything data: then there is nothing to be learnt. */
static bool holes_are_known(const struct check *check)
{
    struct stat st;
    off_t hole = lseek(check->file.fd, 0, SEEK_HOLE);

    return hole >= 0 && fstat(check->file.fd, &st) == 0
        && ((uint64_t)hole < check->file.size || (uint64_t)st.st_blocks * 512 >= check->file.size);
}

/* Owned, or dealt with already. */
static bool is_known(const struct check *check, uint64_t slab)
{
    size_t low = 0, high = check->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (check->slabs[middle].slab < slab)
            low = middle + 1;
        else
            high = middle;
    }
    return low < check->count && check->slabs[low].slab == slab;
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
        if (slab_is_group_head(slab) || is_known(check, slab))
            continue;
        check_leak(check, "file slab %llu has blocks, but no owner", (unsigned long long)slab);
        ret = check_punch(check, slab << SLAB_BITS, PCOW_SLAB_SIZE);
        if (ret)
            return ret;
    }
    return 0;
}
