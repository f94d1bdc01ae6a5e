/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/prepare.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "image/remains.h"
#include "util/error.h"

/* allocated by one call: the file system locks out other writers of the file meanwhile */
#define PIECE (UINT64_C(128) << 10)
/* an eighth of the pool is never prepared, so that a nearly full pool serves what is stored */
#define POOL_RESERVE 8u
#define SMALL_LEAD (UINT64_C(4) << SLAB_BITS)
/*
 * Of what is free at most this part is ahead of the writer, so that others find space too; but four
 * slabs may be.
 */
#define LEAD_SHARE 32u

int prepare_begin(struct pcow_image *image)
{
    struct prepared_ring *ring = calloc(1, sizeof *ring);

    if (!ring)
        return -ENOMEM;
    image->ready = ring;
    return 0;
}

void prepare_end(struct pcow_image *image)
{
    struct prepared_ring *ring = image->ready;

    if (!ring)
        return;
    prepared_drop(image, 0);
    if (ring->used)
        for (uint64_t p = 1; p < image_slab_count(image); p++)
            prepared_trim(image, p);
    image->ready = NULL;
    free(ring);
}

unsigned prepared_count(const struct pcow_image *image)
{
    const struct prepared_ring *ring = image->ready;
    uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE),
             tail = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE);

    return tail > head ? (unsigned)(tail - head) : 0;
}

bool prepared_pop(struct pcow_image *image, uint64_t *slab)
{
    struct prepared_ring *ring = image->ready;
    uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);

    for (;;) {
        uint64_t found;

        /*
         * The tail first: a place is filled before tail passes it and emptied after head did, so
         * what is read then is right if head has not moved. Read before, it may be the nothing of a
         * place that is filled meanwhile.
         */
        if (__atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) <= head)
            return false;
        found = __atomic_load_n(&ring->slot[head % PREPARED_MAX], __ATOMIC_ACQUIRE);
        if (__atomic_compare_exchange_n(&ring->head, &head, head + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            __atomic_store_n(&ring->slot[head % PREPARED_MAX], 0, __ATOMIC_RELEASE);
            *slab = found;
            return true;
        }
    }
}

/*
 * Into the page table of the window, with blocks that read as zeros: what the first store would
 * otherwise have to wait for. The blocks are allocated. By touching and not with
 * MADV_POPULATE_WRITE: that holds the lock that a trap's mmap() needs, for all of the range.
 */
static int touch(struct pcow_image *image, uint64_t offset, uint64_t length)
{
    volatile uint8_t *window = file_address_settled(&image->file, offset);

    if (!window)
        return -ENOMEM;
    for (uint64_t at = 0; at < length; at += PCOW_PAGE_SIZE)
        window[at] = 0;
    if (length == PCOW_SLAB_SIZE)
        file_note_filled(&image->file, offset);
    return 0;
}

static void set_prepared(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count)
{
    for (unsigned page = first; page < first + count; page++)
        __atomic_fetch_or(&image->prepared[slab].word[page / 64], UINT64_C(1) << (page % 64),
                          __ATOMIC_RELEASE);
}

/* The blocks of a slab. Class pmem: as one extent, which the kernel can map as one entry. */
static int allocate(struct pcow_image *image, uint64_t offset)
{
    int ret = 0;

    if (image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        return file_allocate_written(&image->file, offset, PCOW_SLAB_SIZE);
    for (uint64_t at = 0; at < PCOW_SLAB_SIZE && ret == 0; at += PIECE)
        ret = file_allocate(&image->file, offset + at, PIECE);
    return ret;
}

int slab_take_whole(struct pcow_image *image, uint64_t *slab)
{
    int ret = slab_take(image, slab);

    if (ret)
        return ret;
    ret = allocate(image, *slab << SLAB_BITS);
    /* Before the first touch: what is on the medium already is mapped without a commit. */
    if (!ret && image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        ret = file_commit(&image->file);
    if (ret) {
        remains_discard(image, *slab, 0, PAGES_PER_SLAB);
        slab_untake(image, *slab);
    }
    return ret;
}

int prepare_one(struct pcow_image *image)
{
    struct prepared_ring *ring = image->ready;
    uint64_t *slot = &ring->slot[ring->tail % PREPARED_MAX], slab;
    int ret;

    if (__atomic_load_n(slot, __ATOMIC_ACQUIRE))
        return -EAGAIN;
    ret = slab_take_whole(image, &slab);
    if (ret)
        return ret;
    ret = touch(image, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    if (!ret)
        ret = file_settle(&image->file);
    if (ret) {
        remains_discard(image, slab, 0, PAGES_PER_SLAB);
        slab_untake(image, slab);
        return ret;
    }
    memset(&image->prepared[slab], 0xff, sizeof image->prepared[slab]);
    ring->used = true;
    __atomic_store_n(slot, slab, __ATOMIC_RELEASE);
    __atomic_store_n(&ring->tail, ring->tail + 1, __ATOMIC_RELEASE);
    return 0;
}

unsigned prepared_drop(struct pcow_image *image, unsigned keep)
{
    unsigned dropped = 0;
    uint64_t slab;

    while (prepared_count(image) > keep && prepared_pop(image, &slab)) {
        remains_discard(image, slab, 0, PAGES_PER_SLAB);
        slab_untake(image, slab);
        __atomic_fetch_add(&image->ready->dropped, 1, __ATOMIC_RELAXED);
        dropped++;
    }
    return dropped;
}

int prepare_blocks(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count)
{
    uint64_t offset = (slab << SLAB_BITS) + first * PCOW_PAGE_SIZE, length = count * PCOW_PAGE_SIZE;
    int ret = 0;

    /* Remains are not zeros. */
    if (slab_is_suspect(image, slab) && !file_is_hole(&image->file, offset, length))
        ret = file_punch(&image->file, offset, length);
    if (!ret)
        ret = file_allocate_written(&image->file, offset, length);
    if (!ret)
        image->ready->used = true;
    return ret;
}

int prepare_pages(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count)
{
    uint64_t offset = (slab << SLAB_BITS) + first * PCOW_PAGE_SIZE, length = count * PCOW_PAGE_SIZE;
    int ret;

    /* A copy that failed since the first step has punched its blocks out. */
    if (image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        ret = file_has_hole(&image->file, offset, length) ? -ESTALE : 0;
    else
        ret = file_allocate(&image->file, offset, length);
    if (!ret)
        ret = touch(image, offset, length);
    if (!ret)
        set_prepared(image, slab, first, count);
    return ret;
}

unsigned prepared_trim(struct pcow_image *image, uint64_t slab)
{
    struct page_set unused;
    unsigned pages = 0;

    if (page_set_empty(&image->prepared[slab]))
        return 0;
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        unused.word[w] =
            page_set_word(&image->prepared[slab], w) & ~page_set_word(&image->valid[slab], w);
    slab_forget_prepared(image, slab);
    for (unsigned page = 0; page < PAGES_PER_SLAB;) {
        unsigned end = page_set_run_end(&unused, page, PAGES_PER_SLAB);

        if (page_set_has(&unused, page)) {
            file_punch(&image->file, (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                       (end - page) * PCOW_PAGE_SIZE);
            pages += end - page;
        }
        page = end;
    }
    return pages;
}

bool prepared_run(const struct pcow_image *image, uint64_t slab, unsigned page, unsigned *end)
{
    *end = page_set_run_end(&image->prepared[slab], page, *end);
    return page_set_has(&image->prepared[slab], page);
}

uint64_t prepare_room(const struct pcow_image *image)
{
    struct statvfs fs;
    uint64_t size, available, share;

    if (fstatvfs(image->file.fd, &fs))
        return 0;
    if (fs.f_blocks == 0)
        return PREPARED_MAX;           /* tmpfs without a limit */
    size = fs.f_blocks * fs.f_frsize;
    available = fs.f_bavail * fs.f_frsize;
    if (available <= size / POOL_RESERVE)
        return 0;
    share = available / LEAD_SHARE > SMALL_LEAD ? available / LEAD_SHARE : SMALL_LEAD;
    available -= size / POOL_RESERVE;
    return (share < available ? share : available) >> SLAB_BITS;
}

int slab_take_ready(struct pcow_image *image, uint64_t *slab)
{
    if (image->ready && prepare_is_of_use(image)) {
        if (prepared_pop(image, slab))
            return 0;
        __atomic_fetch_add(&image->ready->missed, 1, __ATOMIC_RELAXED);
    }
    return slab_take_unsettled(image, slab);
}
