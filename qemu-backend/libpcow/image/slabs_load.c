/* SPDX-License-Identifier: BSD-3-Clause */
/* The tables of slabs in memory: room for them, and what the file says. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "image/image.h"
#include "util/error.h"

static void *reserve(size_t size, int protection)
{
    void *memory = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static void *reserve_bits(size_t size)
{
    return reserve(size, PROT_READ | PROT_WRITE);
}

static int make_accessible(void *table, size_t entry, uint64_t count)
{
    return table && mprotect(table, count * entry, PROT_READ | PROT_WRITE) ? -errno : 0;
}

int slabs_reach(struct pcow_image *image, uint64_t slab)
{
    uint64_t count = (slab / SLABS_PER_GROUP + 1) * SLABS_PER_GROUP,
             seen = __atomic_load_n(&image->slabs_reached, __ATOMIC_ACQUIRE);
    int ret;

    if (slab < seen)
        return 0;
    count = count < image->slab_capacity ? count : image->slab_capacity;
    ret = make_accessible(image->slabs, sizeof *image->slabs, count);
    if (!ret)
        ret = make_accessible(image->valid, sizeof *image->valid, count);
    if (!ret)
        ret = make_accessible(image->prepared, sizeof *image->prepared, count);
    /* Another thread may have come further. */
    while (!ret && seen < count
           && !__atomic_compare_exchange_n(&image->slabs_reached, &seen, count, true,
                                           __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
    return ret;
}

/* One bit for each slab. */
static size_t bits_size(const struct pcow_image *image)
{
    return (image->slab_capacity + 63) / 64 * sizeof(uint64_t);
}

/* One bit for each page of bitmaps. */
static size_t tables_ready_size(const struct pcow_image *image)
{
    return (image->slab_capacity / SLABS_PER_TABLE_PAGE + 64) / 64 * sizeof *image->tables_ready;
}

int slabs_reserve(struct pcow_image *image, uint64_t capacity, uint64_t reached)
{
    image->slab_capacity = capacity ? capacity : 1;
    /*
     * Locked memory (mlockall(), QEMU's mem-lock=on) is filled as far as it is accessible: so that
     * is no more than what is in use.
     */
    image->slabs = reserve(image->slab_capacity * sizeof *image->slabs, PROT_NONE);
    image->valid = reserve(image->slab_capacity * sizeof *image->valid, PROT_NONE);
    image->used = reserve_bits(bits_size(image));
    if (!image->slabs || !image->valid || !image->used)
        return -ENOMEM;
    if (image->file.writable) {
        image->prepared = reserve(image->slab_capacity * sizeof *image->prepared, PROT_NONE);
        image->remains = reserve_bits(bits_size(image));
        image->tables_ready = reserve_bits(tables_ready_size(image));
        image->backed = reserve_bits(bits_size(image));
        image->stored = reserve_bits(bits_size(image));
        if (!image->prepared || !image->remains || !image->tables_ready || !image->backed
            || !image->stored)
            return -ENOMEM;
    }
    return slabs_reach(image, reached ? reached - 1 : 0);
}

void slabs_unload(struct pcow_image *image)
{
    if (image->slabs)
        munmap(image->slabs, image->slab_capacity * sizeof *image->slabs);
    if (image->valid)
        munmap(image->valid, image->slab_capacity * sizeof *image->valid);
    if (image->used)
        munmap(image->used, bits_size(image));
    if (image->prepared)
        munmap(image->prepared, image->slab_capacity * sizeof *image->prepared);
    if (image->remains)
        munmap(image->remains, bits_size(image));
    if (image->tables_ready)
        munmap(image->tables_ready, tables_ready_size(image));
    if (image->backed)
        munmap(image->backed, bits_size(image));
    if (image->stored)
        munmap(image->stored, bits_size(image));
    image->slabs_reached = 0;
    image->slabs = NULL;
    image->valid = NULL;
    image->used = NULL;
    image->prepared = NULL;
    image->remains = NULL;
    image->tables_ready = NULL;
    image->backed = image->stored = NULL;
}

static void mark_used(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_or(&image->used[slab / 64], UINT64_C(1) << (slab % 64), __ATOMIC_ACQ_REL);
}

/*
 * The bitmaps of the data slabs among these of one group. What lies side by side is read at once.
 */
static int load_bitmaps(struct pcow_image *image, uint64_t first, uint64_t count,
                        struct pcow_error *error)
{
    for (uint64_t p = first, end; p < first + count; p = end) {
        int ret;

        for (end = p; end < first + count && image->slabs[end].kind == OWNER_DATA; end++)
            ;
        if (end == p) {
            end++;
            continue;
        }
        ret = file_read(&image->file, bitmap_offset(p), &image->valid[p],
                        (end - p) * sizeof image->valid[p]);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot read the page bitmaps from %llu on",
                                   image->file.path, (unsigned long long)p);
    }
    return 0;
}

/* Read the owner words of one group, and the bitmaps of its slabs that have an owner. */
static int load_group(struct pcow_image *image, uint64_t first, uint64_t count, uint64_t *words,
                      struct pcow_error *error)
{
    int ret = file_read(&image->file, owner_offset(first), words, count * sizeof *words);

    if (ret)
        return error_set_errno(error, ret, "%s: cannot read the slab table", image->file.path);
    for (uint64_t i = 0; i < count && i < image->file.heads; i++)
        mark_used(image, first + i);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t p = first + i;
        struct owner owner = owner_decode(words[i]);

        if (!word_is_valid(words[i]))
            return error_set(error, -EBADMSG,
                             "%s: the owner of file slab %llu is damaged; see pcow-img check",
                             image->file.path, (unsigned long long)p);
        if (words[i] == 0)
            continue;
        if (i < image->file.heads || owner.kind == OWNER_NONE
            || (owner.kind == OWNER_DATA && owner.number >= MAX_GUEST_SLABS)
            || (owner.kind == OWNER_TABLE && (owner.number == 0 || owner.number > MAX_LAYER_TABLE)))
            return error_set(error, -EBADMSG,
                             "%s: the owner of file slab %llu is impossible; see pcow-img check",
                             image->file.path, (unsigned long long)p);
        image->slabs[p].layer = owner.layer;
        image->slabs[p].number = owner.number;
        image->slabs[p].kind = (unsigned)owner.kind & 3;
        mark_used(image, p);
        if (owner.kind == OWNER_TABLE && !image->table[owner.number])
            image->table[owner.number] = p;
    }
    return load_bitmaps(image, first, count, error);
}

/*
 * Owner words behind the end of file tell that it was cut short: what they name would read as what
 * lies below. Somebody who has grown the file since it was looked at did that before he stored a
 * word.
 */
static int check_end(const struct pcow_image *image, uint64_t *words, struct pcow_error *error)
{
    uint64_t end = image->slab_count,
             count = (SLABS_PER_GROUP - end % SLABS_PER_GROUP) % SLABS_PER_GROUP;
    int ret = count ? file_read(&image->file, owner_offset(end), words, count * sizeof *words) : 0;

    if (ret)
        return error_set_errno(error, ret, "%s: cannot read the slab table", image->file.path);
    for (uint64_t i = 0; i < count; i++) {
        struct stat st;

        if (words[i] == 0
            || (fstat(image->file.fd, &st) == 0 && (uint64_t)st.st_size >> SLAB_BITS > end + i))
            continue;
        return error_set(error, -EBADMSG,
                         "%s was cut short: file slab %llu, which holds data, lies behind its end. "
                         "Put a whole copy back; pcow-img check says what is missing",
                         image->file.path, (unsigned long long)(end + i));
    }
    return 0;
}

int slabs_load(struct pcow_image *image, struct pcow_error *error)
{
    uint64_t *words;
    /* A writer's tables may grow to the largest file; pages that are never touched cost nothing. */
    int ret =
        slabs_reserve(image, image->file.writable ? MAX_FILE_SLABS : image->file.size >> SLAB_BITS,
                      image->file.size >> SLAB_BITS);

    if (ret)
        return error_set(error, ret, "out of memory for the tables of %s", image->file.path);
    words = malloc(SLABS_PER_GROUP * sizeof *words);
    if (!words)
        return error_set(error, -ENOMEM, "out of memory");
    image->slab_count = image->slabs_at_open = image->file.size >> SLAB_BITS;
    image->free_hint = 1;
    for (uint64_t first = 0; first < image->slab_count && ret == 0; first += SLABS_PER_GROUP) {
        uint64_t rest = image->slab_count - first;

        ret =
            load_group(image, first, rest < SLABS_PER_GROUP ? rest : SLABS_PER_GROUP, words, error);
    }
    if (!ret)
        ret = check_end(image, words, error);
    free(words);
    return ret;
}
