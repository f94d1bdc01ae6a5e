/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A page of metadata, its copy in the mirror, and its checksum: if one of them is damaged, the two
 * others agree, and it is put right from them. Every later step sees what they agreed on. A page
 * that is stale (its writer did not close the image) is left to these.
 */
#include "check/mirror_page.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/held.h"
#include "image/lock.h"
#include "image/mirror.h"
#include "util/error.h"

static bool is_empty(const void *content)
{
    static const uint8_t zeros[PCOW_PAGE_SIZE];

    return memcmp(content, zeros, sizeof zeros) == 0;
}

/* The first page from one on, of a slab, that may hold anything: its number. */
static unsigned next_page(const struct check *check, uint64_t slab_offset, unsigned number)
{
    uint64_t data = file_next_data(&check->file, slab_offset + number * PCOW_PAGE_SIZE,
                                   slab_offset + PCOW_SLAB_SIZE);

    return (unsigned)((data - slab_offset) / PCOW_PAGE_SIZE);
}

/* The page is what the mirror has. */
static int restore(struct check *check, const struct mirror_page *page)
{
    int ret = 0;

    /*
     * Not by a store, which marks the page as stale: if this is interrupted, the mirror must still
     * count. And what the medium cannot read is mended by a write only.
     */
    if (check->repair)
        ret = file_write(&check->file, mirror_page_offset(page), page->copy, sizeof page->copy);
    if (!ret && check->repair)
        ret = file_commit(&check->file);
    return ret ? error_set_errno(check->error, ret, "cannot repair %s at offset %llu",
                                 check->file.path, (unsigned long long)mirror_page_offset(page))
               : check_overlay(check, mirror_page_offset(page));
}

/* It is copied again at the end, see mirror_sync(). */
static int make_stale(struct check *check, const struct mirror_page *page)
{
    uint64_t number = mirror_page_offset(page) / PCOW_PAGE_SIZE;
    int ret = check->repair ? mirror_mark_page(&check->file, number) : 0;

    return ret ? error_set_errno(check->error, ret, "cannot repair the mirror of %s",
                                 check->file.path)
               : 0;
}

/* Pages of data that only the page names, and not its copy: of a page of bitmaps. */
static unsigned count_more(const struct mirror_page *page)
{
    const size_t set = sizeof(struct page_set);
    unsigned more = 0;

    for (size_t at = 0; at < PCOW_PAGE_SIZE && !page->content_is_lost; at += set) {
        struct page_set valid, known;

        memcpy(&valid, page->content + at, set);
        memcpy(&known, page->copy + at, set);
        for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
            valid.word[w] &= ~known.word[w];
        more += page_set_count(&valid);
    }
    return page->number * PCOW_PAGE_SIZE >= BITMAP_OFFSET ? more : 0;
}

/*
 * The mirror and the checksum have what the writer's memory said: a bit that was wrong there is in
 * both, and the page may be what is right.
 */
static int restore_page(struct check *check, const struct mirror_page *page)
{
    unsigned more = count_more(page);
    char held[700], outcome[120] = "and nothing is lost";
    int ret = restore(check, page);

    /* What it held is told by the copy, which all steps read from now on. */
    if (!ret)
        ret = held_by_page(check, page->group, page->number, held, sizeof held);
    if (ret)
        return ret;
    if (more)
        snprintf(outcome, sizeof outcome,
                 "and counts; the page names %u pages of data that it does not", more);
    check_corruption(check, true,
                     "the %s at byte %llu %s; its mirror is whole, %s%s%s",
                     mirror_page_name(page->number), (unsigned long long)mirror_page_offset(page),
                     page->content_is_lost ? "cannot be read" : "is damaged", outcome,
                     *held ? ": it holds " : "", held);
    return 0;
}

/* Page, copy and checksum: no two of them agree. */
static int keep_as_it_is(struct check *check, const struct mirror_page *page)
{
    char held[700];
    int ret = held_by_page(check, page->group, page->number, held, sizeof held);

    if (ret)
        return ret;
    check_set_unproven(check, page->group, page->number);
    check_corruption(check, true,
                     "the %s at byte %llu and its mirror are both damaged, or its checksum and one "
                     "of them: what it says is taken as it is%s%s",
                     mirror_page_name(page->number), (unsigned long long)mirror_page_offset(page),
                     *held ? ": it holds " : "", held);
    ret = check_lose_unknown(check);
    return ret ? ret : make_stale(check, page);
}

/* Nothing of it is put in the place of what came later. */
static int keep_what_is_newer(struct check *check, const struct mirror_page *page, struct mirror_group *group)
{
    check_set_unproven(check, page->group, page->number);
    if (!group->older_is_told)
        check_corruption(check, true,
                         "the mirror at byte %llu is of an older moment than the metadata, which "
                         "counts",
                         (unsigned long long)mirror_offset(group->number, 0));
    group->older_is_told = true;
    return make_stale(check, page);
}

/* The end of a file that was cut, and is longer again: behind it there is nothing but a hole. */
static void note_end(struct check *check, const struct mirror_page *page)
{
    uint64_t at = mirror_offset(page->group, page->number);

    if (!page->group && !page->copy_is_lost && is_empty(page->copy)
        && file_next_data(&check->file, at, check->length) >= check->length)
        check->is_cut = true;
}

static bool is_header(const struct mirror_page *page)
{
    return !page->group && page->number * PCOW_PAGE_SIZE < SLAB_TABLE_OFFSET;
}

/*
 * The word cannot tell: what page and copy agree on is right, and an empty copy is none. A header
 * is judged by the words in it, and a writer that was killed has raised its generation.
 */
static int check_without_words(struct check *check, const struct mirror_page *page,
                               struct mirror_group *group)
{
    if (mirror_page_is_same(page) || (!page->content_is_lost && is_header(page)))
        check->checksums_damaged++;
    else if (page->content_is_lost || page->copy_is_lost || !is_empty(page->copy))
        return keep_as_it_is(check, page);
    else {
        note_end(check, page);
        group->copies_gone++;
    }
    return make_stale(check, page);
}

/* Of a page of bitmaps: no slab that it is about has an owner. */
static bool is_of_nobody(struct check *check, uint64_t first_slab)
{
    uint64_t words[SLABS_PER_TABLE_PAGE];

    if (check_read(check, owner_offset(first_slab), words, sizeof words))
        return false;
    for (unsigned i = 0; i < SLABS_PER_TABLE_PAGE; i++)
        if (words[i])
            return false;
    return true;
}

/* The header, by itself or by its copy, counts no record that is in this page or behind it. */
static bool is_behind_records(struct check *check, unsigned number)
{
    const uint64_t first = (number * PCOW_PAGE_SIZE - LAYER_TABLE_OFFSET) / LAYER_RECORD_SIZE;
    struct header header, copy;

    return !check_read(check, 0, &header, sizeof header)
           && !check_read(check, HEADER_COPY_OFFSET, &copy, sizeof copy)
           && word_is_valid(header.layer_slots) && word_is_valid(copy.layer_slots)
           && header.layer_slots && word_value(header.layer_slots) <= first
           && word_value(copy.layer_slots) <= first;
}

/*
 * Nobody of ours has stored to the page: what it is about is not there. What it holds is somebody
 * else's, if neither word nor copy knows of it.
 */
static bool is_unused(struct check *check, const struct mirror_page *page)
{
    const uint64_t offset = page->number * PCOW_PAGE_SIZE, first = page->group * SLABS_PER_GROUP;

    if (offset >= BITMAP_OFFSET)
        return is_of_nobody(check, first + (offset - BITMAP_OFFSET) / sizeof(struct page_set));
    if (offset >= LAYER_TABLE_OFFSET)
        return is_behind_records(check, page->number);
    return offset >= SLAB_TABLE_OFFSET
           && (first + (offset - SLAB_TABLE_OFFSET) / sizeof(uint64_t)) << SLAB_BITS
                  >= check->length;
}

/*
 * Neither word nor copy knows of the page. It was never stored to; or both are gone, and it is
 * right.
 */
static int check_without_witness(struct check *check, const struct mirror_page *page)
{
    if (is_unused(check, page))
        return restore_page(check, page);
    check_set_unproven(check, page->group, page->number);
    check->checksums_damaged++;
    return make_stale(check, page);
}

/* The copy is not what page and word agree on, unless both are of an older moment. */
static int mend_copy(struct check *check, const struct mirror_page *page,
                     struct mirror_group *group)
{
    if (page->word && !page->copy_is_lost && !is_empty(page->copy) && !group->looked_for) {
        int ret = mirror_look_for_older_words(check, group);

        if (ret)
            return ret;
    }
    if (group->words_are_older && !page->copy_is_lost)
        return keep_as_it_is(check, page);
    if (!page->word)
        check_set_unproven(check, page->group, page->number);
    note_end(check, page);
    check_corruption(check, true, "the mirror of the %s at byte %llu is damaged",
                     mirror_page_name(page->number), (unsigned long long)mirror_page_offset(page));
    return make_stale(check, page);
}

static int check_page(struct check *check, const struct mirror_page *page, struct mirror_group *group)
{
    /* A page that was never stored to is zeros; but no word is no vote against what it holds. */
    bool never = page->word == 0 && !page->content_is_lost && is_empty(page->content);
    bool page_fits = never
                     || (!page->content_is_lost
                         && page->word == mirror_word(check, page, page->content)),
         copy_fits = !page->copy_is_lost
                     && (never ? is_empty(page->copy)
                               : page->word == mirror_word(check, page, page->copy));

    if (page_fits && copy_fits)
        return 0;
    if (checksum_is(page->word, CHECKSUM_STALE) || group->unordered) {
        check_set_unproven(check, page->group, page->number);
        return page->content_is_lost ? 0 : make_stale(check, page);
    }
    if (group->words_are_gone)
        return check_without_words(check, page, group);
    if (page_fits)
        return mend_copy(check, page, group);
    if (group->mirror_is_older && !page->content_is_lost)
        return keep_what_is_newer(check, page, group);
    if (copy_fits && !group->order_is_unknown)
        return restore_page(check, page);
    if (!page->word && !page->content_is_lost && !page->copy_is_lost
        && (is_empty(page->copy) || is_header(page)))
        return check_without_witness(check, page);
    if (mirror_page_is_contradicted(check, page) && !group->looked_for) {
        int ret = mirror_look_for_older_words(check, group);

        if (ret)
            return ret;
    }
    if (mirror_page_is_same(page)
        && (!mirror_page_is_contradicted(check, page) || group->words_are_older)) {
        check->checksums_damaged++;
        return make_stale(check, page);
    }
    return keep_as_it_is(check, page);
}

static int load_and_check(struct check *check, struct mirror_group *group, unsigned number,
                          struct mirror_page *page)
{
    int ret = mirror_load_page(check, group, number, page);

    return ret ? ret : check_page(check, page, group);
}

/*
 * That the mirror is older is told by the header: it becomes stale last, for a repair that is
 * interrupted to know it again.
 */
static int check_pages(struct check *check, struct mirror_group *group)
{
    struct mirror_page *page = malloc(sizeof *page);
    int ret = page ? mirror_look_for_older_mirror(check, group)
                   : error_set(check->error, -ENOMEM, "out of memory");

    for (unsigned number = 0, there = 0, copied = 0; number < METADATA_PAGES && !ret; number++) {
        there = there < number ? next_page(check, group->number * GROUP_SIZE, number) : there;
        copied =
            copied < number ? next_page(check, mirror_offset(group->number, 0), number) : copied;
        if (!metadata_page_counts(number) || (number == 0 && group->mirror_is_older)
            || (!group->words[number] && there > number && copied > number))
            continue;
        ret = load_and_check(check, group, number, page);
    }
    if (!ret && group->mirror_is_older)
        ret = load_and_check(check, group, 0, page);
    free(page);
    return ret;
}

/*
 * The words of places that have no page. If the one that says *unordered* may have said so, it does
 * from now on: a repair that is interrupted must know it again, and its end takes that away.
 */
static int check_gap(struct check *check, const struct mirror_group *group)
{
    const uint64_t unordered = group->unordered || group->order_is_unknown ? word_encode(1) : 0,
                   *words = group->words, at = mirror_offset(group->number, CHECKSUMS_PAGE);
    int ret = 0;

    for (unsigned i = METADATA_GAP_FIRST; i < METADATA_GAP_END && !ret; i++) {
        bool good = i == CHECKSUMS_UNORDERED ? word_is_valid(words[i]) && word_value(words[i]) <= 1
                                             : words[i] == 0;

        if (good)
            continue;
        check->checksums_damaged++;
        ret = check_store64(check, at + i * sizeof *words,
                            i == CHECKSUMS_UNORDERED ? unordered : 0);
    }
    return ret;
}

/* What one bit makes of a word that says 0 or 1 is known still. */
static void look_at_order(struct mirror_group *group)
{
    uint64_t word = group->words[CHECKSUMS_UNORDERED], other = word ^ word_encode(1);

    group->unordered = !(other & (other - 1));
    group->order_is_unknown = !group->unordered && word & (word - 1);
}

static void look_at_words(struct mirror_group *group)
{
    look_at_order(group);
    group->words_are_gone = true;
    for (unsigned number = 0; number < METADATA_PAGES; number++)
        if (metadata_page_counts(number) && group->words[number])
            group->words_are_gone = false;
}

/* Nothing speaks for what the metadata of a group says, or for what is missing of it. */
static void tell_mirror_is_gone(struct check *check, const struct mirror_group *group)
{
    for (unsigned number = 0; number < METADATA_PAGES; number++)
        check_set_unproven(check, group->number, number);
    check->mirror_is_gone = true;
    check_corruption(check, true,
                     "the mirror at byte %llu is gone, with the checksums of metadata: what the "
                     "metadata says is taken as it is",
                     (unsigned long long)mirror_offset(group->number, 0));
}

static int check_group(struct check *check, uint64_t group)
{
    uint64_t words[METADATA_PAGES], at = mirror_offset(group, CHECKSUMS_PAGE);
    struct mirror_group of = {.number = group, .words = words};
    bool lost;
    int ret = mirror_read_page(check, at, words, &lost);

    if (ret)
        return ret;
    check->checksums_damaged = lost;
    /* Nothing can be stored to it before it is written: 0 is no vote. */
    if (lost && check->repair
        && ((ret = file_write(&check->file, at, words, sizeof words))
            || (ret = file_commit(&check->file))))
        return error_set_errno(check->error, ret, "cannot repair the mirror of %s",
                               check->file.path);
    look_at_words(&of);
    ret = check_gap(check, &of);
    if (!ret)
        ret = check_pages(check, &of);
    if (!ret && of.copies_gone)
        tell_mirror_is_gone(check, &of);
    else if (!ret && check->checksums_damaged)
        check_corruption(check, true, "the checksums of metadata at byte %llu are damaged",
                         (unsigned long long)at);
    return ret;
}

static int check_all(struct check *check)
{
    uint64_t groups = check->file.size / GROUP_SIZE + 1;
    int ret = 0;

    check->unproven = calloc(groups, METADATA_PAGES / 8);
    if (!check->unproven)
        return error_set(check->error, -ENOMEM, "out of memory");

    for (uint64_t group = 0; !ret && mirror_offset(group, METADATA_PAGES) <= check->file.size;
         group++)
        ret = check_group(check, group);
    return ret;
}

/* The first page that is damaged, of those that nobody is changing. */
static int look_beside_writer(struct check *check)
{
    struct pcow_error problem;
    uint64_t damaged;
    int ret = lock_tree(&check->file, false, check->error);

    if (ret)
        return ret;
    ret = mirror_verify_held(&check->file, &damaged, &problem);
    unlock_tree(&check->file);
    if (ret != -EBADMSG) {
        if (ret)
            *check->error = problem;
        return ret;
    }
    check->result->corruptions_certain++;
    check_corruption(check, true, "the %s at byte %llu is damaged, or its checksum",
                     damaged % GROUP_SIZE < PCOW_SLAB_SIZE
                         ? mirror_page_name((unsigned)(damaged / PCOW_PAGE_SIZE % METADATA_PAGES))
                         : "page of checksums of metadata",
                     (unsigned long long)damaged);
    return 0;
}

int check_mirror(struct check *check)
{
    struct header header[4] = {0};         /* and its copy, and those of both in the mirror */
    const struct header *good = NULL;
    int ret = check_read(check, 0, header, 2 * sizeof *header);

    if (!ret)
        ret = check_read(check, mirror_offset(0, 0), &header[2], 2 * sizeof *header);
    for (unsigned i = 0; i < 4 && !ret && !good; i++)
        if (header_fixed_is_good(&header[i])
            && (i < 2 || header[i].read_only_compatible_features & FEATURE_MIRROR))
            good = &header[i];
    /* What neither tells is refused by the next step. */
    if (ret || !good || good->read_only_compatible_features & ~FEATURES_KNOWN)
        return ret;
    if (mirror_attach(&check->file, good))
        return error_set(check->error, -ENOMEM, "out of memory");
    if (check->file.heads == 1)
        return 0;
    if (check->unlocked)
        return look_beside_writer(check);
    /* Who repairs has the tree already. */
    if (check->file.writable)
        return check_all(check);
    ret = lock_tree(&check->file, false, check->error);
    if (!ret) {
        ret = check_all(check);
        unlock_tree(&check->file);
    }
    return ret;
}

/* What is left of the mirror goes; each page that may hold anything is to be copied to it. */
static int make_mirror(struct check *check, uint64_t group)
{
    int ret = check_punch(check, mirror_offset(group, 0), PCOW_SLAB_SIZE);

    for (unsigned number = 0; number < METADATA_PAGES && !ret; number++) {
        struct mirror_page page = {.group = group, .number = number};

        if (metadata_page_counts(number)
            && next_page(check, group * GROUP_SIZE, number) == number)
            ret = make_stale(check, &page);
    }
    return ret;
}

/* A group whose mirror lay behind the end of file, or a part of it, gets it anew. */
int check_cut_mirror(struct check *check)
{
    int ret = 0;

    for (uint64_t group = check->length / GROUP_SIZE;
         check->repair && check->file.heads > 1 && !ret && group * GROUP_SIZE < check->file.size;
         group++)
        if (mirror_offset(group, METADATA_PAGES) > check->length)
            ret = make_mirror(check, group);
    return ret;
}
