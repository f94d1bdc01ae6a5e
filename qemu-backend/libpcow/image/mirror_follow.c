/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/mirror_follow.h"

#include <errno.h>
#include <string.h>

#include "image/lost.h"
#include "image/mirror_words.h"
#include "persist/copy.h"

/* Of one call: who has taken the chain for that may be waited for. */
#define MOST_PAGES 16u
#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))

static bool is_followed(unsigned page)
{
    uint64_t offset = (uint64_t)page * PCOW_PAGE_SIZE;

    return offset >= BITMAP_OFFSET || (offset >= SLAB_TABLE_OFFSET && offset < LAYER_TABLE_OFFSET);
}

static void set_bit(uint64_t *bits, uint64_t bit)
{
    __atomic_fetch_or(&bits[bit / 64], UINT64_C(1) << bit % 64, __ATOMIC_SEQ_CST);
}

static void clear_bit(uint64_t *bits, uint64_t bit)
{
    __atomic_fetch_and(&bits[bit / 64], ~(UINT64_C(1) << bit % 64), __ATOMIC_SEQ_CST);
}

/* False: somebody stores, or what is there is not what is known. */
static bool read_page(struct file *file, const struct mirror_known *known, uint64_t group,
                      unsigned page, uint64_t content[WORDS_PER_PAGE])
{
    uint64_t offset = group * GROUP_SIZE + page * PCOW_PAGE_SIZE, there[WORDS_PER_PAGE];

    if (lost_is_in(file, offset, PCOW_PAGE_SIZE)
        || file_read(file, offset, content, PCOW_PAGE_SIZE))
        return false;
    memcpy(there, content, sizeof there);
    return known->put(known->opaque, group, page, content) == 0
           && memcmp(there, content, sizeof there) == 0;
}

/* The *stale* of a page that was taken: each time another one. */
static uint64_t taken_word(uint32_t number)
{
    return checksum_encode(CHECKSUM_STALE, number);
}

/*
 * Class pmem: where the copy has its blocks it is stored to, without a system call. A write would
 * be for the next commit of the file system, which a trap may be the first one to want.
 */
static int write_copy(struct file *file, uint64_t group, unsigned page,
                      const uint64_t content[WORDS_PER_PAGE])
{
    uint64_t to = mirror_offset(group, page);
    bool there = file->persist.persistence == PCOW_PERSISTENCE_PMEM
                 && !file_has_hole(file, to, PCOW_PAGE_SIZE)
                 && !lost_is_in(file, to, PCOW_PAGE_SIZE);
    void *where = there ? file_address(file, to) : NULL;

    /* A write mends what the medium cannot read. */
    return where && persist_copy(&file->persist, where, content, PCOW_PAGE_SIZE) == 0
               ? 0
               : file_write_data(file, to, content, PCOW_PAGE_SIZE);
}

/*
 * By this thread: a writer that was killed may have stored to the page what no cache of a CPU has
 * written yet.
 */
static int flush_page(struct file *file, uint64_t group, unsigned page)
{
    const void *where = file_address(file, group * GROUP_SIZE + page * PCOW_PAGE_SIZE);

    if (!where)
        return -errno;
    /* Is it still there? */
    return copy_touch(where) ? persist_range(&file->persist, where, PCOW_PAGE_SIZE) : -EIO;
}

static bool take_page(struct file *file, const struct mirror_known *known, uint64_t bit,
                      struct mirror_round *round)
{
    struct mirror_taken taken = {.group = bit / METADATA_PAGES,
                                 .page = (unsigned)(bit % METADATA_PAGES),
                                 .number = ++round->number ? round->number : ++round->number};
    uint64_t begun = __atomic_load_n(&file->stores_begun, __ATOMIC_SEQ_CST),
             content[WORDS_PER_PAGE], *word;

    if (__atomic_load_n(&file->stores_ended, __ATOMIC_SEQ_CST) != begun)
        return false;
    word = mirror_word_address(file, taken.group, taken.page);
    /* Something else was put there by somebody else. */
    if (!word || !checksum_is(__atomic_load_n(word, __ATOMIC_ACQUIRE), CHECKSUM_STALE)
        || !read_page(file, known, taken.group, taken.page, content))
        return false;
    taken.checksum = mirror_checksum(file, taken.group, taken.page, content);
    persist_word(&file->persist, word, taken_word(taken.number));
    clear_bit(file->marked, bit);
    /* Who had begun before may not have seen it. */
    if (__atomic_load_n(&file->stores_begun, __ATOMIC_SEQ_CST) != begun
        || write_copy(file, taken.group, taken.page, content)) {
        set_bit(file->marked, bit);
        return false;
    }
    set_bit(file->followed, bit);
    round->taken[round->count++] = taken;
    return true;
}

bool mirror_take_pages(struct file *file, const struct mirror_known *known,
                       struct mirror_round *round)
{
    unsigned looked_at = 0;

    /* Nothing tells any more which is right, memory or file. */
    if (__atomic_load_n(&file->unsure, __ATOMIC_RELAXED))
        return false;
    for (; round->next < MAX_GROUPS * METADATA_PAGES && round->count < MIRROR_ROUND_PAGES;
         round->next++) {
        uint64_t group = round->next / METADATA_PAGES;

        if (!(__atomic_load_n(&file->marked_groups[group / 64], __ATOMIC_ACQUIRE) >> group % 64
              & 1)) {
            round->next += METADATA_PAGES - 1;
            continue;
        }
        if (!(__atomic_load_n(&file->marked[round->next / 64], __ATOMIC_ACQUIRE)
                  >> round->next % 64
              & 1)
            || !is_followed((unsigned)(round->next % METADATA_PAGES)))
            continue;
        if (looked_at++ == MOST_PAGES)
            return true;
        round->left += !take_page(file, known, round->next, round);
    }
    return false;
}

/* The word is the one that was left there, or somebody has marked the page since. */
static int store_checksum(struct file *file, const struct mirror_taken *taken)
{
    uint64_t *word = mirror_word_address(file, taken->group, taken->page);
    int ret = word ? flush_page(file, taken->group, taken->page) : -errno;

    if (ret)
        return ret;
    return persist_word_if(&file->persist, word, taken_word(taken->number),
                           checksum_encode(CHECKSUM_VALID, taken->checksum))
               ? persist_range(&file->persist, word, sizeof *word)
               : 0;
}

int mirror_end_round(struct file *file, struct mirror_round *round)
{
    int ret = round->count ? file_settle(file) : 0;
    unsigned done = 0;

    if (!ret)
        persist_fence(&file->persist);
    while (done < round->count && !ret) {
        ret = store_checksum(file, &round->taken[done]);
        done += !ret;
    }
    /* Whatever its word says, it is stale. */
    for (unsigned i = done; ret && i < round->count; i++)
        set_bit(file->marked, round->taken[i].group * METADATA_PAGES + round->taken[i].page);
    round->count = 0;
    round->next = 0;
    return ret;
}
