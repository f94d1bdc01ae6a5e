/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "image/datasum.h"
#include "image/mirror.h"
#include "image/prepare.h"
#include "image/remains.h"
#include "util/error.h"
#include "util/signals.h"

/* No free slab is below the hint, but for those that somebody is about to lower it for. */
static void lower_hint(struct pcow_image *image, uint64_t slab)
{
    uint64_t hint = __atomic_load_n(&image->free_hint, __ATOMIC_SEQ_CST);

    while (slab < hint
           && !__atomic_compare_exchange_n(&image->free_hint, &hint, slab, true, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST))
        ;
}

/*
 * From hint, as it was before the look, up to the slab all were seen in use. What became free since
 * is either lowered for by who did it, if he sees this, or seen here.
 */
static void raise_hint(struct pcow_image *image, uint64_t hint, uint64_t slab)
{
    uint64_t first = hint;

    if (!__atomic_compare_exchange_n(&image->free_hint, &hint, slab, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST))
        return;
    for (uint64_t p = first; p < slab; p = (p / 64 + 1) * 64) {
        uint64_t free = ~__atomic_load_n(&image->used[p / 64], __ATOMIC_SEQ_CST) >> p % 64
                                                                                        << p % 64;

        if (free && p / 64 * 64 + (unsigned)__builtin_ctzll(free) < slab) {
            lower_hint(image, p / 64 * 64 + (unsigned)__builtin_ctzll(free));
            return;
        }
    }
}

/* Claim a free slab; MAX_FILE_SLABS if the file can grow no further. Lock-free. */
static uint64_t claim_slab(struct pcow_image *image)
{
    uint64_t hint = __atomic_load_n(&image->free_hint, __ATOMIC_RELAXED);

    for (uint64_t w = hint / 64; w < MAX_FILE_SLABS / 64; w++) {
        uint64_t bits = __atomic_load_n(&image->used[w], __ATOMIC_ACQUIRE);

        while (~bits) {
            unsigned bit = (unsigned)__builtin_ctzll(~bits);
            uint64_t slab = w * 64 + bit;

            bits = __atomic_fetch_or(&image->used[w], UINT64_C(1) << bit, __ATOMIC_ACQ_REL);
            if (bits >> bit & 1)
                continue;            /* somebody was faster */
            if (slab_is_group_head(slab, image->file.heads))
                continue;            /* holds the tables of its group; stays marked as used */
            raise_hint(image, hint, slab + 1);
            return slab;
        }
    }
    return MAX_FILE_SLABS;
}

void slab_forget_prepared(struct pcow_image *image, uint64_t slab)
{
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (page_set_word(&image->prepared[slab], w))
            __atomic_store_n(&image->prepared[slab].word[w], 0, __ATOMIC_RELEASE);
}

static void unclaim_slab(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_and(&image->used[slab / 64], ~slab_bit(slab), __ATOMIC_SEQ_CST);
    lower_hint(image, slab);
}

void slab_untake(struct pcow_image *image, uint64_t slab)
{
    slab_forget_prepared(image, slab);
    unclaim_slab(image, slab);
}

static void raise_slab_count(struct pcow_image *image, uint64_t count)
{
    uint64_t seen = __atomic_load_n(&image->slab_count, __ATOMIC_RELAXED);

    while (seen < count
           && !__atomic_compare_exchange_n(&image->slab_count, &seen, count, true, __ATOMIC_RELEASE,
                                           __ATOMIC_RELAXED))
        ;
}

/*
 * The first store to a block costs a commit of the file system's journal: now, mostly in the thread
 * that prepares slabs, rather than in a trap. Others may be storing into the same page, so nothing
 * is written over.
 */
static int touch_table(struct pcow_image *image, uint64_t offset)
{
    uint64_t *word = file_address(&image->file, offset), value;
    /* What the medium has lost is an error here, and SIGBUS there. */
    int ret = word ? file_read(&image->file, offset, &value, sizeof value) : -errno;

    if (!ret)
        __atomic_fetch_or(word, 0, __ATOMIC_RELAXED);
    return ret;
}

int slab_allocate_tables(struct pcow_image *image, uint64_t slab)
{
    uint64_t page = slab / SLABS_PER_TABLE_PAGE, bit = UINT64_C(1) << (page % 64);
    int ret;

    if (slab_has_tables(image, slab))
        return 0;
    ret = file_allocate_metadata(&image->file, owner_offset(slab), sizeof(uint64_t));
    if (!ret)
        ret = file_allocate_metadata(&image->file, bitmap_offset(slab), sizeof(struct page_set));
    if (!ret && image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        ret = touch_table(image, owner_offset(slab));
    if (!ret && image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        ret = touch_table(image, bitmap_offset(slab));
    if (!ret)
        __atomic_fetch_or(&image->tables_ready[page / 64], bit, __ATOMIC_RELEASE);
    return ret;
}

static int store_empty_bitmap(struct pcow_image *image, uint64_t slab)
{
    static const struct page_set empty;
    struct page_set *valid = file_address(&image->file, bitmap_offset(slab));
    uint64_t since = failures_count(&image->file.persist.failures);
    int ret = valid ? mirror_mark(&image->file, bitmap_offset(slab), sizeof *valid) : -errno;

    if (!ret)
        ret = datasum_drop(&image->file, slab);
    if (!ret)
        ret = file_prepare_store(&image->file, valid, NULL, bitmap_offset(slab), sizeof *valid);
    if (ret)
        return ret;
    persist_bytes(&image->file.persist, valid, &empty, sizeof empty);
    return file_put_on_medium(&image->file, valid, sizeof *valid, since);
}

/* Rare: an interrupted operation has left it. */
static int clear_bitmap(struct pcow_image *image, uint64_t slab)
{
    int ret;

    mirror_begin_store(&image->file);
    ret = store_empty_bitmap(image, slab);
    mirror_end_store(&image->file);
    return ret;
}

int slab_take(struct pcow_image *image, uint64_t *slab)
{
    int ret = slab_take_unsettled(image, slab);

    if (ret)
        return ret;
    ret = file_settle(&image->file);
    if (ret)
        slab_untake(image, *slab);
    return ret;
}

int slab_take_unsettled(struct pcow_image *image, uint64_t *slab)
{
    uint64_t p = claim_slab(image);
    struct page_set valid;
    int ret;

    if (p == MAX_FILE_SLABS)
        return -EFBIG;
    ret = slabs_reach(image, p);
    if (ret) {
        unclaim_slab(image, p);
        return ret;
    }
    ret = file_grow(&image->file, (p + 1) << SLAB_BITS);
    if (!ret)
        ret = slab_allocate_tables(image, p);
    /*
     * Data that was dropped, or of a page that never became valid: it must not come up again as
     * what the guest finds in new memory.
     */
    if (!ret && slab_is_suspect(image, p)
        && !file_is_hole(&image->file, p << SLAB_BITS, PCOW_SLAB_SIZE))
        ret = file_punch(&image->file, p << SLAB_BITS, PCOW_SLAB_SIZE);
    lost_forget(&image->file, p << SLAB_BITS, PCOW_SLAB_SIZE);
    /* Not by a load: of a page that the disk cannot read it would be SIGBUS. */
    if (!ret)
        ret = file_read(&image->file, bitmap_offset(p), &valid, sizeof valid);
    if (!ret && !page_set_empty(&valid))
        ret = clear_bitmap(image, p);
    if (ret) {
        slab_untake(image, p);
        return ret;
    }
    remains_forget(image, p);
    memset(&image->valid[p], 0, sizeof image->valid[p]);
    slab_begin_backed(image, p);
    raise_slab_count(image, p + 1);
    *slab = p;
    return 0;
}

/* With one store, see slab_peek(). */
static void set_owner(struct slab *slab, struct slab owner)
{
    __atomic_store_n((owner_word *)&slab->layer, *(const owner_word *)&owner.layer,
                     __ATOMIC_RELEASE);
}

/* Where its owner word or bitmap is stored to; NULL with errno set. */
static void *table_address(struct pcow_image *image, uint64_t slab, uint64_t offset)
{
    int ret = slab_allocate_tables(image, slab);
    void *where = ret ? NULL : file_address_settled(&image->file, offset);

    if (where)
        ret = mirror_mark(&image->file, offset, sizeof(uint64_t));
    if (where && !ret)
        ret = datasum_drop(&image->file, slab);
    if (where && !ret)
        /* a bitmap is a line of one page */
        ret = file_prepare_store(&image->file, where, NULL, offset, sizeof(uint64_t));
    if (ret)
        errno = -ret;
    return ret ? NULL : where;
}

static int publish(struct pcow_image *image, uint64_t slab, struct owner owner, bool lazily)
{
    uint64_t *where = table_address(image, slab, owner_offset(slab));
    int ret = where ? file_store64_at(&image->file, where, owner_offset(slab), owner_encode(owner),
                                      lazily)
                    : -errno;

    if (ret)
        return ret;
    set_owner(&image->slabs[slab], (struct slab){.layer = owner.layer,
                                                 .number = owner.number & ((1u << 30) - 1),
                                                 .kind = (unsigned)owner.kind & 3});
    if (owner.kind == OWNER_TABLE)
        image->table[owner.number] = slab;
    return 0;
}

int slab_publish(struct pcow_image *image, uint64_t slab, struct owner owner, bool lazily)
{
    int ret;

    mirror_begin_store(&image->file);
    ret = publish(image, slab, owner, lazily);
    mirror_end_store(&image->file);
    return ret;
}

static int store_valid(struct pcow_image *image, uint64_t slab, const struct page_set *valid,
                       bool lazily)
{
    struct page_set *where = table_address(image, slab, bitmap_offset(slab));
    uint64_t since = failures_count(&image->file.persist.failures);
    int ret;

    if (!where)
        return -errno;
    /* Who takes pages away punches their blocks out, and perhaps those of their neighbours. */
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (page_set_word(&image->valid[slab], w) & ~valid->word[w]) {
            slab_forget_prepared(image, slab);
            break;
        }
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (page_set_word(where, w) != valid->word[w])
            persist_word(&image->file.persist, &where->word[w], valid->word[w]);
    ret = lazily && image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
        ? 0 : file_put_on_medium(&image->file, where, sizeof *where, since);
    if (ret)
        return ret;
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        __atomic_store_n(&image->valid[slab].word[w], valid->word[w], __ATOMIC_RELEASE);
    return 0;
}

int slab_store_valid(struct pcow_image *image, uint64_t slab, const struct page_set *valid,
                     bool lazily)
{
    int ret;

    mirror_begin_store(&image->file);
    ret = store_valid(image, slab, valid, lazily);
    mirror_end_store(&image->file);
    return ret;
}

static void set_free(struct pcow_image *image, uint64_t slab, slab_hold *hold)
{
    struct slab owner = image->slabs[slab];
    bool data = owner.kind == OWNER_DATA;

    if (data)
        hold(image, owner.number, true);
    set_owner(&image->slabs[slab], (struct slab){0});
    image->slabs[slab].next = 0;
    remains_leave(image, slab, data ? page_set_count(&image->valid[slab]) : 0);
    slab_untake(image, slab);
    if (data)
        hold(image, owner.number, false);
}

/*
 * What could not be released stays what it is in memory, and in the file too: the layer may be one
 * that goes on, and what is stored to a slab that is its own there is not told again who owns it.
 */
static void restore_owners(struct pcow_image *image, uint64_t from, uint64_t to)
{
    for (uint64_t p = from; p < to; p++) {
        const struct slab owner = slab_peek(image, p);
        uint64_t word =
            owner_encode((struct owner){(enum owner_kind)owner.kind, owner.layer, owner.number});
        uint64_t *where =
            owner.kind != OWNER_NONE ? table_address(image, p, owner_offset(p)) : NULL;

        /* The file says that it is free, or may. */
        if (owner.kind != OWNER_NONE && !where)
            file_become_unsure(&image->file);
        if (where && *where != word
            && file_store64_at(&image->file, where, owner_offset(p), word, true))
            file_become_unsure(&image->file);
    }
}

static bool fulfils(const struct pcow_image *image, uint64_t slab, slab_condition *condition,
                    const void *opaque)
{
    struct slab owner = slab_peek(image, slab);

    return owner.kind != OWNER_NONE && condition(image, &owner, opaque);
}

/* Of all at once, rather than of each before its owner word is stored. */
static int drop_checksums(struct pcow_image *image, uint64_t first, uint64_t end,
                          slab_condition *condition, const void *opaque)
{
    int ret = 0;

    while (first < end && !fulfils(image, first, condition, opaque))
        first++;
    while (first < end && !fulfils(image, end - 1, condition, opaque))
        end--;
    ret = datasum_look(&image->file, first, end);
    for (uint64_t p = first; p < end && ret == 0; p++)
        if (datasum_may_be(&image->file, p) && fulfils(image, p, condition, opaque))
            ret = datasum_drop_lazily(&image->file, p);
    return ret || !image->file.summed ? ret : datasum_settle(&image->file, first, end);
}

/*
 * Says in the bitmap of a slab, the owner word of which is 0 on the medium, whose it was: after a
 * kill its blocks are a mere leak then, see check/free.c. A help only: without it they are
 * doubtful.
 */
static void mark_released(struct pcow_image *image, uint64_t slab)
{
    const struct slab owner = slab_peek(image, slab);
    const struct page_set mark = {
        {RELEASED_MARK,
         owner_encode((struct owner){(enum owner_kind)owner.kind, owner.layer, owner.number})}};
    struct page_set *where = table_address(image, slab, bitmap_offset(slab));

    if (!where)
        return;
    persist_bytes(&image->file.persist, where, &mark, sizeof mark);
    if (image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
        persist_range(&image->file.persist, where, sizeof mark);
}

/*
 * The file says that they are free. Not interrupted while one is held, see util/signals.h, and that
 * is asked of the kernel once for all of them.
 */
static void set_all_free(struct pcow_image *image, uint64_t from, uint64_t to,
                         slab_condition *condition, const void *opaque, slab_hold *hold)
{
    struct interrupts interrupts = interrupts_disable();

    for (uint64_t p = from; p < to; p++)
        if (fulfils(image, p, condition, opaque)) {
            mark_released(image, p);
            set_free(image, p, hold);
        }
    interrupts_restore(interrupts);
}

/* The slabs [first, end) of one group, whose owner words lie together. */
static int release_in_group(struct pcow_image *image, uint64_t first, uint64_t end,
                            slab_condition *condition, const void *opaque, slab_hold *hold)
{
    uint64_t from = 0, to = 0, since = failures_count(&image->file.persist.failures);
    int ret = drop_checksums(image, first, end, condition, opaque);

    for (uint64_t p = first; p < end && ret == 0; p++)
        if (fulfils(image, p, condition, opaque)) {
            uint64_t *where = table_address(image, p, owner_offset(p));

            ret = where ? file_store64_at(&image->file, where, owner_offset(p), 0, true) : -errno;
            from = from ? from : p;
            to = p + 1;
        }
    if (!ret && to)
        ret = file_sync_range(&image->file, owner_offset(from), (to - from) * sizeof(uint64_t),
                              since);
    if (ret)
        restore_owners(image, from, to);
    else if (to)
        set_all_free(image, from, to, condition, opaque, hold);
    return ret;
}

int slabs_release(struct pcow_image *image, slab_condition *condition, const void *opaque,
                  slab_hold *hold)
{
    uint64_t count = image_slab_count(image);
    int ret = 0;

    mirror_begin_store(&image->file);
    for (uint64_t group = 0; group < count && ret == 0; group += SLABS_PER_GROUP)
        ret = release_in_group(image, group + image->file.heads,
                               group + SLABS_PER_GROUP < count ? group + SLABS_PER_GROUP : count,
                               condition, opaque, hold);
    mirror_end_store(&image->file);
    return ret;
}
