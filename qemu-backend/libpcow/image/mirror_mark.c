/* SPDX-License-Identifier: BSD-3-Clause */
/* Before the first store to a page of metadata. */
#include <errno.h>

#include "image/mirror.h"
#include "image/mirror_words.h"

uint64_t *mirror_word_address(struct file *file, uint64_t group, unsigned page)
{
    uint64_t offset = mirror_offset(group, CHECKSUMS_PAGE) + page * sizeof(uint64_t);
    int ret = file_allocate_metadata(file, offset, sizeof(uint64_t));
    uint64_t *where = ret ? NULL : file_address(file, offset);

    if (where)
        ret = file_prepare_store(file, where, NULL, offset, sizeof(uint64_t));
    if (ret)
        errno = -ret;
    return ret ? NULL : where;
}

int mirror_store_word(struct file *file, uint64_t *where, uint64_t value, bool synced)
{
    uint64_t since = failures_count(&file->persist.failures);

    persist_word(&file->persist, where, value);
    return synced || file->persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE
               ? file_put_on_medium(file, where, sizeof *where, since)
               : 0;
}

/* Marks of this group may be lost from now on: on the medium before the first one is made. */
static int store_unordered(struct file *file, uint64_t group)
{
    uint64_t bit = UINT64_C(1) << group % 64, *where;
    int ret;

    if (__atomic_load_n(&file->unordered_groups[group / 64], __ATOMIC_ACQUIRE) & bit)
        return 0;
    where = mirror_word_address(file, group, CHECKSUMS_UNORDERED);
    ret = where ? mirror_store_word(file, where, word_encode(1), true) : -errno;
    if (!ret)
        __atomic_fetch_or(&file->unordered_groups[group / 64], bit, __ATOMIC_ACQ_REL);
    return ret;
}

void mirror_set_marked(struct file *file, uint64_t page)
{
    uint64_t group = page / (GROUP_SIZE / PCOW_PAGE_SIZE), bit = mirror_bit(page);

    __atomic_fetch_or(&file->marked_groups[group / 64], UINT64_C(1) << group % 64,
                      __ATOMIC_RELAXED);
    __atomic_fetch_or(&file->marked[bit / 64], UINT64_C(1) << bit % 64, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&file->marks, 1, __ATOMIC_SEQ_CST);
}

int mirror_mark_page(struct file *file, uint64_t page)
{
    uint64_t group = page / (GROUP_SIZE / PCOW_PAGE_SIZE);
    unsigned number = (unsigned)(page % METADATA_PAGES);
    int ret = file_grow(file, mirror_offset(group, METADATA_PAGES));
    uint64_t *where = ret ? NULL : mirror_word_address(file, group, number);

    if (!ret && !where)
        ret = -errno;
    if (!ret && file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        ret = store_unordered(file, group);
    if (!ret)
        ret = mirror_store_word(file, where, checksum_encode(CHECKSUM_STALE, 0), false);
    /* Not before: another thread stores to the page when it sees the bit. */
    if (!ret)
        mirror_set_marked(file, page);
    return ret;
}
