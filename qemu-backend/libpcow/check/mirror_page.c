/* SPDX-License-Identifier: BSD-3-Clause */
/* Pages of the mirror, and whether they are of the same moment as those of the metadata. */
#include "check/mirror_page.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/mirror.h"
#include "util/error.h"

uint64_t mirror_word(const struct check *check, const struct mirror_page *page, const void *content)
{
    return checksum_encode(CHECKSUM_VALID,
                           mirror_checksum(&check->file, page->group, page->number, content));
}

int mirror_read_page(struct check *check, uint64_t offset, void *content, bool *lost)
{
    int ret = file_read(&check->file, offset, content, PCOW_PAGE_SIZE);

    *lost = ret == -EIO;
    if (ret && !*lost)
        return error_set_errno(check->error, ret, "cannot read %s at offset %llu",
                               check->file.path, (unsigned long long)offset);
    if (*lost)
        memset(content, 0, PCOW_PAGE_SIZE);
    return 0;
}

int mirror_load_page(struct check *check, const struct mirror_group *group, unsigned number,
                     struct mirror_page *page)
{
    int ret;

    *page = (struct mirror_page){
        .group = group->number,
        .number = number,
        .word = group->words[number],
    };
    ret = mirror_read_page(check, mirror_page_offset(page), page->content, &page->content_is_lost);
    return ret ? ret
               : mirror_read_page(check, mirror_offset(group->number, number), page->copy,
                                  &page->copy_is_lost);
}

bool mirror_page_is_same(const struct mirror_page *page)
{
    return !page->content_is_lost && !page->copy_is_lost
           && memcmp(page->content, page->copy, sizeof page->copy) == 0;
}

bool mirror_page_is_contradicted(const struct check *check, const struct mirror_page *page)
{
    return mirror_page_is_same(page) && checksum_is(page->word, CHECKSUM_VALID)
           && page->word != mirror_word(check, page, page->content);
}

/*
 * Is the page of checksums one of an older moment? Then that of the header is another one, too, as
 * each writer counts the generation up; or there are two such pages. Else somebody has written the
 * same to a page and to its copy, or only a flag was set since (a pin): nobody can tell.
 */
int mirror_look_for_older_words(struct check *check, struct mirror_group *group)
{
    struct mirror_page *page = malloc(sizeof *page);
    int ret = page ? 0 : error_set(check->error, -ENOMEM, "out of memory");
    unsigned found = 0;

    for (unsigned number = 0; number < METADATA_PAGES && found < 2 && !ret; number++) {
        if (!metadata_page_counts(number) || !checksum_is(group->words[number], CHECKSUM_VALID))
            continue;
        ret = mirror_load_page(check, group, number, page);
        if (!ret && mirror_page_is_contradicted(check, page))
            found += group->number || number ? 1 : 2;
    }
    free(page);
    group->words_are_older = found >= 2;
    group->looked_for = true;
    return ret;
}

static bool read_generation(const void *content, uint64_t *generation)
{
    const struct header *header = content;

    *generation = word_value(header->generation);
    return header_fixed_is_good(header) && word_is_valid(header->generation);
}

/*
 * All of the mirror may be one of an older moment: it is one slab of the file. Then its copies and
 * its words agree, but the header counts more generations than its copy. Of a writer that was
 * killed the header does so, too; but he has marked it as stale before.
 */
int mirror_look_for_older_mirror(struct check *check, struct mirror_group *group)
{
    struct mirror_page *page = group->number ? NULL : malloc(sizeof *page);
    uint64_t now, then;
    int ret;

    if (group->number)
        return 0;
    ret = page ? mirror_load_page(check, group, 0, page)
               : error_set(check->error, -ENOMEM, "out of memory");
    group->mirror_is_older = !ret && !group->unordered && !page->content_is_lost
                             && !page->copy_is_lost
                             && page->word == mirror_word(check, page, page->copy)
                             && read_generation(page->content, &now)
                             && read_generation(page->copy, &then) && now > then;
    free(page);
    return ret;
}
