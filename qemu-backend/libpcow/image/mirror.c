/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/mirror.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "image/lock.h"
#include "image/mirror_words.h"
#include "util/crc.h"
#include "util/error.h"

#define MARKED_SIZE (MAX_GROUPS * METADATA_PAGES / 8)

/* A page whose copy was made, and which is to get its checksum. */
struct copied {
    uint64_t group;
    unsigned page;
    uint32_t checksum;
};

struct copies {
    struct copied *list;
    size_t count, capacity;
};

int mirror_attach(struct file *file, const struct header *header)
{
    memcpy(file->uuid, header->uuid, sizeof file->uuid);
    file->heads = header_heads(header);
    if (file->heads == 1 || !file->writable || file->marked)
        return 0;
    /* Two sets of bits. */
    file->marked = mmap(NULL, 2 * MARKED_SIZE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (file->marked == MAP_FAILED) {
        file->marked = NULL;
        return -ENOMEM;
    }
    file->followed = file->marked + MARKED_SIZE / sizeof *file->marked;
    return 0;
}

void mirror_detach(struct file *file)
{
    if (file->marked)
        munmap(file->marked, 2 * MARKED_SIZE);
    file->marked = file->followed = NULL;
}

uint32_t mirror_checksum(const struct file *file, uint64_t group, unsigned page,
                         const void *content)
{
    const uint64_t place[2] = {group, page};
    uint32_t crc = crc32c(file->uuid, sizeof file->uuid);

    return crc32c_of_more(crc32c_of_more(crc, place, sizeof place), content, PCOW_PAGE_SIZE);
}

const char *mirror_page_name(unsigned page)
{
    uint64_t offset = (uint64_t)page * PCOW_PAGE_SIZE;

    return offset >= BITMAP_OFFSET        ? "page of bitmaps"
           : offset >= LAYER_TABLE_OFFSET ? "page of layer records"
           : offset >= SLAB_TABLE_OFFSET  ? "page of the slab table"
           : page == 0                    ? "header"
                                          : "copy of the header";
}

/* ---- sync ------------------------------------------------------------------------------------ */

static bool group_is_marked(const struct file *file, uint64_t group)
{
    return file->marked_groups[group / 64] >> group % 64 & 1;
}

static int note_copied(struct copies *copies, struct copied copied)
{
    if (copies->count == copies->capacity) {
        size_t capacity = copies->capacity ? 2 * copies->capacity : 64;
        struct copied *list = realloc(copies->list, capacity * sizeof *list);

        if (!list)
            return -ENOMEM;
        copies->list = list;
        copies->capacity = capacity;
    }
    copies->list[copies->count++] = copied;
    return 0;
}

/*
 * A page that the kernel could not write counts as written from then on, see store_again.c: no sync
 * would put it on the medium before it gets its checksum.
 */
static bool may_be_lost(const struct file *file)
{
    return file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
           && failures_count(&file->persist.failures);
}

static void note_overwritten(struct file *file, uint64_t offset)
{
    if (!file->overwritten.pages++)
        file->overwritten.first = offset;
}

/*
 * Puts what is known in the place of what a page holds. Proof that this is what was stored: each
 * word of metadata that counts is changed in memory when its store has succeeded, and by nobody
 * else; no store has failed (*unsure*), and none is under way. If one has, nothing tells which of
 * both is right: -EIO, and the page stays stale. A page that the kernel could not write it may drop
 * and read again: then nobody has overwritten it, and the caller writes it anew.
 */
static int take_known(struct file *file, const struct mirror_known *known, uint64_t group,
                      unsigned page, uint64_t content[PCOW_PAGE_SIZE / sizeof(uint64_t)],
                      bool *overwritten)
{
    uint64_t offset = group * GROUP_SIZE + page * PCOW_PAGE_SIZE,
             found[PCOW_PAGE_SIZE / sizeof(uint64_t)];
    int ret;

    memcpy(found, content, sizeof found);
    ret = known->put(known->opaque, group, page, content);
    *overwritten = ret || memcmp(found, content, sizeof found);
    if (!*overwritten)
        return 0;
    if (!ret && __atomic_load_n(&file->unsure, __ATOMIC_RELAXED))
        ret = -EIO;
    if (!ret && may_be_lost(file)) {
        *overwritten = false;
        return 0;
    }
    note_overwritten(file, offset);
    file->overwritten.unsure |= ret != 0;
    return ret;
}

static int copy_page(struct file *file, const struct mirror_known *known, uint64_t group,
                     unsigned page, struct copies *copies)
{
    uint64_t from = group * GROUP_SIZE + page * PCOW_PAGE_SIZE, to = mirror_offset(group, page),
             content[PCOW_PAGE_SIZE / sizeof(uint64_t)];
    bool overwritten = false;
    int ret = file_read(file, from, content, sizeof content);

    if (!ret && known)
        ret = take_known(file, known, group, page, content, &overwritten);
    if (!ret && !overwritten && may_be_lost(file))
        ret = file_write(file, from, content, sizeof content);
    /* By a write, which mends what the medium cannot read; the caller settles it. */
    if (!ret)
        ret = file_write_data(file, to, content, sizeof content);
    return ret ? ret
               : note_copied(copies, (struct copied){
                                         .group = group,
                                         .page = page,
                                         .checksum = mirror_checksum(file, group, page, content),
                                     });
}

static bool has_checksum(const struct file *file, uint64_t group, unsigned page, uint64_t word)
{
    uint64_t content[PCOW_PAGE_SIZE / sizeof(uint64_t)];

    return file_read(file, group * GROUP_SIZE + page * PCOW_PAGE_SIZE, content, sizeof content) == 0
           && checksum_encode(CHECKSUM_VALID, mirror_checksum(file, group, page, content)) == word;
}

static bool was_followed(const struct file *file, uint64_t group, unsigned page)
{
    uint64_t bit = group * METADATA_PAGES + page;

    return __atomic_load_n(&file->followed[bit / 64], __ATOMIC_RELAXED) >> bit % 64 & 1;
}

/*
 * Is a page to be copied? All that are stale: another process may have marked some (a snapshot was
 * pinned). And all that we have marked: what else their words say somebody has put there, and the
 * older copy would be taken for right. With the new checksum that is put right. Those that were
 * followed as well, unless page and checksum agree: then the copy does too, and if memory says
 * something else, it is memory that was overwritten.
 */
static bool is_to_be_copied(struct file *file, uint64_t group, unsigned page, uint64_t word)
{
    bool stale = checksum_is(word, CHECKSUM_STALE);

    if (!metadata_page_counts(page))
        return false;
    if (was_followed(file, group, page) && checksum_is(word, CHECKSUM_VALID))
        return !has_checksum(file, group, page, word);
    if (stale
        || (!mirror_is_marked(file, group * (GROUP_SIZE / PCOW_PAGE_SIZE) + page)
            && !was_followed(file, group, page)))
        return stale;
    if (!may_be_lost(file))
        file->overwritten.checksums++;
    return true;
}

/* What cannot be copied stays stale, and the others are not: gives the first error. */
static int copy_group(struct file *file, const struct mirror_known *known, uint64_t group,
                      struct copies *copies)
{
    uint64_t words[METADATA_PAGES];
    int ret = file_read(file, mirror_offset(group, CHECKSUMS_PAGE), words, sizeof words);

    if (ret)
        return ret;
    for (unsigned page = 0; page < METADATA_PAGES; page++) {
        int failed = is_to_be_copied(file, group, page, words[page])
                         ? copy_page(file, known, group, page, copies)
                         : 0;

        if (!ret)
            ret = failed;
    }
    return ret;
}

static int store_checksums(struct file *file, const struct copies *copies)
{
    int ret = 0;

    for (size_t i = 0; i < copies->count && !ret; i++) {
        const struct copied *copied = &copies->list[i];
        uint64_t *where = mirror_word_address(file, copied->group, copied->page),
                 bit = copied->group * METADATA_PAGES + copied->page;

        ret = where ? mirror_store_word(file, where,
                                        checksum_encode(CHECKSUM_VALID, copied->checksum), false)
                    : -errno;
        /* Whoever stores to it again marks it again, also if the others fail. */
        if (!ret)
            __atomic_fetch_and(&file->marked[bit / 64], ~(UINT64_C(1) << bit % 64),
                               __ATOMIC_ACQ_REL);
    }
    return ret;
}

/* The marks of these are trusted again: each page has its checksum. */
static int store_ordered(struct file *file)
{
    int ret = 0;

    for (uint64_t group = 0; group < MAX_GROUPS && !ret; group++)
        if (group_is_marked(file, group)) {
            uint64_t *where = mirror_word_address(file, group, CHECKSUMS_UNORDERED);

            ret = !where ? -errno : *where ? mirror_store_word(file, where, 0, false) : 0;
        }
    memset(file->unordered_groups, 0, sizeof file->unordered_groups);
    return ret;
}

static int sync_marked(struct file *file, const struct mirror_known *known, struct copies *copies)
{
    bool cached = file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE;
    uint64_t since = failures_count(&file->persist.failures);
    int ret = 0;

    int failed = 0;

    for (uint64_t group = 0; group < MAX_GROUPS; group++) {
        int of_group = group_is_marked(file, group) ? copy_group(file, known, group, copies) : 0;

        if (!failed)
            failed = of_group;
    }
    if (!copies->count)
        return failed;
    /* Pages and copies, then checksums, then the word that says so: each is on the medium first. */
    ret = cached ? file_sync(file) : file_settle(file);
    if (!ret)
        ret = store_checksums(file, copies);
    if (!ret && cached)
        ret = file_sync(file);
    if (!ret && cached)
        ret = file_check_since(file, since);
    if (ret || failed)
        return ret ? ret : failed;
    return store_ordered(file);
}

static void forget_marks(struct file *file)
{
    for (uint64_t group = 0; group < MAX_GROUPS; group++)
        if (group_is_marked(file, group))
            for (unsigned w = 0; w < METADATA_PAGES / 64; w++)
                file->marked[group * METADATA_PAGES / 64 + w] =
                    file->followed[group * METADATA_PAGES / 64 + w] = 0;
    memset(file->marked_groups, 0, sizeof file->marked_groups);
}

bool mirror_is_settled(const struct file *file, uint64_t offset)
{
    uint64_t words[METADATA_PAGES];

    if (file->heads == 1
        || file_read(file, mirror_offset(offset / GROUP_SIZE, CHECKSUMS_PAGE), words, sizeof words)
        || checksums_are_unordered(words))
        return false;
    for (unsigned page = 0; page < METADATA_PAGES; page++)
        if (metadata_page_counts(page) && checksum_is(words[page], CHECKSUM_STALE))
            return false;
    return true;
}

int mirror_sync_alone(struct file *file, const struct mirror_known *known)
{
    struct copies copies = {0};
    int ret;

    if (!file->marked)
        return 0;
    ret = sync_marked(file, known, &copies);
    if (!ret)
        forget_marks(file);
    free(copies.list);
    return ret;
}

bool mirror_has_marked(const struct file *file)
{
    for (unsigned w = 0; file->marked && w < MAX_GROUPS / 64; w++)
        if (file->marked_groups[w])
            return true;
    return false;
}

int mirror_sync(struct file *file, const struct mirror_known *known)
{
    int ret;

    if (!mirror_has_marked(file))
        return 0;
    /* All that the guest has left to write: nobody has to wait for the tree meanwhile. */
    if (file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        file_sync(file);
    ret = lock_tree(file, true, NULL);
    if (ret)
        return ret;
    ret = mirror_sync_alone(file, known);
    unlock_tree(file);
    return ret;
}

int mirror_tell(const struct file *file, struct pcow_error *error)
{
    uint64_t first = file->overwritten.first;
    char checksums[80] = "";

    /* Checksums alone are right by now, and nobody has to do anything. */
    if (!file->overwritten.pages)
        return 0;
    if (file->overwritten.checksums)
        snprintf(checksums, sizeof checksums, "; %llu checksums as well, which were put right",
                 (unsigned long long)file->overwritten.checksums);
    return error_set(error, -EBADMSG,
                     "%s: %llu page%s of its metadata %s not what was stored there, the first one "
                     "(%s) at byte %llu: somebody else has written to the file while it was open; "
                     "%s%s",
                     file->path, (unsigned long long)file->overwritten.pages,
                     file->overwritten.pages == 1 ? "" : "s",
                     file->overwritten.pages == 1 ? "is" : "are",
                     mirror_page_name((unsigned)(first / PCOW_PAGE_SIZE % METADATA_PAGES)),
                     (unsigned long long)first,
                     file->overwritten.unsure
                         ? "what was there cannot be told, as a store to it has failed as well; "
                           "see pcow-img check"
                         : "pcow-img check tells what they held, and pcow-img check -r all puts "
                           "them right",
                     checksums);
}
