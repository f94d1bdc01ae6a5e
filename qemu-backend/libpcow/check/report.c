/* SPDX-License-Identifier: BSD-3-Clause */
#include "check/check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/error.h"

/* A file that is damaged all over would otherwise be described for hours. */
#define MAX_SHOWN 1000u

static void tell(struct check *check, enum pcow_finding_kind kind, const char *suffix,
                 const char *format, va_list args)
{
    char message[1024];
    size_t used;

    if (check->shown == MAX_SHOWN) {
        check->hidden++;
        return;
    }
    check->shown++;
    if (!check->finding)
        return;
    vsnprintf(message, sizeof message, format, args);
    used = strlen(message);
    snprintf(message + used, sizeof message - used, "%s", suffix);
    check->finding(check->opaque, kind, message);
}

void check_corruption(struct check *check, bool repairable, const char *format, ...)
{
    va_list args;

    check->result->corruptions++;
    check->result->corruptions_certain += !check->unlocked;
    if (check->repair && repairable)
        check->result->corruptions_fixed++;
    va_start(args, format);
    tell(check, PCOW_FINDING_CORRUPTION,
         !repairable     ? ""
         : check->repair ? "; repaired"
                         : "; pcow-img check -r all repairs it",
         format, args);
    va_end(args);
}

void check_leak(struct check *check, const char *format, ...)
{
    va_list args;

    check->result->leaks++;
    if (check->repair)
        check->result->leaks_fixed++;
    va_start(args, format);
    tell(check, PCOW_FINDING_LEAK,
         check->repair ? "; given back" : "; harmless, pcow-img check -r leaks gives it back",
         format, args);
    va_end(args);
}

void check_doubtful(struct check *check, enum check_doubt doubt, const char *format, ...)
{
    va_list args;

    check->result->leaks++;
    check->result->leaks_doubtful += doubt != DOUBT_NONE;
    check->result->leaks_unflushed += doubt == DOUBT_UNFLUSHED;
    if (check->repair)
        check->result->leaks_fixed++;
    va_start(args, format);
    tell(check, PCOW_FINDING_LEAK, check->repair ? "; given back" : "", format, args);
    va_end(args);
}

void check_note(struct check *check, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    tell(check, PCOW_FINDING_NOTE, "", format, args);
    va_end(args);
}

void check_end_of_findings(struct check *check)
{
    char message[64];

    if (!check->hidden || !check->finding)
        return;
    snprintf(message, sizeof message, "%u more findings are not shown", check->hidden);
    check->finding(check->opaque, PCOW_FINDING_NOTE, message);
}

/* The first page of the overlay that ends behind offset. */
static size_t find_overlay(const struct check *check, uint64_t offset)
{
    size_t low = 0, high = check->overlays;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (check->overlay[middle] + PCOW_PAGE_SIZE <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int read_piece(struct check *check, uint64_t offset, char *buffer, size_t length)
{
    size_t there = offset >= check->file.size           ? 0
                   : check->file.size - offset < length ? check->file.size - offset
                                                        : length;
    int ret = there ? file_read(&check->file, offset, buffer, there) : 0;

    /* -ENODATA: without a lock, somebody may cut the file short meanwhile. */
    if (ret == -ENODATA)
        there = 0;
    else if (ret)
        return error_set_errno(
            check->error, ret,
            "cannot read %zu bytes at offset %llu of %s; if it is a media error, "
            "clear it first (ndctl clear-errors) or restore the file",
            length, (unsigned long long)offset, check->file.path);
    memset(buffer + there, 0, length - there);
    return 0;
}

int check_read(struct check *check, uint64_t offset, void *buffer, size_t length)
{
    char *at = buffer;

    while (length > 0) {
        size_t i = find_overlay(check, offset), piece;
        uint64_t page = i < check->overlays ? check->overlay[i] : UINT64_MAX;
        bool covered = page <= offset;
        uint64_t end = covered ? page + PCOW_PAGE_SIZE : page;
        int ret;

        piece = end - offset < length ? (size_t)(end - offset) : length;
        ret = read_piece(check, offset + (covered ? PCOW_SLAB_SIZE : 0), at, piece);
        if (ret)
            return ret;
        at += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}

int check_overlay(struct check *check, uint64_t offset)
{
    /* In the file it is right by now. */
    if (check->repair)
        return 0;
    if (check->overlays == check->overlay_capacity) {
        size_t capacity = check->overlay_capacity ? 2 * check->overlay_capacity : 64;
        uint64_t *grown = realloc(check->overlay, capacity * sizeof *grown);

        if (!grown)
            return error_set(check->error, -ENOMEM, "out of memory");
        check->overlay = grown;
        check->overlay_capacity = capacity;
    }
    check->overlay[check->overlays++] = offset;
    return 0;
}

static int store_error(const struct check *check, int ret, uint64_t offset)
{
    return ret ? error_set_errno(check->error, ret, "cannot repair %s at offset %llu",
                                 check->file.path, (unsigned long long)offset)
               : 0;
}

/* As datasum_drop_for(); a slab whose owner word becomes 0 needs no checksum. */
static void note_dropped(struct check *check, uint64_t offset, size_t length, uint64_t word)
{
    uint64_t at = offset % GROUP_SIZE;

    check->drops_sums |= at < PCOW_SLAB_SIZE
                         && (at + length > BITMAP_OFFSET
                             || (word && at < LAYER_TABLE_OFFSET
                                 && at + length > SLAB_TABLE_OFFSET));
}

int check_store64(struct check *check, uint64_t offset, uint64_t word)
{
    note_dropped(check, offset, sizeof word, word);
    return check->repair
               ? store_error(check, file_store64(&check->file, offset, word, false), offset)
               : 0;
}

int check_store(struct check *check, uint64_t offset, const void *from, size_t length)
{
    note_dropped(check, offset, length, 1);
    return check->repair
               ? store_error(check, file_store(&check->file, offset, from, length), offset)
               : 0;
}

int check_punch(struct check *check, uint64_t offset, uint64_t length)
{
    return check->repair ? store_error(check, file_punch(&check->file, offset, length), offset) : 0;
}

int check_set_header_word(struct check *check, size_t field, uint64_t value)
{
    uint64_t word = word_encode(value);

    memcpy((char *)&check->header + field, &word, sizeof word);
    return check_store64(check, field, word);
}

int check_raise_generation(struct check *check)
{
    if (!check->repair || check->generation_raised)
        return 0;
    check->generation_raised = true;
    return check_set_header_word(check, offsetof(struct header, generation),
                                 word_value(check->header.generation) + 1);
}
