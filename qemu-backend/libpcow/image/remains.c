/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/remains.h"

#include <sys/stat.h>
#include <unistd.h>

#include "chain/chain.h"
#include "util/error.h"

static uint64_t bit_of(uint64_t slab)
{
    return UINT64_C(1) << (slab % 64);
}

static void mark(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_or(&image->remains[slab / 64], bit_of(slab), __ATOMIC_ACQ_REL);
    __atomic_store_n(&image->remains_due, true, __ATOMIC_RELEASE);
}

void remains_leave(struct pcow_image *image, uint64_t slab, unsigned pages)
{
    __atomic_fetch_add(&image->remains_size, pages * PCOW_PAGE_SIZE, __ATOMIC_RELAXED);
    mark(image, slab);
}

void remains_discard(struct pcow_image *image, uint64_t slab, unsigned page, unsigned pages)
{
    if (file_punch(&image->file, (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE, pages * PCOW_PAGE_SIZE))
        mark(image, slab);
}

void remains_forget(struct pcow_image *image, uint64_t slab)
{
    if (__atomic_load_n(&image->remains[slab / 64], __ATOMIC_RELAXED) & bit_of(slab))
        __atomic_fetch_and(&image->remains[slab / 64], ~bit_of(slab), __ATOMIC_ACQ_REL);
}

bool remains_are_due(const struct pcow_image *image)
{
    return __atomic_load_n(&image->remains_due, __ATOMIC_ACQUIRE);
}

static bool is_used(const struct pcow_image *image, uint64_t slab)
{
    return __atomic_load_n(&image->used[slab / 64], __ATOMIC_ACQUIRE) & bit_of(slab);
}

void remains_find(struct pcow_image *image, bool owned)
{
    for (uint64_t p = 1; p < image->slabs_at_open; p++) {
        off_t data;

        if (slab_is_group_head(p))
            continue;
        if (is_used(image, p)) {
            if (owned && slab_peek(image, p).kind == OWNER_DATA)
                mark(image, p);
            continue;
        }
        data = lseek(image->file.fd, (off_t)(p << SLAB_BITS), SEEK_DATA);
        /* Nothing up to the slab that was found, so nothing in free ones before it. */
        if (data >= 0 && (uint64_t)data >> SLAB_BITS == p)
            mark(image, p);
        else if (!owned && data >= 0)
            p = ((uint64_t)data >> SLAB_BITS) - 1;
        else if (!owned)
            return;
    }
}

int remains_empty_pages(struct pcow_image *image, uint64_t slab, bool holes)
{
    struct page_set kept;
    int ret = 0;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        kept.word[w] = page_set_word(&image->valid[slab], w) | page_set_word(&image->prepared[slab], w);
    for (unsigned page = 0; page < PAGES_PER_SLAB && ret == 0;) {
        unsigned end = page_set_run_end(&kept, page, PAGES_PER_SLAB);
        uint64_t offset = (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE, length = (end - page) * PCOW_PAGE_SIZE;

        if (!page_set_has(&kept, page) && (holes || !file_is_hole(&image->file, offset, length)))
            ret = file_punch(&image->file, offset, length);
        page = end;
    }
    return ret;
}

/* Nobody owns it, and nobody can take it meanwhile. */
static int empty_free(struct pcow_image *image, uint64_t slab)
{
    int ret;

    if (__atomic_fetch_or(&image->used[slab / 64], bit_of(slab), __ATOMIC_ACQ_REL) & bit_of(slab))
        return 0;                      /* taken since, and emptied by who did */
    remains_forget(image, slab);
    ret = file_punch(&image->file, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    if (ret)
        __atomic_fetch_or(&image->remains[slab / 64], bit_of(slab), __ATOMIC_ACQ_REL);
    slab_untake(image, slab);
    return ret;
}

static int empty_owned(struct pcow_image *image, uint64_t slab, uint64_t guest_slab)
{
    struct chain *chain = image->chain;
    bool claimed = chain && guest_slab < chain->guest_slabs;
    int ret = 0;

    if (claimed && __atomic_exchange_n(&chain->claim[guest_slab], 1, __ATOMIC_ACQUIRE)) {
        __atomic_store_n(&image->remains_due, true, __ATOMIC_RELEASE);
        return 0;
    }
    /* Under the claim it is still what it was, or it is left alone. */
    if (image->slabs[slab].kind == OWNER_DATA && image->slabs[slab].number == guest_slab) {
        remains_forget(image, slab);
        ret = remains_empty_pages(image, slab, false);
        if (ret)
            __atomic_fetch_or(&image->remains[slab / 64], bit_of(slab), __ATOMIC_ACQ_REL);
    }
    if (claimed)
        chain_release(chain, guest_slab);
    return ret;
}

bool remains_give_back(struct pcow_image *image, unsigned limit)
{
    uint64_t words = (image_slab_count(image) + 63) / 64;
    unsigned done = 0;

    if (!image->remains || !__atomic_exchange_n(&image->remains_due, false, __ATOMIC_ACQ_REL))
        return false;
    for (uint64_t w = 0; w < words; w++)
        for (uint64_t bits = __atomic_load_n(&image->remains[w], __ATOMIC_ACQUIRE); bits; bits &= bits - 1) {
            uint64_t p = w * 64 + (unsigned)__builtin_ctzll(bits);
            struct slab owner = slab_peek(image, p);

            int ret = 0;

            if (limit && done == limit) {
                __atomic_store_n(&image->remains_due, true, __ATOMIC_RELEASE);
                return true;
            }
            done++;
            if (owner.kind == OWNER_NONE)
                ret = empty_free(image, p);
            else if (owner.kind == OWNER_DATA)
                ret = empty_owned(image, p, owner.number);
            else
                remains_forget(image, p);
            if (ret)
                __atomic_store_n(&image->remains_error, ret, __ATOMIC_RELAXED);
        }
    return done > 0;
}

/* What the pool holds for the file. */
static uint64_t allocated_size(const struct pcow_image *image)
{
    struct stat st;

    return fstat(image->file.fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
}

int pcow_reclaim(pcow_image *image, uint64_t *reclaimed, struct pcow_error *error)
{
    uint64_t before, after;
    int ret = image_check_writable(image, error);

    if (reclaimed)
        *reclaimed = 0;
    if (ret)
        return ret;
    remains_find(image, false);
    /* Asked, not reckoned: a page that was valid need not have had a block. */
    before = allocated_size(image);
    __atomic_store_n(&image->remains_error, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&image->remains_due, true, __ATOMIC_RELEASE);
    remains_give_back(image, 0);
    ret = __atomic_load_n(&image->remains_error, __ATOMIC_RELAXED);
    if (!ret)
        ret = file_settle(&image->file);
    after = allocated_size(image);
    if (reclaimed)
        *reclaimed = before > after ? before - after : 0;
    return ret ? error_set_errno(error, ret, "%s: blocks that are no longer used cannot be given back to the pool; whoever writes to the image "
                                 "next tries again", image->file.path) : 0;
}
