/* SPDX-License-Identifier: BSD-3-Clause */
#include "chain/reclaim.h"

#include <sys/stat.h>
#include <unistd.h>

#include "chain/chain.h"
#include "image/prepare.h"
#include "image/remains.h"
#include "util/error.h"
#include "util/signals.h"

#define MAX_LOOKED_AT 4096u            /* slabs before somebody else may have a turn */

/* Nobody owns it, and nobody can take it meanwhile. */
static int empty_free(struct pcow_image *image, uint64_t slab)
{
    int ret;

    if (__atomic_fetch_or(&image->used[slab / 64], slab_bit(slab), __ATOMIC_ACQ_REL)
        & slab_bit(slab)) {
        /*
         * Taken since, and emptied by who did; or its last owner has marked it, and is about to let
         * it go.
         */
        if (__atomic_load_n(&image->remains[slab / 64], __ATOMIC_ACQUIRE) & slab_bit(slab))
            remains_look_again(image);
        return 0;
    }
    remains_forget(image, slab);
    ret = file_punch(&image->file, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    if (ret)
        remains_keep(image, slab);
    slab_untake(image, slab);
    return ret;
}

/*
 * Slabs of guest slabs beyond the end of what the guest sees have a claim too, one of those that
 * there are. False: nobody needs one.
 */
static bool claim_of(const struct pcow_image *image, uint64_t guest_slab, uint64_t *claim)
{
    const struct chain *chain = image->chain;

    if (!chain || !chain->guest_slabs)
        return false;
    *claim = guest_slab % chain->guest_slabs;
    return true;
}

static void hold(struct pcow_image *image, uint64_t guest_slab, bool begin)
{
    uint64_t claim;

    if (!claim_of(image, guest_slab, &claim))
        return;
    if (begin)
        chain_claim(image->chain, claim);
    else
        chain_release(image->chain, claim);
}

int reclaim_release(struct pcow_image *image, slab_condition *condition, const void *opaque)
{
    return slabs_release(image, condition, opaque, hold);
}

/* *waits: for something else, see remains_must_wait(). */
static int empty_owned(struct pcow_image *image, uint64_t slab, uint64_t guest_slab, bool *waits)
{
    uint64_t claim = 0;
    bool claimed = claim_of(image, guest_slab, &claim);
    struct interrupts interrupts = interrupts_disable();
    int ret = 0;

    if (claimed && __atomic_exchange_n(&image->chain->claim[claim], 1, __ATOMIC_ACQUIRE)) {
        remains_look_again(image);
        interrupts_restore(interrupts);
        return 0;
    }
    /* Under the claim it is still what it was, and stays so (see hold()), or it is left alone. */
    *waits = remains_must_wait(image, slab);
    if (slab_holds(image, slab, guest_slab) && !*waits) {
        remains_forget(image, slab);
        ret = remains_empty_pages(image, slab, false);
        if (ret)
            remains_keep(image, slab);
    }
    if (claimed)
        chain_release(image->chain, claim);
    interrupts_restore(interrupts);
    return ret;
}

/* False: not now, the mark is of a slab that has just become free, or will be one. */
static bool empty_marked(struct pcow_image *image, uint64_t slab)
{
    struct slab owner = slab_peek(image, slab);
    bool waits = false;
    int ret;

    if (owner.kind != OWNER_NONE && owner.kind != OWNER_DATA)
        return false;
    ret = owner.kind == OWNER_NONE ? empty_free(image, slab)
                                   : empty_owned(image, slab, owner.number, &waits);
    if (ret)
        __atomic_store_n(&image->remains_error, ret, __ATOMIC_RELAXED);
    return !waits;
}

/* The first one of [from, end), or end. */
static uint64_t find_marked(const struct pcow_image *image, uint64_t from, uint64_t end)
{
    for (uint64_t p = from; p < end; p = (p / 64 + 1) * 64) {
        uint64_t bits = __atomic_load_n(&image->remains[p / 64], __ATOMIC_ACQUIRE) >> p % 64;

        if (bits)
            return p + (unsigned)__builtin_ctzll(bits) < end ? p + (unsigned)__builtin_ctzll(bits)
                                                             : end;
    }
    return end;
}

/*
 * Of how many slabs from *next on the marks are to be looked at: one round for each time that
 * something is marked, and steps go on where the last one ended. What the file system does not take
 * stays marked: it must not keep the thread at it for ever, nor from what lies behind.
 */
static uint64_t begin_round(struct pcow_image *image, unsigned limit, uint64_t slabs,
                            uint64_t *next)
{
    uint64_t left;

    *next = 0;
    if (!limit) {
        __atomic_store_n(&image->remains_left, 0, __ATOMIC_RELAXED);
        (void)__atomic_exchange_n(&image->remains_due, false, __ATOMIC_ACQ_REL);
        return slabs;
    }
    if (__atomic_load_n(&image->remains_due, __ATOMIC_RELAXED)) {
        /*
         * In this order, as somebody may ask meanwhile whether there is anything, and a mark after
         * it begins another round.
         */
        __atomic_store_n(&image->remains_left, slabs, __ATOMIC_RELEASE);
        (void)__atomic_exchange_n(&image->remains_due, false, __ATOMIC_ACQ_REL);
    }
    if (image->remains_next < slabs)
        *next = image->remains_next;
    left = __atomic_load_n(&image->remains_left, __ATOMIC_RELAXED);
    return left < slabs ? left : slabs;
}

bool reclaim(struct pcow_image *image, unsigned limit)
{
    uint64_t slabs = image_slab_count(image), next, left;
    unsigned done = 0, looked_at = 0;

    if (!image->remains || !remains_are_due(image))
        return false;
    left = begin_round(image, limit, slabs, &next);
    while (left > 0) {
        uint64_t end = left < slabs - next ? next + left : slabs, p = find_marked(image, next, end);

        left -= p - next;
        next = p < slabs ? p : 0;
        if (p == end)
            continue;
        if (limit && looked_at++ == limit)
            break;
        done += empty_marked(image, p);
        left--;
        next = p + 1 < slabs ? p + 1 : 0;
    }
    if (limit) {
        image->remains_next = next;
        __atomic_store_n(&image->remains_left, left, __ATOMIC_RELEASE);
    }
    return done > 0;
}

/* What was prepared in a slab that has an owner and is not used. Returns pages. */
static unsigned trim_owned(struct pcow_image *image, uint64_t slab, keep_prepared_fn *keep,
                           void *opaque)
{
    struct slab owner = slab_peek(image, slab);
    uint64_t guest_slab = owner.number;
    struct interrupts interrupts;
    unsigned pages = 0;

    if (owner.kind != OWNER_DATA || page_set_empty(&image->prepared[slab]) || !image->chain
        || guest_slab >= image->chain->guest_slabs)
        return 0;
    interrupts = interrupts_disable();
    if (__atomic_exchange_n(&image->chain->claim[guest_slab], 1, __ATOMIC_ACQUIRE) == 0) {
        /* Under the claim it is still what it was, and stays so, or it is left alone. */
        if (slab_holds(image, slab, guest_slab) && !(keep && keep(opaque, guest_slab, slab)))
            pages = prepared_trim(image, slab);
        chain_release(image->chain, guest_slab);
    }
    interrupts_restore(interrupts);
    return pages;
}

uint64_t reclaim_prepared(struct pcow_image *image)
{
    uint64_t pages = 0;

    for (uint64_t p = 1; p < image_slab_count(image); p++)
        pages += trim_owned(image, p, NULL, NULL);
    return pages;
}

static bool trim_next(struct pcow_image *image, uint64_t *next, bool frozen, keep_prepared_fn *keep,
                      void *opaque)
{
    for (unsigned looked_at = 0; looked_at < MAX_LOOKED_AT && *next < image_slab_count(image);
         looked_at++) {
        uint64_t slab = (*next)++;

        if ((!frozen || slab_peek(image, slab).layer != image_active(image))
            && trim_owned(image, slab, keep, opaque) > 0)
            break;
    }
    return *next < image_slab_count(image);
}

bool reclaim_frozen(struct pcow_image *image, uint64_t *next)
{
    return trim_next(image, next, true, NULL, NULL);
}

bool reclaim_unused(struct pcow_image *image, uint64_t *next, keep_prepared_fn *keep, void *opaque)
{
    return trim_next(image, next, false, keep, opaque);
}

/* What the pool holds for the file. */
static uint64_t allocated_size(const struct pcow_image *image)
{
    struct stat st;

    return fstat(image->file.fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
}

/*
 * What a killed writer has left in slabs that are owned: the thread, which would look for that, may
 * have slept since the image was mapped. Whether any of it was there.
 */
static bool reclaim_what_was_left(struct pcow_image *image)
{
    uint64_t before = allocated_size(image);

    remains_find(image, true);
    reclaim(image, 0);
    return allocated_size(image) < before;
}

bool reclaim_for_space(struct pcow_image *image)
{
    bool found = __atomic_load_n(&image->remains_found, __ATOMIC_ACQUIRE)
                     ? reclaim(image, 0)
                     : reclaim_what_was_left(image);

    if (!image->ready)
        return found;
    found |= prepared_drop(image, 0) > 0;
    return reclaim_prepared(image) > 0 || found;
}

void reclaim_all(struct pcow_image *image)
{
    remains_find(image, false);
    /* Some may have waited for this. */
    remains_look_again(image);
    reclaim(image, 0);
}

int pcow_reclaim(pcow_image *image, uint64_t *reclaimed, struct pcow_error *error)
{
    uint64_t before, after;
    int ret = image_check_writable(image, error);

    if (reclaimed)
        *reclaimed = 0;
    if (ret)
        return ret;
    remains_find(image, true);
    /* Asked, not reckoned: a page that was valid need not have had a block. */
    before = allocated_size(image);
    __atomic_store_n(&image->remains_error, 0, __ATOMIC_RELAXED);
    remains_look_again(image);
    reclaim(image, 0);
    ret = __atomic_load_n(&image->remains_error, __ATOMIC_RELAXED);
    if (!ret)
        ret = file_settle(&image->file);
    after = allocated_size(image);
    if (reclaimed)
        *reclaimed = before > after ? before - after : 0;
    return ret ? error_set_errno(error, ret,
                                 "%s: blocks that are no longer used cannot be given back to the "
                                 "pool; whoever writes to the image "
                                 "next tries again",
                                 image->file.path)
               : 0;
}
