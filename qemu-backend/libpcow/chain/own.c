/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Copy-on-write and expansion: making pages valid in the active layer. This runs in signal
 * handlers: no allocation, no lock but the claim of the guest slab, and only system calls that are
 * safe there.
 */
#include <errno.h>
#include <string.h>
#include <sys/statvfs.h>

#include "chain/chain.h"
#include "chain/reclaim.h"
#include "image/prepare.h"
#include "image/remains.h"
#include "util/error.h"

#define PIECE 512u                     /* on the stack of a signal handler */
/* Of the pool, for what the file system itself wants, and for who is faster. */
#define LEFT_FOR_OTHERS (UINT64_C(1) << 20)

/*
 * A file slab of the active layer for this guest slab: the first on the list, or a new one that has
 * no owner yet.
 */
static int target_slab(struct pcow_image *image, uint64_t guest_slab, uint64_t *slab, bool *is_new)
{
    slab_ref head = image->chain->head[guest_slab];

    if (head && slab_ref_level(head) == image->chain->levels
        && image->slabs[slab_ref_slab(head)].layer == image_active(image)) {
        *slab = slab_ref_slab(head);
        *is_new = false;
        return slab_allocate_tables(image, *slab);
    }
    *is_new = true;
    return slab_take_ready(image, slab);
}

/*
 * Zeros: blocks that are allocated and hold nothing. *hides: they held something, and must not be
 * seen again.
 */
static int fill_with_zeros(struct pcow_image *image, uint64_t slab, uint64_t offset,
                           uint64_t length, bool new_slab, bool *hides)
{
    /*
     * The blocks of a page that is not valid may hold the remains of an interrupted copy, or of a
     * page that a merge has taken away. slab_take() has already emptied a slab it handed out.
     */
    bool suspect =
        !new_slab && slab_is_suspect(image, slab) && !file_is_hole(&image->file, offset, length);
    int ret = 0;

    *hides |= suspect;
    if (suspect && image->file.persist.persistence != PCOW_PERSISTENCE_VOLATILE) {
        /*
         * Class pmem: durable at once, where a hole would need a commit of the file system. Class
         * page-cache: no hole beside pages that are stored to, see remains.h.
         */
        static const char zeros[PCOW_PAGE_SIZE] __attribute__((aligned(64)));

        for (uint64_t done = 0; done < length && ret == 0; done += sizeof zeros)
            ret = file_write_data(&image->file, offset + done, zeros, sizeof zeros);
        return ret;
    }
    if (suspect)
        ret = file_punch(&image->file, offset, length);
    return ret ? ret : file_allocate_written(&image->file, offset, length);
}

/*
 * A system call for one page is cheaper than a page fault on its source, and dearer than loads for
 * which there is none. It is also the way out where a load fails that would have had to take a
 * block, see copy_by_reading().
 */
static int copy_page(struct pcow_image *image, void *window, const void *source,
                     struct file *from_file, uint64_t from)
{
    if (file_is_filled(from_file, from)
        && persist_copy(&image->file.persist, window, source, PCOW_PAGE_SIZE) == 0) {
        persist_fence(&image->file.persist);
        return 0;
    }
    return file_read(from_file, from, window, PCOW_PAGE_SIZE)
               ? -EIO
               : persist_range(&image->file.persist, window, PCOW_PAGE_SIZE);
}

/*
 * Into blocks that are there, through the window: no lock of the file system, and no system call
 * for what a page table has already.
 */
static int copy_to_prepared(struct pcow_image *image, uint64_t to, struct file *from_file,
                            uint64_t from, const void *data, size_t length)
{
    void *window = file_address_settled(&image->file, to);
    const void *source = data ? data : file_address(from_file, from);
    int ret;

    if (!window || !source)
        return -ENOMEM;
    if (!data && length == PCOW_PAGE_SIZE && !image->file.persist.observer)
        return copy_page(image, window, source, from_file, from);
    /*
     * What is unreadable is SIGBUS in the copy, see pcow_serve_sigbus(). To ask the kernel before
     * (MADV_POPULATE_READ) takes 0.17 us a page that is mapped already, about as long as copying
     * it.
     */
    ret = persist_copy(&image->file.persist, window, source, length);
    persist_fence(&image->file.persist);
    return ret;
}

/*
 * Not through a mapping of the source: on tmpfs a load from a hole, as a page of zeros may be,
 * takes a block. A full pool has none, which is an unreadable source to the kernel if it looks at
 * that first (Linux 6.1 does). Reading takes none, and what is unreadable stays so.
 */
static int copy_by_reading(struct pcow_image *image, uint64_t to, struct file *from_file,
                           uint64_t from, uint64_t length)
{
    char piece[PIECE];
    int ret = 0;

    for (uint64_t done = 0; done < length && ret == 0; done += sizeof piece) {
        ret = file_read(from_file, from + done, piece, sizeof piece) ? -EIO : 0;
        if (!ret)
            ret = file_write_data(&image->file, to + done, piece, sizeof piece);
    }
    return ret;
}

/* Of pages that are not valid yet nothing can be lost: what is written can be read again. */
static int fill_run(struct pcow_image *image, uint64_t slab, unsigned page,
                    const struct place *from, const char *data, bool new_slab, bool *hides)
{
    uint64_t to = (slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;
    uint64_t length = from->pages * PCOW_PAGE_SIZE;
    bool prepared = page_set_has(&image->prepared[slab], page);
    struct file *from_file = from->present ? &image->chain->file[from->level]->file : NULL;
    const void *source = data;
    int ret = 0;

    if (!data && !from->present) {
        if (!prepared) {
            ret = fill_with_zeros(image, slab, to, length, new_slab, hides);
            if (!ret)
                lost_forget(&image->file, to, length);
        }
        return ret;
    }
    if (prepared)
        return copy_to_prepared(image, to, from_file, from->offset, data, length);
    if (!data) {
        source = file_address(from_file, from->offset);
        if (!source)
            return -ENOMEM;
    }
    ret = file_write_data(&image->file, to, source, length);
    if (ret == -EIO && !data)
        ret = copy_by_reading(image, to, from_file, from->offset, length);
    if (!ret)
        lost_forget(&image->file, to, length);
    return ret;
}

/* Let the guest slab's list begin with the new slab. Its owner word is durable by now. */
static void push_slab(struct pcow_image *image, uint64_t guest_slab, uint64_t slab)
{
    slab_ref *head = &image->chain->head[guest_slab];

    image->slabs[slab].next = *head;
    __atomic_store_n(head, slab_ref_make(image->chain->levels, slab), __ATOMIC_RELEASE);
}

static int publish(struct pcow_image *image, uint64_t guest_slab, uint64_t slab, bool is_new,
                   const struct page_set *filled)
{
    struct page_set valid = image->valid[slab];
    int ret;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        valid.word[w] |= filled->word[w];
    ret = slab_store_valid(image, slab, &valid, true);
    if (ret || !is_new)
        return ret;
    ret = slab_publish(image, slab,
                       (struct owner){OWNER_DATA, image_active(image), (uint32_t)guest_slab}, true);
    if (!ret)
        push_slab(image, guest_slab, slab);
    return ret;
}

static void count_up(uint64_t *counter, uint64_t by)
{
    if (counter)
        *counter += by;
}

/* Blocks that nobody knows of any more, of pages that are not valid: they are to be given back. */
static void forget_prepared(struct pcow_image *image, uint64_t slab)
{
    slab_forget_prepared(image, slab);
    remains_leave(image, slab, 0);
}

/* What pages are to become valid, and with what. */
struct wanted {
    struct page_set pages;
    const char *data;                  /* of first and those behind it; NULL: what they read as */
    unsigned first;
    bool zeros;                        /* nothing, without blocks */
};

/* What has become of them. */
struct filling {
    uint64_t slab;
    bool is_new, hides, all_prepared;
    struct page_set filled;
    uint64_t copies, zeros;
};

/*
 * Pages of zeros without blocks. What the blocks hold is gone before the pages count: the caller
 * settles that.
 */
static int empty_run(struct pcow_image *image, uint64_t offset, uint64_t length)
{
    lost_forget(&image->file, offset, length);
    return file_is_hole(&image->file, offset, length) ? 0
                                                      : file_punch(&image->file, offset, length);
}

/*
 * What a run has taken that then did not fit could not be given back where remains have to wait,
 * and the one page that is needed would find nothing.
 */
static bool fits(const struct pcow_image *image, uint64_t slab, unsigned pages)
{
    struct statvfs fs;

    return pages == 1 || !remains_must_wait(image, slab) || fstatvfs(image->file.fd, &fs)
           || fs.f_bavail * fs.f_frsize >= pages * PCOW_PAGE_SIZE + LEFT_FOR_OTHERS;
}

/*
 * Of the pages from one on that are wanted and not own, those that have one source; *end: behind
 * them.
 */
static int fill_from(struct pcow_image *image, uint64_t guest_slab, unsigned page, unsigned *end,
                     const struct wanted *wanted, struct filling *filling)
{
    struct place from = chain_find(image, guest_slab, page, *end - page);
    int ret;

    if (wanted->data || wanted->zeros)
        from.pages = *end - page;
    else if (!from.present && image->chain->incomplete)
        return -ENOLINK;
    *end = page + from.pages;
    prepared_run(image, filling->slab, page, end);
    from.pages = *end - page;
    filling->all_prepared &= page_set_has(&image->prepared[filling->slab], page) && !wanted->zeros;
    filling->hides |=
        !wanted->zeros && (from.present || (wanted->data && image->chain->head[guest_slab]));
    if (wanted->zeros)
        ret = empty_run(image, (filling->slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                        from.pages * PCOW_PAGE_SIZE);
    else if (!fits(image, filling->slab, from.pages))
        return -ENOSPC;
    else
        ret = fill_run(image, filling->slab, page, &from,
                       wanted->data ? wanted->data + (page - wanted->first) * PCOW_PAGE_SIZE : NULL,
                       filling->is_new, &filling->hides);
    if (ret) {
        /* Half a run may have been written: these blocks must not be taken for zeros later. */
        remains_discard(image, filling->slab, page, from.pages);
        forget_prepared(image, filling->slab);
        return ret;
    }
    page_set_add_range(&filling->filled, page, from.pages);
    if (!wanted->data && !wanted->zeros)
        *(from.present ? &filling->copies : &filling->zeros) += from.pages;
    return 0;
}

/*
 * A new slab relies on its end of file and on a hole, and pages that hide older ones must be
 * complete on the medium before they are valid. Where nothing was below, a page lost in a crash
 * reads as the zeros that were there before. In class pmem what is prepared is on the medium, and
 * what was copied to it was flushed: a trap waits for no commit of the file system, not even for
 * one that others will need.
 */
static int put_on_medium(struct pcow_image *image, const struct filling *filling, uint64_t failures)
{
    int ret = filling->all_prepared && image->file.persist.persistence == PCOW_PERSISTENCE_PMEM ? 0
        : filling->hides ? file_sync(&image->file) : file_settle(&image->file);

    if (!ret && filling->hides && image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        ret = file_check_since(&image->file, failures);
    return ret;
}

static int own(struct pcow_image *image, uint64_t guest_slab, const struct wanted *wanted,
               uint64_t *copied, uint64_t *zeroed)
{
    struct filling filling = {.all_prepared = true};
    uint64_t failures = failures_count(&image->file.persist.failures);
    struct page_set missing;
    int ret = 0, published;

    if (!image->file.writable || image->view != image_active(image))
        return -EROFS;
    chain_own_pages(image, guest_slab, &missing);
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        missing.word[w] = wanted->pages.word[w] & ~missing.word[w];
    if (page_set_empty(&missing))
        return 0;
    ret = target_slab(image, guest_slab, &filling.slab, &filling.is_new);
    if (ret)
        return ret;
    for (unsigned page = 0; page < PAGES_PER_SLAB && ret == 0;) {
        unsigned end = page_set_run_end(&missing, page, PAGES_PER_SLAB);

        if (page_set_has(&missing, page))
            ret = fill_from(image, guest_slab, page, &end, wanted, &filling);
        page = end;
    }
    if (page_set_empty(&filling.filled)) {
        if (filling.is_new) {
            remains_discard(image, filling.slab, 0, PAGES_PER_SLAB);
            slab_untake(image, filling.slab);
        }
        return ret;
    }
    if (wanted->zeros) {
        forget_prepared(image, filling.slab);
        slab_forget_backed(image, filling.slab);
    }
    published = put_on_medium(image, &filling, failures);
    if (!published)
        published = publish(image, guest_slab, filling.slab, filling.is_new, &filling.filled);
    if (!published) {
        /* What was copied in vain is the next try's. */
        count_up(copied, filling.copies);
        count_up(zeroed, filling.zeros);
    } else if (filling.is_new) {
        /* It may be handed out again as one that holds nothing. */
        remains_discard(image, filling.slab, 0, PAGES_PER_SLAB);
        slab_untake(image, filling.slab);
    } else {
        /* Pages that are not valid have been copied to. */
        forget_prepared(image, filling.slab);
    }
    return published ? published : ret;
}

int chain_own(struct pcow_image *image, uint64_t guest_slab, unsigned first, unsigned count,
              const void *data, uint64_t *copied, uint64_t *zeroed)
{
    struct wanted wanted = {.data = data, .first = first};

    page_set_add_range(&wanted.pages, first, count);
    return own(image, guest_slab, &wanted, copied, zeroed);
}

int chain_own_set(struct pcow_image *image, uint64_t guest_slab, const struct page_set *pages,
                  const void *data)
{
    struct wanted wanted = {.pages = *pages, .data = data};

    return own(image, guest_slab, &wanted, NULL, NULL);
}

int chain_own_zeros(struct pcow_image *image, uint64_t guest_slab, const struct page_set *pages)
{
    struct wanted wanted = {.pages = *pages, .zeros = true};

    return own(image, guest_slab, &wanted, NULL, NULL);
}

static bool is_own_from(const struct pcow_image *image, const struct slab *slab, const void *first)
{
    return slab->kind == OWNER_DATA && slab->layer == image_active(image)
           && slab->number >= *(const uint64_t *)first;
}

int chain_drop_own_from(struct pcow_image *image, uint64_t first_guest_slab,
                        struct pcow_error *error)
{
    int ret = reclaim_release(image, is_own_from, &first_guest_slab);

    return ret ? error_set_errno(error, ret, "%s: cannot give slabs back", image->file.path) : 0;
}
