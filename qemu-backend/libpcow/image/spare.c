/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/spare.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <time.h>

#include "image/mirror.h"
#include "image/prepare.h"
#include "image/remains.h"

/* of a page of the loan at a time, so that little of it is left to others */
#define LENT_PAGES 1u
#define PIECE_PAGES 32u                /* written by one call */

static struct spare *get(const struct pcow_image *image)
{
    return __atomic_load_n(&image->spare, __ATOMIC_ACQUIRE);
}

int spare_keep(struct pcow_image *image, unsigned slabs)
{
    struct spare *spare = get(image);

    if (!spare) {
        spare = calloc(1, sizeof *spare);
        if (!spare)
            return -ENOMEM;
        __atomic_store_n(&image->spare, spare, __ATOMIC_RELEASE);
    }
    if (!__atomic_load_n(&spare->kept, __ATOMIC_RELAXED))
        __atomic_store_n(&spare->records_due, true, __ATOMIC_RELAXED);
    __atomic_store_n(&spare->wanted, slabs < SPARE_MAX ? slabs : SPARE_MAX, __ATOMIC_RELEASE);
    __atomic_store_n(&spare->kept, true, __ATOMIC_RELEASE);
    return 0;
}

void spare_give_up(struct pcow_image *image)
{
    struct spare *spare = get(image);

    if (!spare)
        return;
    __atomic_store_n(&spare->kept, false, __ATOMIC_RELEASE);
    __atomic_store_n(&spare->wanted, 0, __ATOMIC_RELEASE);
}

void spare_use(struct pcow_image *image, bool use)
{
    struct spare *spare = get(image);

    if (spare)
        __atomic_store_n(&spare->in_use, use, __ATOMIC_RELEASE);
}

bool spare_is_in_use(const struct pcow_image *image)
{
    const struct spare *spare = get(image);

    return spare && __atomic_load_n(&spare->in_use, __ATOMIC_ACQUIRE);
}

bool spare_is_kept(const struct pcow_image *image)
{
    const struct spare *spare = get(image);

    return spare && __atomic_load_n(&spare->kept, __ATOMIC_ACQUIRE);
}

void spare_note_records(struct pcow_image *image)
{
    if (spare_is_kept(image))
        __atomic_store_n(&get(image)->records_due, true, __ATOMIC_RELEASE);
}

static unsigned wanted(const struct spare *spare)
{
    return __atomic_load_n(&spare->wanted, __ATOMIC_ACQUIRE);
}

static uint64_t peek(const struct spare *spare, unsigned place)
{
    return __atomic_load_n(&spare->slab[place], __ATOMIC_ACQUIRE);
}

/* The slab that it lies in; 0: there is none. The thread writes it, others look. */
static uint64_t loan_of(const struct spare *spare)
{
    return __atomic_load_n(&spare->loan, __ATOMIC_ACQUIRE);
}

static void set_loan(struct spare *spare, uint64_t slab)
{
    __atomic_store_n(&spare->loan, slab, __ATOMIC_RELEASE);
}

static bool loan_is_whole(const struct spare *spare)
{
    return __atomic_load_n(&spare->loan_left, __ATOMIC_ACQUIRE) == PAGES_PER_SLAB;
}

unsigned spare_count(const struct pcow_image *image)
{
    const struct spare *spare = get(image);
    unsigned count = 0;

    if (!spare)
        return 0;
    for (unsigned i = 0; i < SPARE_MAX; i++)
        count += peek(spare, i) != 0;
    return count + loan_is_whole(spare);
}

unsigned spare_wanted(const struct pcow_image *image)
{
    const struct spare *spare = get(image);

    return spare && __atomic_load_n(&spare->kept, __ATOMIC_ACQUIRE) ? wanted(spare) + 1 : 0;
}

bool spare_take(struct pcow_image *image, uint64_t *slab)
{
    struct spare *spare = get(image);

    for (unsigned i = 0; i < SPARE_MAX && spare_is_in_use(image); i++) {
        *slab = __atomic_exchange_n(&spare->slab[i], 0, __ATOMIC_ACQ_REL);
        if (*slab)
            return true;
    }
    return false;
}

bool spare_lend(struct pcow_image *image)
{
    struct spare *spare = get(image);
    bool lent = false;
    unsigned left;

    if (!spare)
        return false;
    /* Whoever takes the loan back waits for those that have seen that there is something left. */
    __atomic_fetch_add(&spare->lending, 1, __ATOMIC_SEQ_CST);
    left = __atomic_load_n(&spare->loan_left, __ATOMIC_SEQ_CST);
    while (left >= LENT_PAGES && !lent)
        lent = __atomic_compare_exchange_n(&spare->loan_left, &left, left - LENT_PAGES, false,
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    /* From its end on: no extent of the file is cut in two, for which a block might be wanted. */
    if (lent)
        lent = file_punch(&image->file,
                          (loan_of(spare) << SLAB_BITS) + (left - LENT_PAGES) * PCOW_PAGE_SIZE,
                          LENT_PAGES * PCOW_PAGE_SIZE)
               == 0;
    /* What was freed can be had once the journal of the file system says so. */
    if (lent)
        lent = file_commit(&image->file) == 0;
    __atomic_fetch_sub(&spare->lending, 1, __ATOMIC_SEQ_CST);
    return lent;
}

/* ---- by the thread --------------------------------------------------------------------------- */

/* Nobody gets anything of it any more. Returns the pages that were left. */
static unsigned close_loan(struct spare *spare)
{
    static const struct timespec moment = {0, 20000};
    unsigned left = __atomic_exchange_n(&spare->loan_left, 0, __ATOMIC_SEQ_CST);

    while (__atomic_load_n(&spare->lending, __ATOMIC_SEQ_CST))
        nanosleep(&moment, NULL);
    return left;
}

static void give_back(struct pcow_image *image, uint64_t slab)
{
    remains_discard(image, slab, 0, PAGES_PER_SLAB);
    slab_untake(image, slab);
}

static void give_back_loan(struct pcow_image *image)
{
    struct spare *spare = get(image);

    close_loan(spare);
    if (loan_of(spare))
        give_back(image, loan_of(spare));
    set_loan(spare, 0);
}

/* Those that are not wanted any more. */
void spare_give_back_surplus(struct pcow_image *image)
{
    struct spare *spare = get(image);

    for (unsigned i = 0; i < SPARE_MAX; i++) {
        uint64_t slab = i < wanted(spare)
                            ? 0
                            : __atomic_exchange_n(&spare->slab[i], 0, __ATOMIC_ACQ_REL);

        if (slab)
            give_back(image, slab);
    }
    if (!__atomic_load_n(&spare->kept, __ATOMIC_ACQUIRE))
        give_back_loan(image);
}

static bool has_surplus(const struct spare *spare)
{
    for (unsigned i = wanted(spare); i < SPARE_MAX; i++)
        if (peek(spare, i))
            return true;
    return !__atomic_load_n(&spare->kept, __ATOMIC_ACQUIRE) && loan_of(spare);
}

/* The first of the empty places that are to be filled; SPARE_MAX: there is none. */
static unsigned find_place(const struct spare *spare)
{
    for (unsigned i = 0; i < wanted(spare); i++)
        if (!peek(spare, i))
            return i;
    return SPARE_MAX;
}

bool spare_is_due(const struct pcow_image *image)
{
    const struct spare *spare = get(image);

    if (!spare || spare_is_in_use(image))
        return false;
    if (has_surplus(spare))
        return true;
    return __atomic_load_n(&spare->kept, __ATOMIC_ACQUIRE)
           && (__atomic_load_n(&spare->records_due, __ATOMIC_ACQUIRE) || !loan_is_whole(spare)
               || find_place(spare) < SPARE_MAX);
}

/* Not to take what others could use, and then give it back as it does not suffice. */
static bool has_room(const struct pcow_image *image, unsigned pages)
{
    struct statvfs fs;

    return fstatvfs(image->file.fd, &fs) == 0
           && (fs.f_blocks == 0 || fs.f_bavail * fs.f_frsize >= pages * PCOW_PAGE_SIZE);
}

/*
 * From a page on. They have blocks; but those that were never written are none to SEEK_DATA, by
 * which the next writer finds what a killed one has left.
 */
static int write_zeros(const struct pcow_image *image, uint64_t slab, unsigned page)
{
    static const char zeros[PIECE_PAGES * PCOW_PAGE_SIZE];
    int ret = 0;

    for (; page < PAGES_PER_SLAB && !ret; page++) {
        unsigned pages = page % PIECE_PAGES ? 1 : PIECE_PAGES;

        ret = file_write(&image->file, (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE, zeros,
                         pages * PCOW_PAGE_SIZE);
        page += pages - 1;
    }
    return ret;
}

/* With what its owner word is stored by, where nothing of its group was stored before. */
static int take(struct pcow_image *image, uint64_t *slab)
{
    int ret = has_room(image, PAGES_PER_SLAB) ? slab_take_whole(image, slab) : -ENOSPC;

    if (ret)
        return ret;
    if (image->file.persist.persistence != PCOW_PERSISTENCE_PMEM)
        ret = write_zeros(image, *slab, 0);
    mirror_begin_store(&image->file);
    if (!ret)
        ret = mirror_mark(&image->file, owner_offset(*slab), sizeof(uint64_t));
    mirror_end_store(&image->file);
    if (ret)
        give_back(image, *slab);
    return ret;
}

static int restore_loan(struct pcow_image *image)
{
    struct spare *spare = get(image);
    unsigned left;
    int ret;

    if (!loan_of(spare)) {
        uint64_t slab;

        ret = take(image, &slab);
        if (ret)
            return ret;
        set_loan(spare, slab);
        __atomic_store_n(&spare->loan_left, PAGES_PER_SLAB, __ATOMIC_SEQ_CST);
        return 0;
    }
    /* Who asks meanwhile gets nothing. */
    if (!has_room(image,
                  PAGES_PER_SLAB - __atomic_load_n(&spare->loan_left, __ATOMIC_ACQUIRE)))
        return -ENOSPC;
    left = close_loan(spare);
    ret = file_allocate(&image->file, (loan_of(spare) << SLAB_BITS) + left * PCOW_PAGE_SIZE,
                        (PAGES_PER_SLAB - left) * PCOW_PAGE_SIZE);
    if (!ret)
        ret = write_zeros(image, loan_of(spare), left);
    __atomic_store_n(&spare->loan_left, ret ? left : PAGES_PER_SLAB, __ATOMIC_SEQ_CST);
    return ret;
}

int spare_fill(struct pcow_image *image)
{
    struct spare *spare = get(image);
    unsigned place;
    uint64_t slab;
    int ret;

    if (!__atomic_load_n(&spare->kept, __ATOMIC_ACQUIRE))
        return 0;
    place = find_place(spare);
    if (place == SPARE_MAX)
        return loan_is_whole(spare) ? 0 : restore_loan(image);
    ret = take(image, &slab);
    if (!ret)
        __atomic_store_n(&spare->slab[place], slab, __ATOMIC_RELEASE);
    return ret;
}

void spare_end(struct pcow_image *image)
{
    struct spare *spare = get(image);

    if (!spare)
        return;
    spare_give_up(image);
    spare_give_back_surplus(image);
    __atomic_store_n(&image->spare, NULL, __ATOMIC_RELEASE);
    free(spare);
}
