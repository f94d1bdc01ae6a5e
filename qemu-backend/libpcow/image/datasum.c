/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/datasum.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* All of it is inlined: no library to link with. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "util/crc.h"

#define SUMMED_SIZE (MAX_FILE_SLABS / 8)
#define ENTRIES_SIZE (SLABS_PER_GROUP * sizeof(struct datasum))
#define ENTRIES_PER_PAGE (PCOW_PAGE_SIZE / sizeof(struct datasum))
#define ENTRIES_AT_ONCE (DATASUM_BUFFER / sizeof(struct datasum))

/* ---- attach ---------------------------------------------------------------------------------- */

/* Before the first checksum that the image has. */
static int make_room(struct file *file)
{
    uint64_t *bits;

    if (file->summed)
        return 0;
    bits = mmap(NULL, SUMMED_SIZE, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bits == MAP_FAILED)
        return -ENOMEM;
    __atomic_store_n(&file->summed, bits, __ATOMIC_RELEASE);
    return 0;
}

static void set_summed(struct file *file, uint64_t slab)
{
    __atomic_fetch_or(&file->summed[slab / 64], UINT64_C(1) << slab % 64, __ATOMIC_ACQ_REL);
}

static void clear_summed(struct file *file, uint64_t slab)
{
    __atomic_fetch_and(&file->summed[slab / 64], ~(UINT64_C(1) << slab % 64), __ATOMIC_ACQ_REL);
}

/* Those that the medium cannot read are dropped: none is as good. */
static int read_entries(struct file *file, uint64_t offset, struct datasum *entries)
{
    int ret = file_read(file, offset, entries, DATASUM_BUFFER);

    if (ret != -EIO)
        return ret;
    ret = 0;
    for (uint64_t at = 0; at < DATASUM_BUFFER && !ret; at += PCOW_PAGE_SIZE) {
        char *page = (char *)entries + at;

        ret = file_read(file, offset + at, page, PCOW_PAGE_SIZE);
        if (ret == -EIO) {
            memset(page, 0, PCOW_PAGE_SIZE);
            ret = file_write(file, offset + at, page, PCOW_PAGE_SIZE);
        }
    }
    return ret ? ret : file_commit(file);
}

static int attach_group(struct file *file, uint64_t first, struct datasum *entries)
{
    int ret = 0;

    for (uint64_t at = 0; at < SLABS_PER_GROUP && !ret; at += ENTRIES_AT_ONCE) {
        ret = read_entries(file, datasum_offset(first + at), entries);
        for (uint64_t i = 0; i < ENTRIES_AT_ONCE && !ret; i++)
            /* A damaged one, too. */
            if (entries[i].word && !(ret = make_room(file)))
                set_summed(file, first + at + i);
    }
    return ret;
}

int datasum_attach(struct file *file)
{
    struct datasum *entries = NULL;
    int ret = 0;

    if (file->heads == 1 || !file->writable || file->summed)
        return 0;
    for (uint64_t first = 0; datasum_offset(first) + ENTRIES_SIZE <= file->size && !ret;
         first += SLABS_PER_GROUP) {
        if (file_is_hole(file, datasum_offset(first), ENTRIES_SIZE))
            continue;
        if (!entries)
            entries = malloc(DATASUM_BUFFER);
        ret = entries ? attach_group(file, first, entries) : -ENOMEM;
    }
    free(entries);
    return ret;
}

/*
 * The slabs [first, end), whose entries lie in one page. One that the medium cannot read is made
 * empty, as when the image is opened: it might be read again one day.
 */
static int look_at_page(struct file *file, uint64_t first, uint64_t end)
{
    struct datasum entries[ENTRIES_PER_PAGE] = {0};
    int ret = file_read(file, datasum_offset(first), entries, (end - first) * sizeof *entries);

    if (ret == -EIO) {
        memset(entries, 0, sizeof entries);
        ret = file_write(file, datasum_offset(first / ENTRIES_PER_PAGE * ENTRIES_PER_PAGE),
                         entries, sizeof entries);
        if (!ret)
            ret = file_commit(file);
    }
    if (ret)
        return ret;
    for (uint64_t slab = first; slab < end && !ret; slab++)
        if (entries[slab - first].word && !(ret = make_room(file)))
            set_summed(file, slab);
    return ret;
}

int datasum_look(struct file *file, uint64_t first, uint64_t end)
{
    uint64_t group = first / SLABS_PER_GROUP * SLABS_PER_GROUP;
    int ret = 0;

    while (file->heads > 1 && first < end && !ret) {
        uint64_t stop = datasum_offset(group) + (end - group) * sizeof(struct datasum),
                 data = file_next_data(file, datasum_offset(first), stop), next;

        if (data >= stop)
            break;
        if (data > datasum_offset(first))
            first = group + (data - datasum_offset(group)) / sizeof(struct datasum);
        next = first / ENTRIES_PER_PAGE * ENTRIES_PER_PAGE + ENTRIES_PER_PAGE;
        ret = look_at_page(file, first, next < end ? next : end);
        first = next;
    }
    return ret;
}

void datasum_detach(struct file *file)
{
    if (file->summed)
        munmap(file->summed, SUMMED_SIZE);
    file->summed = NULL;
}

/* ---- drop ------------------------------------------------------------------------------------ */

/* Where the checksum of a slab lies, to be stored to; NULL with errno set. */
static struct datasum *address_of(struct file *file, uint64_t slab)
{
    uint64_t offset = datasum_offset(slab);
    int ret = file_allocate_metadata(file, offset, sizeof(struct datasum));
    struct datasum *where = ret ? NULL : file_address(file, offset);

    if (where)
        ret = file_prepare_store(file, where, NULL, offset, sizeof *where);
    if (ret)
        errno = -ret;
    return ret ? NULL : where;
}

int datasum_drop_lazily(struct file *file, uint64_t slab)
{
    struct datasum *where = address_of(file, slab);

    if (!where)
        return -errno;
    persist_word(&file->persist, &where->word, 0);
    return 0;
}

int datasum_drop_this(struct file *file, uint64_t slab)
{
    uint64_t since = failures_count(&file->persist.failures);
    struct datasum *where = address_of(file, slab);
    int ret;

    if (!where)
        return -errno;
    persist_word(&file->persist, &where->word, 0);
    ret = file_put_on_medium(file, where, sizeof *where, since);
    /* Not before: another thread changes the slab when it does not see the bit. */
    if (!ret)
        clear_summed(file, slab);
    return ret;
}

int datasum_settle(struct file *file, uint64_t first, uint64_t end)
{
    uint64_t since = failures_count(&file->persist.failures);
    int ret = 0;

    while (first < end && !datasum_may_be(file, first))
        first++;
    while (first < end && !datasum_may_be(file, end - 1))
        end--;
    if (first < end) {
        struct datasum *where = address_of(file, first);

        ret = where ? file_put_on_medium(file, where, (end - first) * sizeof *where, since)
                    : -errno;
        for (uint64_t slab = first; slab < end && !ret; slab++)
            if (datasum_may_be(file, slab) && !where[slab - first].word)
                clear_summed(file, slab);
    }
    return ret;
}

int datasum_drop_for(struct file *file, uint64_t offset, size_t length)
{
    uint64_t group = offset / GROUP_SIZE * SLABS_PER_GROUP, at = offset % GROUP_SIZE,
             end = at + length, size, table;
    int ret = 0;

    if (at >= BITMAP_OFFSET && at < PCOW_SLAB_SIZE) {
        table = BITMAP_OFFSET;
        size = sizeof(struct page_set);
    } else if (at >= SLAB_TABLE_OFFSET && at < LAYER_TABLE_OFFSET) {
        table = SLAB_TABLE_OFFSET;
        size = sizeof(uint64_t);
    } else {
        return 0;
    }
    for (uint64_t i = (at - table) / size; table + i * size < end && !ret; i++)
        ret = datasum_drop(file, group + i);
    return ret;
}

/* ---- make and verify ------------------------------------------------------------------------- */

static uint64_t crc_of(const struct file *file, uint64_t slab, const struct datasum *datasum)
{
    uint32_t crc = crc32c_of_more(crc32c(file->uuid, sizeof file->uuid), &slab, sizeof slab);

    return crc32c_of_more(crc, datasum->hash,
                          sizeof *datasum - offsetof(struct datasum, hash));
}

bool datasum_is_good(const struct file *file, uint64_t slab, const struct datasum *datasum)
{
    return word_is_valid(datasum->word)
           && word_value(datasum->word) >> LAYER_ID_BITS == DATASUM_XXH3
           && datasum->crc == crc_of(file, slab, datasum);
}

static int hash_range(const struct file *file, XXH3_state_t *state, uint64_t offset,
                      uint64_t length, void *buffer)
{
    int ret = 0;

    for (uint64_t done = 0; done < length && !ret; done += DATASUM_BUFFER) {
        size_t piece = length - done < DATASUM_BUFFER ? length - done : DATASUM_BUFFER;

        ret = file_read(file, offset + done, buffer, piece);
        if (!ret)
            XXH3_128bits_update(state, buffer, piece);
    }
    return ret;
}

int datasum_hash(const struct file *file, const struct datasum_subject *subject, void *buffer,
                 uint64_t hash[2])
{
    const uint64_t whose[4] = {subject->slab, subject->owner.layer, subject->owner.number,
                               subject->owner.kind};
    struct page_set pages = subject->valid;
    XXH128_hash_t digest;
    XXH3_state_t state;
    uint64_t seed;
    int ret = 0;

    if (subject->owner.kind != OWNER_DATA)
        memset(&pages, 0xff, sizeof pages);
    memcpy(&seed, file->uuid, sizeof seed);
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset_withSeed(&state, seed);
    XXH3_128bits_update(&state, file->uuid, sizeof file->uuid);
    XXH3_128bits_update(&state, whose, sizeof whose);
    XXH3_128bits_update(&state, &pages, sizeof pages);
    for (unsigned page = 0; page < PAGES_PER_SLAB && !ret;) {
        unsigned end = page_set_run_end(&pages, page, PAGES_PER_SLAB);

        if (page_set_has(&pages, page))
            ret = hash_range(file, &state, (subject->slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                             (end - page) * PCOW_PAGE_SIZE, buffer);
        page = end;
    }
    digest = XXH3_128bits_digest(&state);
    hash[0] = digest.low64;
    hash[1] = digest.high64;
    return ret;
}

int datasum_store_hash(struct file *file, const struct datasum_subject *subject,
                       const uint64_t hash[2])
{
    struct datasum datasum = {.hash = {hash[0], hash[1]}}, *where;
    size_t rest = offsetof(struct datasum, crc);
    int ret = datasum_drop(file, subject->slab);

    where = ret ? NULL : address_of(file, subject->slab);
    if (!where)
        return ret ? ret : -errno;
    datasum.crc = crc_of(file, subject->slab, &datasum);
    persist_bytes(&file->persist, (char *)where + rest, (char *)&datasum + rest,
                  sizeof datasum - rest);
    return file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
               ? 0
               : persist_range(&file->persist, (char *)where + rest, sizeof datasum - rest);
}

int datasum_publish(struct file *file, const struct datasum_subject *subject)
{
    uint64_t since = failures_count(&file->persist.failures);
    struct datasum *where = address_of(file, subject->slab);
    int ret = where ? make_room(file) : -errno;

    if (ret)
        return ret;
    /* First, so that nobody stores to the slab without dropping it. */
    set_summed(file, subject->slab);
    persist_word(&file->persist, &where->word, datasum_word(subject->owner.layer));
    return file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
               ? 0
               : file_put_on_medium(file, where, sizeof *where, since);
}

int datasum_settle_hash(struct file *file, const struct datasum_subject *subject)
{
    uint64_t since = failures_count(&file->persist.failures);
    struct datasum *where = address_of(file, subject->slab);
    int ret = where ? file_put_on_medium(file, where, sizeof *where, since) : -errno;

    /* The page was clean by that, and the next store to it might wait for the file system. */
    if (!ret)
        __atomic_fetch_or(&where->word, 0, __ATOMIC_RELAXED);
    return ret;
}

int datasum_is_unchanged(const struct file *file, const struct datasum_subject *subject,
                         const uint64_t hash[2], bool *same)
{
    struct datasum entry;
    struct page_set valid;
    uint64_t owner;
    int ret = file_read(file, owner_offset(subject->slab), &owner, sizeof owner);

    if (!ret)
        ret = file_read(file, bitmap_offset(subject->slab), &valid, sizeof valid);
    if (!ret)
        ret = file_read(file, datasum_offset(subject->slab), &entry, sizeof entry);
    *same = !ret && owner == owner_encode(subject->owner) && entry.word == 0
            && !memcmp(&valid, &subject->valid, sizeof valid)
            && !memcmp(entry.hash, hash, sizeof entry.hash);
    return ret;
}

int datasum_note_dropped(struct file *file, uint64_t slab)
{
    uint64_t word;
    int ret = datasum_may_be(file, slab)
                  ? file_read(file, datasum_offset(slab), &word, sizeof word)
                  : -ENOENT;

    if (!ret && !word)
        clear_summed(file, slab);
    return ret == -ENOENT ? 0 : ret;
}
