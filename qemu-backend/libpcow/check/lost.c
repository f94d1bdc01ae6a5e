/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Noting what is lost, with and without repair, before it is dropped. Whose it was, and whether
 * that one is alive, is known at the end only: see lost_told.c.
 */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/error.h"

static int add(struct check *check, const struct check_loss *loss)
{
    if (check->only_gone)
        return 0;
    if (check->loss_count == check->loss_capacity) {
        size_t capacity = check->loss_capacity ? check->loss_capacity * 2 : 64;
        struct check_loss *grown = realloc(check->losses, capacity * sizeof *grown);

        if (!grown)
            return error_set(check->error, -ENOMEM, "out of memory for what is lost of %s",
                             check->file.path);
        check->losses = grown;
        check->loss_capacity = capacity;
    }
    check->losses[check->loss_count++] = *loss;
    return 0;
}

void check_find_content(const struct check *check, struct pcow_loss *loss, uint64_t offset,
                        uint64_t length)
{
    loss->file_offset = offset < check->length ? offset : PCOW_NOWHERE;
    loss->content = offset >= check->length           ? 0
                    : check->length - offset < length ? check->length - offset
                                                      : length;
}

int check_bitmap(struct check *check, uint64_t slab, struct page_set *valid)
{
    return check_read(check, bitmap_offset(slab), valid, sizeof *valid);
}

int check_lose_pages(struct check *check, uint64_t slab, struct owner owner,
                     const struct page_set *pages, enum pcow_certainty certainty)
{
    bool known = owner.kind == OWNER_DATA;
    struct check_loss loss = {
        .certainty = certainty,
        .pages = *pages,
        .is = {.kind = PCOW_LOSS_DATA,
               .layer = known ? owner.layer : 0,
               .guest_offset = known ? (uint64_t)owner.number << SLAB_BITS : PCOW_NOWHERE,
               .file_offset = slab << SLAB_BITS},
    };

    return page_set_empty(pages) ? 0 : add(check, &loss);
}

static bool page_is_zero(const void *page, size_t size)
{
    const uint8_t *bytes = page;

    return bytes[0] == 0 && memcmp(bytes, bytes + 1, size - 1) == 0;
}

void check_content(const struct check *check, uint64_t slab, struct page_set *pages)
{
    const uint64_t end = (slab + 1) << SLAB_BITS;
    off_t data = (off_t)(slab << SLAB_BITS);
    uint64_t words[PCOW_PAGE_SIZE / sizeof(uint64_t)];

    memset(pages, 0, sizeof *pages);
    while ((data = lseek(check->file.fd, data, SEEK_DATA)) >= 0 && (uint64_t)data < end) {
        uint64_t offset = (uint64_t)data & ~(PCOW_PAGE_SIZE - 1);

        /* What the medium does not give back was something. */
        if (file_read(&check->file, offset, words, sizeof words)
            || !page_is_zero(words, sizeof words))
            page_set_add_range(pages, (unsigned)(offset % PCOW_SLAB_SIZE / PCOW_PAGE_SIZE), 1);
        data = (off_t)(offset + PCOW_PAGE_SIZE);
    }
}

int check_lose_slab(struct check *check, uint64_t slab, struct owner owner)
{
    bool known = owner.kind == OWNER_DATA,
         told = bitmap_offset(slab) + sizeof(struct page_set) <= check->length;
    /* No bytes of it are counted, so what is counted is not all. */
    struct check_loss loss = {.certainty = PCOW_ESTIMATE,
                              .is = {.kind = PCOW_LOSS_UNKNOWN, .guest_offset = PCOW_NOWHERE}};
    struct page_set pages;
    int ret = check_bitmap(check, slab, &pages);

    if (ret)
        return ret;
    /* Who owns a slab has stored to it: a bitmap that names no page is gone. */
    if (known && page_set_empty(&pages))
        told = check_is_proven(check, bitmap_offset(slab));
    if (!told)
        memset(&pages, 0xff, sizeof pages);
    /* A bitmap says nothing about a slab that was free: it is what its last owner left. */
    if (known || !page_set_empty(&pages))
        return check_lose_pages(check, slab, owner, &pages,
                                known && told ? PCOW_EXACT : PCOW_AT_MOST);
    /* Of VM state, which has no bitmap: what is missing of it is counted where it is missed. */
    check_content(check, slab, &pages);
    if (page_set_empty(&pages))
        return 0;
    check_find_content(check, &loss.is, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    return add(check, &loss);
}

int check_lose_state(struct check *check, const struct check_layer *found, uint64_t first,
                     uint64_t end, uint64_t slab)
{
    uint64_t offset = first << SLAB_BITS, behind = end << SLAB_BITS;
    struct check_loss loss = {
        .certainty = found->damage & DAMAGED_STATE_SIZE ? PCOW_AT_MOST : PCOW_EXACT,
        .is = {.kind = PCOW_LOSS_STATE,
               .layer = found->layer.id,
               .guest_offset = offset,
               .file_offset = PCOW_NOWHERE},
    };

    if (behind > found->layer.state_size)
        behind = found->layer.state_size;
    loss.is.length = behind - offset;
    if (slab)
        check_find_content(check, &loss.is, slab << SLAB_BITS, loss.is.length);
    return add(check, &loss);
}

int check_lose_record(struct check *check, uint32_t layer, uint64_t record_offset)
{
    struct check_loss loss = {.is = {.kind = PCOW_LOSS_SNAPSHOT,
                                     .layer = layer,
                                     .guest_offset = PCOW_NOWHERE,
                                     .file_offset = PCOW_NOWHERE}};

    if (record_offset)
        check_find_content(check, &loss.is, record_offset, LAYER_RECORD_SIZE);
    return add(check, &loss);
}

int check_lose_unknown(struct check *check)
{
    struct check_loss loss = {.certainty = PCOW_ESTIMATE,
                              .is = {.kind = PCOW_LOSS_UNKNOWN,
                                     .guest_offset = PCOW_NOWHERE,
                                     .file_offset = PCOW_NOWHERE}};

    return add(check, &loss);
}
