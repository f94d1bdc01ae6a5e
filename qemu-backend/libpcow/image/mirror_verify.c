/* SPDX-License-Identifier: BSD-3-Clause */
/* Has each page of metadata its checksum? */
#include <errno.h>
#include <stdlib.h>

#include "image/lock.h"
#include "image/mirror.h"
#include "image/mirror_words.h"
#include "util/error.h"

/* What is looked at of a group. */
struct verified {
    uint64_t group;
    uint64_t words[METADATA_PAGES];
    bool unordered;                    /* a crash may have lost marks, or stored pages without */
    uint64_t there;                    /* offset of the next page that may hold anything */
    uint64_t damaged;                  /* offset of the page that is, or of the one of checksums */
};

/*
 * Since the words were read: a writer changes the word of a page before it stores to the page.
 */
static bool is_stored_to(const struct file *file, const struct verified *v, unsigned page)
{
    uint64_t word;

    return !file_read(file, mirror_offset(v->group, CHECKSUMS_PAGE) + page * sizeof word, &word,
                      sizeof word)
           && word != v->words[page];
}

/* Who has made it may have been killed before it was on the medium. */
static int adopt_mark(struct file *file, uint64_t group, unsigned page, struct pcow_error *error)
{
    bool pmem = file->persist.persistence == PCOW_PERSISTENCE_PMEM;
    uint64_t *where = pmem ? mirror_word_address(file, group, page) : NULL;

    if (pmem && !where)
        return error_set_errno(error, -errno, "%s: cannot map the checksums of its metadata",
                               file->path);
    if (where)
        persist_range(&file->persist, where, sizeof *where);
    mirror_set_marked(file, group * (GROUP_SIZE / PCOW_PAGE_SIZE) + page);
    return 0;
}

static int verify_page(struct file *file, struct verified *v, unsigned page,
                       struct pcow_error *error)
{
    static const uint8_t zeros[PCOW_PAGE_SIZE];
    uint8_t content[PCOW_PAGE_SIZE];
    uint64_t offset = v->group * GROUP_SIZE + page * PCOW_PAGE_SIZE, word = v->words[page];
    int ret;

    if (v->there < offset)
        v->there = file_next_data(file, offset, v->group * GROUP_SIZE + PCOW_SLAB_SIZE);
    if (checksum_is(word, CHECKSUM_STALE))
        return file->marked ? adopt_mark(file, v->group, page, error) : 0;
    /* Copies may be others than their pages say, too: all are made anew. */
    if (v->unordered)
        return file->marked && (word || v->there == offset)
                   ? mirror_mark_page(file, offset / PCOW_PAGE_SIZE)
                   : 0;
    if (!word)
        return 0;
    /* Once more: it may have been stored to and be what it was, as by a writer that is followed. */
    for (unsigned tries = 0; tries < 2; tries++) {
        ret = v->there == offset ? file_read(file, offset, content, sizeof content) : 0;
        if (ret)
            return error_set_errno(error, ret, "%s: cannot read its %s at byte %llu", file->path,
                                   mirror_page_name(page), (unsigned long long)offset);
        if (checksum_encode(CHECKSUM_VALID, mirror_checksum(file, v->group, page,
                                                            v->there == offset ? content : zeros))
                == word
            || is_stored_to(file, v, page))
            return 0;
    }
    v->damaged = offset;
    return error_set(error, -EBADMSG,
                     "%s: its %s at byte %llu, or the checksum of that, is damaged; pcow-img check "
                     "tells what it held; copy the file, then pcow-img check -r all puts it right",
                     file->path, mirror_page_name(page), (unsigned long long)offset);
}

static int verify_group(struct file *file, struct verified *v, struct pcow_error *error)
{
    int ret = file_read(file, mirror_offset(v->group, CHECKSUMS_PAGE), v->words, sizeof v->words);

    if (ret)
        return error_set_errno(error, ret, "%s: cannot read the checksums of its metadata",
                               file->path);
    v->unordered = checksums_are_unordered(v->words);
    if (v->unordered && v->words[CHECKSUMS_UNORDERED] != word_encode(1)) {
        v->damaged = mirror_offset(v->group, CHECKSUMS_PAGE);
        return error_set(error, -EBADMSG,
                         "%s: the checksums of its metadata are damaged; copy the file, then "
                         "pcow-img check -r all makes them anew",
                         file->path);
    }
    v->there = 0;
    for (unsigned page = 0; page < METADATA_PAGES && !ret; page++)
        if (metadata_page_counts(page))
            ret = verify_page(file, v, page, error);
    if (!ret && v->group == 0 && !v->words[0]) {
        v->damaged = mirror_offset(0, CHECKSUMS_PAGE);
        ret = error_set(error, -EBADMSG,
                        "%s: the checksums of its metadata are gone; copy the file, then pcow-img "
                        "check -r all makes them anew",
                        file->path);
    }
    return ret;
}

int mirror_verify_held(struct file *file, uint64_t *damaged, struct pcow_error *error)
{
    struct verified *v;
    int ret = 0;

    if (file->heads == 1)
        return 0;
    v = malloc(sizeof *v);
    if (!v)
        return error_set(error, -ENOMEM, "out of memory");
    for (v->group = 0; mirror_offset(v->group, METADATA_PAGES) <= file->size && !ret; v->group++)
        ret = verify_group(file, v, error);
    if (damaged && ret == -EBADMSG)
        *damaged = v->damaged;
    free(v);
    return ret;
}

int mirror_verify(struct file *file, struct pcow_error *error)
{
    int ret;

    if (file->heads == 1)
        return 0;
    /* Who marks a snapshot has no other lock. */
    ret = lock_tree(file, false, error);
    if (!ret) {
        ret = mirror_verify_held(file, NULL, error);
        unlock_tree(file);
    }
    return ret;
}
