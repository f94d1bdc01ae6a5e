/* SPDX-License-Identifier: BSD-3-Clause */
/* Stores to the metadata of a file. */
#include "image/store.h"

#include <errno.h>

#include "image/datasum.h"
#include "image/mirror.h"

int file_store64_at(struct file *file, uint64_t *where, uint64_t offset, uint64_t value,
                    bool lazily)
{
    uint64_t old = *where, since = failures_count(&file->persist.failures);
    int ret;

    if (lazily && file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE) {
        persist_word(&file->persist, where, value);
        return 0;
    }
    persist_word(&file->persist, where, value);
    ret = file_put_on_medium(file, where, sizeof *where, since);
    /*
     * What is reported as failed must not take effect later. If that cannot be stored either, the
     * file system takes nothing more.
     */
    if (ret && file_prepare_store(file, where, NULL, offset, sizeof *where) == 0)
        persist_word(&file->persist, where, old);
    return ret;
}

/* Who changes several things may have gone on to the next one in memory. */
static void *fail_to_store(struct file *file, int ret)
{
    file_become_unsure(file);
    errno = -ret;
    return NULL;
}

static void *address_to_store(struct file *file, uint64_t offset, size_t length)
{
    void *where;
    int ret = file_allocate_metadata(file, offset, length);

    if (!ret)
        ret = mirror_mark(file, offset, length);
    if (!ret && file->summed)
        ret = datasum_drop_for(file, offset, length);
    if (ret)
        return fail_to_store(file, ret);
    where = file_address(file, offset);
    ret = where ? file_prepare_store(file, where, NULL, offset, length) : -errno;
    return ret ? fail_to_store(file, ret) : where;
}

int file_store64(struct file *file, uint64_t offset, uint64_t value, bool lazily)
{
    uint64_t *where;
    int ret;

    mirror_begin_store(file);
    where = address_to_store(file, offset, sizeof value);
    ret = where ? file_store64_at(file, where, offset, value, lazily) : -errno;
    mirror_end_store(file);
    return ret;
}

int file_touch(struct file *file, uint64_t offset)
{
    uint64_t *word = file_address(file, offset), value;
    int ret = word ? file_prepare_store(file, word, NULL, offset, sizeof *word) : -errno;

    if (ret)
        return ret;
    value = __atomic_load_n(word, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(word, &value, value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    return 0;
}

int file_sync_range(struct file *file, uint64_t offset, size_t length, uint64_t since)
{
    void *where = file_address(file, offset);
    int ret = -errno;

    /* It was stored, and whoever asked for that takes it for not done. */
    if (!where) {
        file_become_unsure(file);
        return ret;
    }
    return file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
               ? file_put_on_medium(file, where, length, since)
               : 0;
}

static int store_lazily(struct file *file, uint64_t offset, const void *from, size_t length)
{
    void *where = address_to_store(file, offset, length);

    if (!where)
        return -errno;
    persist_bytes(&file->persist, where, from, length);
    return file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
               ? 0
               : persist_range(&file->persist, where, length);
}

int file_store_lazily(struct file *file, uint64_t offset, const void *from, size_t length)
{
    int ret;

    mirror_begin_store(file);
    ret = store_lazily(file, offset, from, length);
    mirror_end_store(file);
    return ret;
}

int file_store(struct file *file, uint64_t offset, const void *from, size_t length)
{
    uint64_t since;
    void *where;
    int ret;

    mirror_begin_store(file);
    where = address_to_store(file, offset, length);
    since = failures_count(&file->persist.failures);
    ret = where ? 0 : -errno;
    if (!ret) {
        persist_bytes(&file->persist, where, from, length);
        ret = file_put_on_medium(file, where, length, since);
    }
    mirror_end_store(file);
    return ret;
}
