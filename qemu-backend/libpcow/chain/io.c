/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Copying bytes in and out of the chain, for tools. The guest does not come this way: see monitor/.
 */
#include <errno.h>
#include <string.h>

#include "chain/chain.h"
#include "chain/reclaim.h"
#include "image/datasum.h"
#include "util/error.h"

struct position {
    uint64_t guest_slab;
    unsigned page, in_page;
};

static struct position position_of(uint64_t offset)
{
    return (struct position){offset >> SLAB_BITS,
                             (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB),
                             (unsigned)(offset % PCOW_PAGE_SIZE)};
}

static int check_range(const struct pcow_image *image, uint64_t offset, uint64_t length,
                       struct pcow_error *error)
{
    if (offset > image->size || length > image->size - offset)
        return error_set(error, -EINVAL,
                         "%s: offset %llu and length %llu reach beyond its end (%llu)",
                         image->file.path, (unsigned long long)offset, (unsigned long long)length,
                         (unsigned long long)image->size);
    return 0;
}

/* What is refused must not count as a change of the image. */
static int begin_write(struct pcow_image *image, uint64_t offset, uint64_t length,
                       struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (ret == 0 && image->map)
        ret = error_set(error, -EBUSY, "%s is mapped; store to its memory, or unmap it before",
                        image->file.path);
    if (ret == 0)
        ret = check_range(image, offset, length, error);
    if (ret == 0 && !chain_get(image, error))
        ret = -ENOMEM;
    return ret ? ret : image_begin_change(image, error);
}

static int no_base(const struct pcow_image *image, struct pcow_error *error)
{
    return error_set(error, -ENOLINK, "%s: the data lies in its base, which was not opened",
                     image->file.path);
}

int pcow_read(pcow_image *image, uint64_t offset, void *buffer, size_t length,
              struct pcow_error *error)
{
    struct chain *chain = chain_get(image, error);
    char *to = buffer;
    int ret = chain ? check_range(image, offset, length, error) : -ENOMEM;

    while (ret == 0 && length > 0) {
        struct position at = position_of(offset);
        struct place place = chain_find(image, at.guest_slab, at.page, PAGES_PER_SLAB);
        size_t piece = place.pages * PCOW_PAGE_SIZE - at.in_page;

        if (piece > length)
            piece = length;
        if (place.present) {
            struct pcow_image *file = chain->file[place.level];

            ret = file_read(&file->file, place.offset + at.in_page, to, piece);
            if (ret)
                return error_set_errno(error, ret == -ENODATA ? -EIO : ret, "cannot read %s",
                                       file->file.path);
        } else if (chain->incomplete) {
            return no_base(image, error);
        } else {
            memset(to, 0, piece);
        }
        to += piece;
        offset += piece;
        length -= piece;
    }
    return ret;
}

static int write_error(const struct pcow_image *image, int code, struct pcow_error *error)
{
    if (code == -ENOSPC)
        return error_set(error, code,
                         "%s: the pool is full; free space or extend it, then try again",
                         image->file.path);
    if (code == -ENOLINK)
        return no_base(image, error);
    return error_set_errno(error, code, "cannot write to %s", image->file.path);
}

/* Store into pages that the active layer already holds. */
static int overwrite(struct pcow_image *image, struct position at, const char *from, size_t length)
{
    while (length > 0) {
        struct place place = chain_find(image, at.guest_slab, at.page, PAGES_PER_SLAB);
        size_t piece = place.pages * PCOW_PAGE_SIZE - at.in_page;
        int ret;

        if (piece > length)
            piece = length;
        ret = datasum_drop(&image->file, place.offset >> SLAB_BITS);
        if (!ret)
            ret = file_overwrite(&image->file, place.offset + at.in_page, from, piece);
        if (ret)
            return ret;
        at.page += place.pages;
        at.in_page = 0;
        from += piece;
        length -= piece;
    }
    return 0;
}

/*
 * Write inside one guest slab. Partly covered pages are brought in first, so that what is around
 * the data is kept.
 */
static int write_slab(struct pcow_image *image, struct position at, const char *from, size_t length)
{
    unsigned first_whole = at.page + (at.in_page != 0);
    unsigned end =
        at.page + (unsigned)((at.in_page + length + PCOW_PAGE_SIZE - 1) / PCOW_PAGE_SIZE);
    unsigned end_whole = at.page + (unsigned)((at.in_page + length) / PCOW_PAGE_SIZE);
    struct page_set edges = {{0}};
    int ret = 0;

    chain_claim(image->chain, at.guest_slab);
    if (at.in_page)
        page_set_add_range(&edges, at.page, 1);
    if (end_whole < end)
        page_set_add_range(&edges, end - 1, 1);
    if (!page_set_empty(&edges))
        ret = chain_own_set(image, at.guest_slab, &edges, NULL);
    if (ret == 0 && first_whole < end_whole) {
        size_t skip = (first_whole - at.page) * PCOW_PAGE_SIZE - at.in_page;
        struct page_set own;

        /*
         * New whole pages get their data before they become valid; those that were valid are
         * overwritten.
         */
        chain_own_pages(image, at.guest_slab, &own);
        ret = chain_own(image, at.guest_slab, first_whole, end_whole - first_whole, from + skip,
                        NULL, NULL);
        for (unsigned page = first_whole; page < end_whole && ret == 0;) {
            unsigned run_end = page_set_run_end(&own, page, end_whole);

            if (page_set_has(&own, page))
                ret = overwrite(image, (struct position){at.guest_slab, page, 0},
                                from + skip + (page - first_whole) * PCOW_PAGE_SIZE,
                                (run_end - page) * PCOW_PAGE_SIZE);
            page = run_end;
        }
    }
    if (ret == 0 && at.in_page) {
        size_t piece = PCOW_PAGE_SIZE - at.in_page < length ? PCOW_PAGE_SIZE - at.in_page : length;

        ret = overwrite(image, at, from, piece);
    }
    if (ret == 0 && end_whole < end && (end - 1 != at.page || !at.in_page)) {
        size_t skip = (end - 1 - at.page) * PCOW_PAGE_SIZE - at.in_page;

        ret = overwrite(image, (struct position){at.guest_slab, end - 1, 0}, from + skip,
                        length - skip);
    }
    chain_release(image->chain, at.guest_slab);
    return ret;
}

int pcow_write(pcow_image *image, uint64_t offset, const void *buffer, size_t length,
               struct pcow_error *error)
{
    const char *from = buffer;
    int ret = begin_write(image, offset, length, error);

    while (ret == 0 && length > 0) {
        size_t piece = PCOW_SLAB_SIZE - offset % PCOW_SLAB_SIZE;

        if (piece > length)
            piece = length;
        ret = write_slab(image, position_of(offset), from, piece);
        if (ret == -ENOSPC && reclaim_for_space(image))
            ret = write_slab(image, position_of(offset), from, piece);
        if (ret)
            return write_error(image, ret, error);
        from += piece;
        offset += piece;
        length -= piece;
    }
    return ret;
}

static int write_pages(struct pcow_image *image, uint64_t guest_slab, const struct page_set *pages,
                       const void *data)
{
    int ret;

    chain_claim(image->chain, guest_slab);
    ret = chain_own_set(image, guest_slab, pages, data);
    chain_release(image->chain, guest_slab);
    return ret;
}

int chain_write_pages(struct pcow_image *image, uint64_t guest_slab, const struct page_set *pages,
                      const void *data, struct pcow_error *error)
{
    int ret = begin_write(image, guest_slab << SLAB_BITS, 0, error);

    if (ret)
        return ret;
    ret = write_pages(image, guest_slab, pages, data);
    if (ret == -ENOSPC && reclaim_for_space(image))
        ret = write_pages(image, guest_slab, pages, data);
    return ret ? write_error(image, ret, error) : 0;
}

/* They are own. */
static int empty_pages(struct pcow_image *image, const struct place *place)
{
    int ret = datasum_drop(&image->file, place->offset >> SLAB_BITS);

    slab_forget_backed(image, place->offset >> SLAB_BITS);
    return ret ? ret
               : file_punch(&image->file, place->offset, place->pages * PCOW_PAGE_SIZE);
}

/* Clear or empty whole pages of one guest slab. */
static int zero_pages(struct pcow_image *image, uint64_t guest_slab, unsigned page, unsigned end)
{
    struct page_set hiding = {{0}};

    while (page < end) {
        struct place place = chain_find(image, guest_slab, page, end - page);
        int ret = 0;

        if (place.own)
            ret = empty_pages(image, &place);
        else if (place.present)
            page_set_add_range(&hiding, page, place.pages);
        else if (image->chain->incomplete)
            ret = -ENOLINK;
        if (ret)
            return ret;
        page += place.pages;
    }
    /* Hide what is below with pages that hold nothing. */
    return page_set_empty(&hiding) ? 0 : chain_own_zeros(image, guest_slab, &hiding);
}

static int zero_slab(struct pcow_image *image, struct position at, unsigned pages)
{
    int ret;

    chain_claim(image->chain, at.guest_slab);
    ret = zero_pages(image, at.guest_slab, at.page, at.page + pages);
    chain_release(image->chain, at.guest_slab);
    return ret;
}

int pcow_write_zeroes(pcow_image *image, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    static const char zeros[PCOW_PAGE_SIZE];
    int ret = begin_write(image, offset, length, error);

    while (ret == 0 && length > 0) {
        struct position at = position_of(offset);
        uint64_t piece;

        if (at.in_page || length < PCOW_PAGE_SIZE) {
            piece = PCOW_PAGE_SIZE - at.in_page < length ? PCOW_PAGE_SIZE - at.in_page : length;
            ret = pcow_write(image, offset, zeros, piece, error);
        } else {
            piece = PCOW_SLAB_SIZE - offset % PCOW_SLAB_SIZE < length
                        ? PCOW_SLAB_SIZE - offset % PCOW_SLAB_SIZE
                        : length / PCOW_PAGE_SIZE * PCOW_PAGE_SIZE;
            ret = zero_slab(image, at, (unsigned)(piece / PCOW_PAGE_SIZE));
            if (ret == -ENOSPC && reclaim_for_space(image))
                ret = zero_slab(image, at, (unsigned)(piece / PCOW_PAGE_SIZE));
            if (ret)
                return write_error(image, ret, error);
        }
        offset += piece;
        length -= piece;
    }
    return ret;
}

int pcow_flush(pcow_image *image, struct pcow_error *error)
{
    uint64_t told = file_begin_flush(&image->file);
    int ret, lost;

    if (!image->file.writable)
        return 0;
    ret = image_check_writable(image, error);
    if (ret)
        return ret;
    ret = image_sync(image);
    lost = file_end_flush(&image->file, told);
    if (!ret)
        ret = lost;
    return ret ? error_set_errno(error, ret, "cannot flush %s", image->file.path) : 0;
}

int pcow_get_extent(pcow_image *image, uint64_t offset, uint64_t length, struct pcow_extent *extent,
                    struct pcow_error *error)
{
    struct chain *chain = chain_get(image, error);
    int ret = chain ? check_range(image, offset, length, error) : -ENOMEM;

    if (ret)
        return ret;
    memset(extent, 0, sizeof *extent);
    extent->offset = offset;
    while (length > 0) {
        struct position at = position_of(offset);
        struct place place = chain_find(image, at.guest_slab, at.page, PAGES_PER_SLAB);
        uint64_t piece = place.pages * PCOW_PAGE_SIZE - at.in_page;
        uint64_t file_offset = place.offset + at.in_page,
                 used = place.present ? 0 : chain_next_used(chain, at.guest_slab);

        /* Over what nothing was ever stored to, in one step. */
        if (used > at.guest_slab + 1)
            piece = (used << SLAB_BITS) - offset;
        if (piece > length)
            piece = length;
        if (!place.present && chain->incomplete)
            return no_base(image, error);
        if (extent->length == 0) {
            extent->present = extent->data = place.present;
            extent->zero = !place.present;
            extent->depth = place.present ? chain->levels - place.level : 0;
            extent->file_offset = place.present ? file_offset : 0;
            extent->path = place.present ? chain->file[place.level]->file.path : NULL;
        } else if (place.present != extent->present
                   || (place.present && (chain->levels - place.level != extent->depth
                                         || file_offset != extent->file_offset + extent->length))) {
            break;
        }
        extent->length += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}
