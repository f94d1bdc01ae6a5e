/* SPDX-License-Identifier: BSD-3-Clause */
#include "copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

struct copy {
    struct source *source, *base;
    struct target *target;
    unsigned char *data, *old;                 /* MAX_CHUNK_SIZE each */
};

/* What has to happen to a page of the target. */
enum page_action { PAGE_KEEP, PAGE_ZERO, PAGE_WRITE };

bool is_zero(const void *buffer, size_t length)
{
    const unsigned char *bytes = buffer;

    return length == 0 || (bytes[0] == 0 && !memcmp(bytes, bytes + 1, length - 1));
}

/* Read a range that may go beyond the end of source, where it is zeros. */
static int read_padded(struct source *source, uint64_t offset, unsigned char *buffer, size_t length,
                       struct pcow_error *error)
{
    size_t inside = offset >= source->size           ? 0
                    : source->size - offset < length ? (size_t)(source->size - offset)
                                                     : length;

    memset(buffer + inside, 0, length - inside);
    return inside ? source_read(source, offset, buffer, inside, error) : 0;
}

static enum page_action choose(const struct copy *copy, size_t offset, size_t length)
{
    if (copy->base) {
        if (!memcmp(copy->data + offset, copy->old + offset, length)) {
            return PAGE_KEEP;
        }
        return is_zero(copy->data + offset, length) ? PAGE_ZERO : PAGE_WRITE;
    }
    if (!is_zero(copy->data + offset, length)) {
        return PAGE_WRITE;
    }
    return copy->target->blank ? PAGE_KEEP : PAGE_ZERO;
}

/* Pages of one kind that follow each other are one write. */
static int put_chunk(const struct copy *copy, uint64_t start, size_t length,
                     struct pcow_error *error)
{
    size_t begin = 0;
    int r = 0;

    while (begin < length && !r) {
        enum page_action action = PAGE_KEEP;
        size_t end = begin;

        while (end < length) {
            size_t page = length - end < PCOW_PAGE_SIZE ? length - end : PCOW_PAGE_SIZE;
            enum page_action next = choose(copy, end, page);

            if (end > begin && next != action) {
                break;
            }
            action = next;
            end += page;
        }
        if (action == PAGE_WRITE) {
            r = target_write(copy->target, start + begin, copy->data + begin, end - begin, error);
        } else if (action == PAGE_ZERO) {
            r = target_zero(copy->target, start + begin, end - begin, error);
        }
        begin = end;
    }
    return r;
}

/* A range of source that is known to be zeros; *done: how much of it was handled. */
static int copy_zeros(const struct copy *copy, uint64_t offset, uint64_t length, uint64_t *done,
                      struct pcow_error *error)
{
    struct source_extent extent = {.length = length, .zero = true};
    int r = 0;

    if (copy->base && offset < copy->base->size) {
        uint64_t inside = copy->base->size - offset;

        r = source_get_extent(copy->base, offset, length < inside ? length : inside, &extent,
                              error);
        if (!r && !extent.zero) {
            if (extent.length > MAX_CHUNK_SIZE) {
                extent.length = MAX_CHUNK_SIZE;
            }
            memset(copy->data, 0, extent.length);
            r = source_read(copy->base, offset, copy->old, extent.length, error);
            if (!r) {
                r = put_chunk(copy, offset, extent.length, error);
            }
        }
    } else if (!copy->target->blank) {
        r = target_zero(copy->target, offset, length, error);
    }
    *done = extent.length;
    return r;
}

static int copy_step(const struct copy *copy, uint64_t offset, uint64_t *done,
                     struct pcow_error *error)
{
    uint64_t left = copy->target->size - offset;
    struct source_extent extent = {.length = left, .zero = true};
    int r = 0;

    if (offset < copy->source->size) {
        uint64_t inside = copy->source->size - offset;

        r = source_get_extent(copy->source, offset, inside < left ? inside : left, &extent, error);
    }
    if (r) {
        return r;
    }
    if (extent.zero) {
        return copy_zeros(copy, offset, extent.length, done, error);
    }
    /*
     * chunks end on the same boundaries wherever an extent began: a slab of the target is filled by
     * one write
     */
    left = MAX_CHUNK_SIZE - offset % MAX_CHUNK_SIZE;
    *done = extent.length < left ? extent.length : left;
    r = source_read(copy->source, offset, copy->data, *done, error);
    if (!r && copy->base) {
        r = read_padded(copy->base, offset, copy->old, *done, error);
    }
    return r ? r : put_chunk(copy, offset, *done, error);
}

int copy_image(struct source *source, struct source *base, struct target *target,
               struct progress *progress, struct pcow_error *error)
{
    struct copy copy = {source, base, target, malloc(MAX_CHUNK_SIZE), malloc(MAX_CHUNK_SIZE)};
    uint64_t offset = 0, done = 0;
    int r = 0;

    if (!copy.data || !copy.old) {
        r = fail(error, -ENOMEM, "out of memory");
    }
    while (!r && offset < target->size) {
        r = copy_step(&copy, offset, &done, error);
        offset += r ? 0 : done;
        /*
         * a signal also reaches the processes that serve qcow2: what fails then is not worth a
         * message of its own
         */
        if (progress_update(progress, offset, target->size)) {
            r = fail(error, -ECANCELED, "%s: interrupted", target->path);
        }
    }
    free(copy.data);
    free(copy.old);
    return r;
}
