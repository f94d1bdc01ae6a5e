/* SPDX-License-Identifier: BSD-3-Clause */
/* A page of metadata, its copy in the mirror and its checksum, and what is known of its group. */
#ifndef PCOW_CHECK_MIRROR_PAGE_H
#define PCOW_CHECK_MIRROR_PAGE_H

#include "check/check.h"
#include "format/format2.h"

struct mirror_page {
    uint64_t group;
    unsigned number;
    uint64_t word;                     /* its checksum, as it is stored */
    uint8_t content[PCOW_PAGE_SIZE], copy[PCOW_PAGE_SIZE];
    bool content_is_lost, copy_is_lost;    /* the medium cannot read them */
};

/* What is known of a group of pages. */
struct mirror_group {
    uint64_t number;
    const uint64_t *words;
    bool unordered;
    bool order_is_unknown;             /* the word that says so is damaged */
    bool words_are_gone;               /* all of them: that is one damage */
    unsigned copies_gone;              /* of pages that hold something, with the words */
    bool words_are_older;              /* than pages and copies; once it was looked for */
    bool looked_for;
    bool mirror_is_older;              /* copies and words, than the pages */
    bool older_is_told;
};

static inline uint64_t mirror_page_offset(const struct mirror_page *page)
{
    return page->group * GROUP_SIZE + page->number * PCOW_PAGE_SIZE;
}

/* *lost: the medium cannot read it, and zeros stand for it. */
int mirror_read_page(struct check *check, uint64_t offset, void *content, bool *lost);
int mirror_load_page(struct check *check, const struct mirror_group *group, unsigned number,
                     struct mirror_page *page);
/* The word of a page that holds this. */
uint64_t mirror_word(const struct check *check, const struct mirror_page *page, const void *content);
bool mirror_page_is_same(const struct mirror_page *page);
/* The word is whole, and says something else than page and copy, which agree. */
bool mirror_page_is_contradicted(const struct check *check, const struct mirror_page *page);

/* Is the page of checksums, or all of the mirror, one of an older moment? Sets what it is about. */
int mirror_look_for_older_words(struct check *check, struct mirror_group *group);
int mirror_look_for_older_mirror(struct check *check, struct mirror_group *group);

#endif
