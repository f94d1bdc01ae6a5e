/* SPDX-License-Identifier: BSD-3-Clause */
/* What the layers own: slabs of the dead, empty ones, pages held twice. */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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
        if (found && found->doubtful) {
            const struct owner owner = slab->owner;

            check_corruption(check, true,
                             "file slab %llu belongs to layer %u, of which a damaged word told "
                             "whether it is deleted",
                             (unsigned long long)slab->slab, owner.layer);
            ret = check_drop_slab(check, slab, &owner);
            continue;
        }
        check_leak(check, "file slab %llu belongs to layer %u, which is deleted",
                   (unsigned long long)slab->slab, slab->owner.layer);
        ret = check_drop_slab(check, slab, NULL);
    }
    return ret;
}

/* Of the newest layer. A template has none. */
static bool is_stored_to(const struct check *check, const struct check_slab *slab)
{
    return slab->owner.layer == (uint32_t)word_value(check->header.active_layer)
           && !(word_value(check->header.state) & HEADER_SEALED);
}

/*
 * What a slab is whose bitmap names no page, and which holds something. A writer that is killed in
 * its first store there leaves that, or in a commit, in the newest layer. So does a host crash in
 * class page-cache, where it may keep the owner word of a first store and lose the bitmap. Or the
 * bitmap is what was lost: of a snapshot or a template, which were flushed.
 */
static enum check_doubt doubt_of(const struct check *check, const struct check_slab *slab)
{
    if (!is_stored_to(check, slab))
        return DOUBT_LOST;
    if (check->file.heads >= MIRROR_HEADS)
        return check->mirror_is_gone ? DOUBT_LOST : DOUBT_NONE;
    return check->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE ? DOUBT_UNFLUSHED
                                                                          : DOUBT_LOST;
}

/* From its page on the file has nothing but a hole: its end is missing. */
static bool is_cut_before(const struct check *check, uint64_t offset)
{
    return file_next_data(&check->file, offset / PCOW_PAGE_SIZE * PCOW_PAGE_SIZE, check->length)
           >= check->length;
}

/*
 * Nor does it hold anything. A guest's first store to a slab names a page before it names the
 * owner: so the bitmap is lost, and in a copy whose end is missing the content as well. But a power
 * cut in class page-cache may leave that, and so did repairs of older versions.
 */
static int check_slab_without_content(struct check *check, struct check_slab *slab)
{
    enum check_doubt doubt = doubt_of(check, slab);
    struct page_set all;
    int ret;

    if (doubt != DOUBT_LOST || check_is_proven(check, bitmap_offset(slab->slab))
        || (!check->mirror_is_gone && !is_cut_before(check, bitmap_offset(slab->slab))))
        return 0;
    check_doubtful(check, doubt,
                   "file slab %llu (guest bytes from %llu of layer %u) has no content, and its "
                   "bitmap names none: what a host crash left of a first store that was not "
                   "flushed, or both were lost",
                   (unsigned long long)slab->slab,
                   (unsigned long long)slab->owner.number << SLAB_BITS, slab->owner.layer);
    memset(&all, 0xff, sizeof all);
    ret = check_lose_pages(check, slab->slab, slab->owner, &all, PCOW_AT_MOST);
    return ret ? ret : check_drop_slab(check, slab, NULL);
}

/* In a copy whose end is missing: what the bitmap names is a hole. */
static int check_cut_content(struct check *check, struct check_slab *slab)
{
    const struct owner owner = slab->owner;

    if (!is_cut_before(check, slab->slab << SLAB_BITS))
        return 0;
    check_corruption(check, true,
                     "file slab %llu (%s %llu of layer %u) lies behind the end of what is left of "
                     "the file: it was cut short, and made longer",
                     (unsigned long long)slab->slab,
                     owner.kind == OWNER_DATA ? "guest bytes from" : "VM state from byte",
                     (unsigned long long)owner.number << SLAB_BITS, owner.layer);
    /* What is missing of VM state is counted where it is missed. */
    return check_drop_slab(check, slab, owner.kind == OWNER_DATA ? &owner : NULL);
}

static int check_empty_slab(struct check *check, struct check_slab *slab)
{
    struct page_set pages;
    bool had_pages;
    int ret = check_bitmap(check, slab->slab, &pages);

    if (ret)
        return ret;
    if (!page_set_empty(&pages))
        return check->is_cut && !check->only_gone ? check_cut_content(check, slab) : 0;
    had_pages = !is_stored_to(check, slab) && check_had_pages(check, slab->slab);
    if (check->only_gone && !had_pages)
        return 0;
    check_content(check, slab->slab, &pages);
    if (page_set_empty(&pages))
        return check->only_gone ? 0 : check_slab_without_content(check, slab);
    check->gone += had_pages;
    check_doubtful(check, doubt_of(check, slab),
                   "file slab %llu (guest bytes from %llu of layer %u) has %u pages of content, "
                   "and its bitmap names none: what a host crash left of a first store that was "
                   "not flushed, or the bitmap was lost",
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
        const struct check_layer *found =
            slab->owner.kind == OWNER_DATA ? check_find_layer(check, slab->owner.layer) : NULL;

        if (check->is_cut && slab->owner.kind == OWNER_STATE)
            ret = check_cut_content(check, slab);
        /* A deletion takes pages out of hidden layers. */
        if (!ret && found && found->alive && found->layer.state != LAYER_HIDDEN)
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

int check_sort_by_owner(struct check *check, enum owner_kind kind, struct check_slab ***sorted,
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
        struct check_slab *slab = *--last;
        struct page_set valid, twice = {{0}};
        int ret = check_bitmap(check, slab->slab, &valid);
        bool all = true;

        if (ret)
            return ret;
        for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
            twice.word[w] = seen.word[w] & valid.word[w];
            seen.word[w] |= valid.word[w];
            all &= twice.word[w] == valid.word[w];
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
        ret = all ? check_raise_generation(check)
                  : clear_pages(check, slab->slab, &valid, &twice);
        if (!ret && all)
            ret = check_drop_slab(check, slab, NULL);
        if (ret)
            return ret;
    }
    return 0;
}

int check_overlaps(struct check *check)
{
    struct check_slab **sorted;
    size_t count;
    int ret;

    if (check_is_amending(check))
        return 0;
    ret = check_sort_by_owner(check, OWNER_DATA, &sorted, &count);
    for (size_t i = 0, end; ret == 0 && i < count; i = end) {
        for (end = i + 1; end < count && same_owner(sorted[i], sorted[end]); end++)
            ;
        if (end - i > 1)
            ret = check_group(check, sorted + i, sorted + end);
    }
    free(sorted);
    return ret;
}
