/* SPDX-License-Identifier: BSD-3-Clause */
/* Which file shows at which address, in as few memory mappings as possible. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "chain/index.h"
#include "image/prepare.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/error.h"
#include "util/map_at.h"

/*
 * Were all these pages handed out as prepared ones, and nothing is known to have happened to their
 * blocks since?
 */
static bool is_settled(const struct pcow_image *image, uint64_t offset, size_t length)
{
    for (uint64_t end = offset + length; offset < end;) {
        unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB), last = PAGES_PER_SLAB;

        if (!prepared_run(image, offset >> SLAB_BITS, page, &last))
            return false;
        offset += (last - page) * PCOW_PAGE_SIZE;
    }
    return true;
}

static int map_file(void *address, size_t length, const struct pcow_image *file, uint64_t offset,
                    bool write, int fixed)
{
    bool settled = write && file->file.persist.fixed_blocks && is_settled(file, offset, length);
    int ret = file_map(&file->file, address, length, offset,
                       !write    ? FILE_MAP_LOADS
                       : settled ? FILE_MAP_SETTLED
                                 : FILE_MAP_STORES,
                       fixed);

    if (ret)
        return ret;
    /*
     * Without readahead the page cache holds single pages. A store to one page of a larger folio
     * makes the file system reserve blocks for all of it. What others read is another matter: see
     * layout_prepare_store().
     */
    if (file->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        madvise(address, length, MADV_RANDOM);
    return 0;
}

/*
 * Private and read-only: loads see the kernel's zero page, without a trap and without memory;
 * stores trap.
 */
static int map_absent(void *address, size_t length, int fixed)
{
    return map_at(address, length, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed,
                  -1, 0);
}

/* A stretch of the range that one mapping can serve. */
struct piece {
    uint64_t from, to;                 /* guest offsets */
    unsigned level;                    /* 0: absent */
    uint64_t offset;
    bool store;
};

static int map_piece(struct pcow_map *map, const struct piece *piece)
{
    const struct pcow_image *file = piece->level ? map->image->chain->file[piece->level] : NULL;
    void *address = map->address + piece->from;
    size_t length = piece->to - piece->from;
    int fixed, ret;

    if (length == 0)
        return 0;
    fixed = reserve_next(map, piece->from, piece->to, file && file->file.lost_pages.any);
    if (fixed < 0)
        return fixed;
    ret = file ? map_file(address, length, file, piece->offset, piece->store, fixed)
               : map_absent(address, length, fixed);
    if (!ret)
        reserve_taken(map, piece->to);
    return ret;
}

/*
 * Own pages that may have no blocks are mapped as those of an older layer are, and the first store
 * traps, see resolve_write().
 */
static bool may_store(const struct pcow_map *map, const struct place *place)
{
    return place->own && map->image->file.writable
           && slab_is_backed(map->image, place->offset >> SLAB_BITS);
}

static bool continues(const struct pcow_map *map, const struct piece *piece,
                      const struct place *place)
{
    unsigned level = place->present ? place->level : 0;

    return piece->level == level && piece->store == may_store(map, place)
        && (level == 0 || place->offset == piece->offset + (piece->to - piece->from));
}

static void set_pieces(struct pcow_map *map, struct slab_map *slab, unsigned pieces)
{
    vmas_begin(map, slab);
    vmas_add(map, (int)pieces - (int)slab->pieces);
    slab->pieces = (uint16_t)pieces;
}

void layout_recount(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    if (!slab_is_unmapped(&slab->status) && slab->pieces > 1)
        set_pieces(map, slab, layout_count_pieces(map, guest_slab));
}

/*
 * Whoever relies on pages that were mapped for stores (a kernel that asked once) has to ask again.
 */
static void withdraw(struct pcow_map *map)
{
    __atomic_store_n(&map->withdrawn, true, __ATOMIC_SEQ_CST);
    events_wake(&map->events);
}

/* It is mapped as the chain has it, or (UNMAPPED) not at all. */
static void remember(struct pcow_map *map, uint64_t guest_slab, enum slab_state state,
                     unsigned pieces)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    struct page_set own = {{0}};
    bool withdrawn = false;

    set_pieces(map, slab, pieces);
    slab_refresh(&slab->status);
    layout_enter(map, guest_slab, state);
    if (state == SLAB_MAPPED && map->image->file.writable
        && map->image->view == image_active(map->image))
        chain_own_backed(map->image, guest_slab, &own);
    lost_take_out(map, guest_slab, &own);
    /* Looked at without the claim, so no page may disappear from it for a moment. */
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
        /*
         * Stored to, and now mapped for loads: a page that was backed alone, in a slab of which
         * others are not.
         */
        if (slab->writable.word[w] & ~own.word[w]) {
            image_note_stores(map->image);
            withdrawn = true;
        }
        __atomic_store_n(&slab->writable.word[w], own.word[w], __ATOMIC_RELEASE);
    }
    if (withdrawn)
        withdraw(map);
}

/* Extend the piece under construction by one slab, mapping what is complete. */
static int add_slab(struct pcow_map *map, uint64_t guest_slab, struct piece *piece)
{
    unsigned pages = layout_pages(map, guest_slab);

    index_update(map->image, guest_slab);
    for (unsigned page = 0; page < pages;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);
        uint64_t from = (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;

        if (!continues(map, piece, &place) || piece->to != from) {
            int ret = map_piece(map, piece);

            if (ret)
                return ret;
            *piece = (struct piece){from, from, place.present ? place.level : 0, place.offset, may_store(map, &place)};
        }
        piece->to = from + place.pages * PCOW_PAGE_SIZE;
        page += place.pages;
    }
    return 0;
}

/* All that is not used, up to there. */
static int add_absent(struct pcow_map *map, uint64_t to, struct piece *piece)
{
    if (piece->to >= to)
        return 0;
    if (piece->level) {
        int ret = map_piece(map, piece);

        if (ret)
            return ret;
        *piece = (struct piece){.from = piece->to, .to = piece->to};
    }
    piece->to = to;
    return 0;
}

static uint64_t count_used(const struct chain *chain)
{
    uint64_t count = 0;

    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs;
         v = chain_next_used(chain, v + 1))
        count++;
    return count;
}

int layout_map_slab(struct pcow_map *map, uint64_t guest_slab)
{
    struct piece piece = {0};
    int ret = slab_leave(map, guest_slab);

    if (ret)
        return ret;
    ret = add_slab(map, guest_slab, &piece);
    if (!ret)
        ret = map_piece(map, &piece);
    if (!ret)
        remember(map, guest_slab, SLAB_MAPPED, layout_count_pieces(map, guest_slab));
    else
        /* What is half mapped would trap for ever, or be believed to be there. */
        layout_unmap_slab(map, guest_slab);
    return ret;
}

/*
 * Every page is own and writable, and all of them lie in one piece of the file: adjacent mappings
 * have become one.
 */
static bool is_one_piece(const struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pages = layout_pages(map, guest_slab);

    return page_set_run_end(&map->slabs[guest_slab].writable, 0, pages) == pages
        && chain_find(map->image, guest_slab, 0, pages).pages == pages;
}

static int unmap(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t from = guest_slab << SLAB_BITS;

    return reserve_again(map, from, from + layout_pages(map, guest_slab) * PCOW_PAGE_SIZE);
}

void layout_unmap_slab(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    bool unmapped;

    /*
     * Who has a system call load from it looks at this without the claim. Who asks for a slab that
     * is kept relies on writable, too, once it is not: so that one comes last.
     */
    if (slab_can_be_loaded_from(&slab->status))
        layout_enter(map, guest_slab, SLAB_UNMAPPED);
    /*
     * A flush that is under way may ask for pages at which nothing is mapped any more, and must not
     * believe the answer.
     */
    if (!page_set_empty(&slab->writable))
        image_note_stores(map->image);
    /*
     * At the limit of mappings this one may fail as well. Then any page may be mapped as it was
     * before, for stores too, or not at all: a trap must map it anew, and nothing may rely on what
     * is written here.
     */
    unmapped = unmap(map, guest_slab) == 0;
    if (unmapped)
        set_pieces(map, slab, 1);
    else
        __atomic_store_n(&map->unknown, true, __ATOMIC_SEQ_CST);
    /* The next one finds what was stored to until now by these sets. */
    if (!page_set_empty(&slab->writable)) {
        image_note_stores(map->image);
        withdraw(map);
    }
    memset(&slab->writable, 0, sizeof slab->writable);
    layout_enter(map, guest_slab, unmapped ? SLAB_UNMAPPED : SLAB_UNKNOWN);
    if (unmapped)
        slab_refresh(&slab->status);
    else
        slab_lose_track(&slab->status);
}

int layout_catch_up(struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_status *status = &map->slabs[guest_slab].status;
    int ret = slab_is_stale(status) ? layout_map_slab(map, guest_slab) : 0;

    /* If it fails the slab is unmapped, or nobody knows what is mapped. */
    return slab_is_stale(status) ? ret : 0;
}

/*
 * Entries of 4 KiB stay as long as the mappings do that they were made for; one of 2 MiB can only
 * come into an empty table. So a slab that has become one piece is mapped once more. Who stores to
 * it meanwhile, vCPU or thread, finds the same page of the file under the old mapping or under the
 * new one: the kernel puts one in the other's place under its lock, and takes back what KVM has
 * derived from the old one before. Every page has blocks, or it would not be in writable.
 */
static int map_whole(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t offset = chain_find(map->image, guest_slab, 0, 1).offset;

    /*
     * If it fails, the old mapping may be gone. The next access maps what is there, and says what
     * is wrong.
     */
    if (map_file(map->address + (guest_slab << SLAB_BITS),
                 layout_pages(map, guest_slab) * PCOW_PAGE_SIZE, map->image, offset, true,
                 MAP_FIXED))
        return layout_map_slab(map, guest_slab);
    return 0;
}

/*
 * The kernel refused to map them. It may have taken away what was there, or not: a trap must map it
 * anew, and nothing may rely on either.
 */
static void forget_pages(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    bool withdrawn = false;

    slab_grow_stale(&slab->status);
    /*
     * Around a lost page it takes several system calls: those before the one that failed have
     * mapped what is in no set.
     */
    if (map->lost)
        __atomic_store_n(&map->unknown, true, __ATOMIC_SEQ_CST);
    for (unsigned page = first; page < first + count; page++)
        if (page_set_has(&slab->writable, page)) {
            __atomic_store_n(&map->unknown, true, __ATOMIC_SEQ_CST);
            __atomic_fetch_and(&slab->writable.word[page / 64], ~(UINT64_C(1) << (page % 64)),
                               __ATOMIC_RELEASE);
            withdrawn = true;
        }
    if (withdrawn)
        withdraw(map);
}

/*
 * Is the page before / behind the run mapped for stores, in the same mapping if the kernel can make
 * one of both?
 */
static bool continues_at(const struct pcow_map *map, uint64_t guest_slab, unsigned page,
                         uint64_t offset)
{
    return page < PAGES_PER_SLAB && page_set_has(&map->slabs[guest_slab].writable, page)
        && chain_find(map->image, guest_slab, page, 1).offset == offset;
}

/*
 * By how many mappings this run makes more of them at most: two, if it cuts one with itself
 * between. Not where a neighbour takes it in; if the kernel does not, as flags differ (MAP_SYNC,
 * madvise() by the program), there is at least nothing left on that side.
 */
static unsigned more_pieces(const struct pcow_map *map, uint64_t guest_slab, unsigned page,
                            const struct place *place)
{
    return 2u - continues_at(map, guest_slab, page - 1, place->offset - PCOW_PAGE_SIZE)
           - continues_at(map, guest_slab, page + place->pages,
                          place->offset + place->pages * PCOW_PAGE_SIZE);
}

static int map_own_run(struct pcow_map *map, uint64_t guest_slab, unsigned page,
                       const struct place *place)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint8_t *address = map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;
    const struct slab_keeper *keeper =
        slab_is_kept(&slab->status) ? slab_keeper(map, guest_slab) : NULL;
    bool shown = keeper && keeper->shows(map, guest_slab, page, place->offset);
    unsigned pieces = slab->pieces + (shown ? 0 : more_pieces(map, guest_slab, page, place));
    int ret;

    /* A merge has given the layer another file slab. */
    if (keeper && !shown)
        return layout_map_slab(map, guest_slab);
    ret = shown ? 0
                : map_file(address, place->pages * PCOW_PAGE_SIZE, map->image, place->offset, true,
                           MAP_FIXED);
    if (ret) {
        forget_pages(map, guest_slab, page, place->pages);
        return ret;
    }
    set_pieces(map, slab, pieces < PAGES_PER_SLAB ? pieces : PAGES_PER_SLAB);
    for (unsigned w = page / 64; !map->lost && w <= (page + place->pages - 1) / 64; w++)
        __atomic_fetch_or(&slab->writable.word[w], page_range_word(page, place->pages, w),
                          __ATOMIC_RELEASE);
    for (unsigned p = page; map->lost && p < page + place->pages; p++)
        if (!lost_is_in(&map->image->file, place->offset + (p - page) * PCOW_PAGE_SIZE,
                        PCOW_PAGE_SIZE))
            __atomic_fetch_or(&slab->writable.word[p / 64], UINT64_C(1) << (p % 64),
                              __ATOMIC_RELEASE);
    return 0;
}

/*
 * Is a page own that is mapped to where an older layer holds it? Also true of one that is mapped
 * where it is own, but for loads.
 */
static bool is_stale(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    struct page_set own;

    chain_own_pages(map->image, guest_slab, &own);
    lost_take_out(map, guest_slab, &own);
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (own.word[w] & ~page_set_word(&slab->writable, w))
            return true;
    return false;
}

int layout_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count,
               uint64_t *copied)
{
    uint64_t zeroed = 0, copies = 0;
    int ret;

    /* Whatever comes of it: only who has mapped what is own takes this back. */
    slab_grow_stale(&map->slabs[guest_slab].status);
    ret = chain_own(map->image, guest_slab, first, count, NULL, &copies, &zeroed);
    __atomic_fetch_add(&map->stats.pages_copied, copies, __ATOMIC_RELAXED);
    __atomic_fetch_add(&map->stats.pages_zeroed, zeroed, __ATOMIC_RELAXED);
    if (copied)
        *copied += copies;
    return ret;
}

int layout_own_whole(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t copied = 0;
    int ret = layout_own(map, guest_slab, 0, layout_pages(map, guest_slab), &copied);

    if (!ret && copied)
        __atomic_fetch_add(&map->stats.slabs_promoted, 1, __ATOMIC_RELAXED);
    return ret;
}

int layout_map_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    unsigned pages = layout_pages(map, guest_slab), largest = 0;

    for (unsigned page = first; page < first + count;) {
        unsigned end = page_set_run_end(&slab->writable, page, first + count);

        /*
         * What is mapped for stores stays as it is: other CPUs may be using it, and would have to
         * be interrupted; vCPUs under KVM would leave the guest.
         */
        if (!page_set_has(&slab->writable, page)) {
            struct place place = chain_find(map->image, guest_slab, page, end - page);
            int ret = place.own ? map_own_run(map, guest_slab, page, &place) : -EIO;

            if (ret)
                return ret;
            end = page + place.pages;
            largest = place.pages > largest ? place.pages : largest;
        }
        page = end;
    }
    if (is_one_piece(map, guest_slab)) {
        set_pieces(map, slab, 1);
        slab_refresh(&slab->status);
        if (slab_is_kept(&slab->status))
            slab_keeper(map, guest_slab)->whole(map, guest_slab);
        else
            layout_enter(map, guest_slab, SLAB_MAPPED);
        if (map->image->file.huge && largest < pages)
            return map_whole(map, guest_slab);
    } else if (slab_age(&slab->status) == SLAB_STALE && !is_stale(map, guest_slab)) {
        slab_refresh(&slab->status);
    }
    return 0;
}

int layout_prepare_store(const struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    struct page_set mapped = {{0}};
    struct place place;

    if (map->image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
        return 0;
    place = chain_find(map->image, guest_slab, page, 1);
    if (!place.own)
        return 0;
    if (slab_state(&slab->status) == SLAB_BOUNCE)
        mapped = slab->writable;       /* the rest is a copy, see bounce.c */
    else
        page_set_add_range(&mapped, 0, PAGES_PER_SLAB);
    return file_prepare_store(&map->image->file,
                              map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                              &mapped, place.offset, PCOW_PAGE_SIZE);
}

/*
 * Nothing is mapped; the first access, load or store, brings the whole slab into the active layer
 * as one piece, or into memory, see bounce.c.
 */
static int map_nothing(struct pcow_map *map, uint64_t guest_slab)
{
    remember(map, guest_slab, SLAB_UNMAPPED, 1);
    return unmap(map, guest_slab);
}

bool layout_is_to_be_copied(const struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pages = layout_pages(map, guest_slab);

    if (!map->image->file.writable || !image_copies_on_read(map->image))
        return false;
    for (unsigned page = 0; page < pages;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);

        if (place.present && !place.own)
            return true;
        page += place.pages;
    }
    return false;
}

int layout_map_all(struct pcow_map *map, struct pcow_error *error)
{
    const struct chain *chain = map->image->chain;
    uint64_t left = count_used(chain);
    struct piece piece = {0};
    int ret = 0;

    /* Nothing is mapped yet: one stretch. */
    if (map->slabs_counted == 0)
        vmas_add(map, 1);
    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs && ret == 0;
         v = chain_next_used(chain, v + 1), left--) {
        unsigned pieces = layout_count_pieces(map, v);
        /*
         * Every slab needs one at least; a slab of many pieces may have them while what is left
         * suffices for the others.
         */
        uint64_t reserved = 2 * left < chain->guest_slabs - v ? 2 * left : chain->guest_slabs - v;

        ret = add_absent(map, v << SLAB_BITS, &piece);
        if (ret)
            break;
        if (policy_is_too_much(pieces, vmas_used(map), reserved, map->vma_budget)
            || layout_is_to_be_copied(map, v)) {
            ret = map_piece(map, &piece);
            piece = (struct piece){.from = (v + 1) << SLAB_BITS, .to = (v + 1) << SLAB_BITS};
            if (!ret)
                ret = map_nothing(map, v);
            continue;
        }
        ret = add_slab(map, v, &piece);
        remember(map, v, SLAB_MAPPED, pieces);
    }
    if (!ret)
        ret = add_absent(map, map->size, &piece);
    if (!ret)
        ret = map_piece(map, &piece);
    return ret ? error_set_errno(error, ret,
                                 "cannot map %s (vm.max_map_count may be too low for it)",
                                 map->image->file.path)
               : 0;
}

/* ---- after a revert, see lists.c ------------------------------------------------------------- */

int layout_map_changed(struct pcow_map *map, const struct layout_lists *lists)
{
    const struct chain *chain = map->image->chain;
    struct piece piece = {0};
    int ret = 0;

    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs && ret == 0;
         v = chain_next_used(chain, v + 1)) {
        struct slab_map *slab = &map->slabs[v];
        unsigned pieces;

        slab->faults = slab->recent = slab->queued = slab->grown = 0;
        slab->run_end = slab->run = 0;
        if (layout_is_as_noted(map, lists, v))
            continue;
        pieces = layout_count_pieces(map, v);
        if (policy_is_too_much(pieces, vmas_used(map), 0, map->vma_budget)) {
            ret = map_nothing(map, v);
            continue;
        }
        ret = add_slab(map, v, &piece);
        remember(map, v, SLAB_MAPPED, pieces);
    }
    return ret ? ret : map_piece(map, &piece);
}
