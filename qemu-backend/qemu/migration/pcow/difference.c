/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What two snapshots of a pcow image differ in, as records of the stream of a
 * live migration; see migration/pcow/stream.h.
 *
 * What lies in the same place of the file is the same, as it is frozen.  What
 * does not may be, too: hot slabs are copied whole in the background, and a
 * guest stores what is there.  So such pages are compared.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/cutils.h"
#include "qemu/timer.h"
#include "migration/migration-stats.h"
#include "migration/qemu-file.h"
#include "stream.h"

#define PAGE HOSTMEM_PCOW_STREAM_PAGE
#define PART_NS (50 * 1000 * 1000)  /* RAM has its turn in between, too */

void hostmem_pcow_put_record(QEMUFile *f, uint64_t offset,
                             HostMemPcowRecord kind)
{
    qemu_put_be64(f, offset | kind);
}

/* Does the file itself hold it, rather than a base, or nobody? */
static bool is_own(const struct pcow_extent *extent)
{
    return extent->present && !extent->depth;
}

/*
 * How many bytes from its offset on the destination is to get, or *same: has
 * already.
 */
static int compare_extents(HostMemPcowDifference *diff, uint64_t *length,
                           bool *same, struct pcow_error *error)
{
    /* Not all of a long extent each time: a record takes only a part of it */
    uint64_t rest = MIN(pcow_size(diff->next) - diff->offset, PCOW_SLAB_SIZE);
    struct pcow_extent now, then;
    int ret = pcow_get_extent(diff->next, diff->offset, rest, &now, error);

    if (ret == 0 && diff->last) {
        ret = pcow_get_extent(diff->last, diff->offset, now.length, &then,
                              error);
    }
    if (ret < 0) {
        return ret;
    }
    *length = now.length;
    *same = !is_own(&now);
    if (diff->last) {
        *length = MIN(now.length, then.length);
        *same = is_own(&now) == is_own(&then) && now.zero == then.zero &&
                (!is_own(&now) || now.file_offset == then.file_offset);
    }
    return 0;
}

static bool page_is_same(const HostMemPcowDifference *diff, size_t at)
{
    return diff->last && !memcmp(diff->data + at, diff->old + at, PAGE);
}

/* Send what of a piece the destination has not, in runs of like pages. */
static int send_piece(QEMUFile *f, HostMemPcowDifference *diff, size_t length,
                      struct pcow_error *error)
{
    int ret = pcow_read(diff->next, diff->offset, diff->data, length, error);

    if (ret == 0 && diff->last) {
        ret = pcow_read(diff->last, diff->offset, diff->old, length, error);
    }
    for (size_t at = 0, end; ret == 0 && at < length; at = end) {
        bool same = page_is_same(diff, at);
        bool zero = buffer_is_zero(diff->data + at, PAGE);

        for (end = at + PAGE; end < length; end += PAGE) {
            if (page_is_same(diff, end) != same ||
                buffer_is_zero(diff->data + end, PAGE) != zero) {
                break;
            }
        }
        if (same) {
            continue;
        }
        hostmem_pcow_put_record(f, diff->offset + at, zero ?
                                HOSTMEM_PCOW_ZERO : HOSTMEM_PCOW_DATA);
        qemu_put_be32(f, end - at);
        if (!zero) {
            qemu_put_buffer(f, diff->data + at, end - at);
        }
    }
    return ret;
}

int hostmem_pcow_send_difference(QEMUFile *f, HostMemPcowDifference *diff,
                                 bool all, Error **errp)
{
    int64_t end = get_clock() + PART_NS;
    struct pcow_error error;
    uint64_t length;
    int ret = 0;
    bool same;

    while (diff->offset < pcow_size(diff->next)) {
        ret = compare_extents(diff, &length, &same, &error);
        if (ret == 0 && !same) {
            length = MIN(length, HOSTMEM_PCOW_STREAM_LENGTH);
            ret = send_piece(f, diff, length, &error);
        }
        if (ret < 0) {
            error_setg(errp, "%s", error.message);
            return ret;
        }
        diff->offset += length;
        ret = qemu_file_get_error(f);
        if (ret || (!all && (migration_rate_exceeded(f) ||
                             get_clock() > end))) {
            return ret;
        }
    }
    return 1;
}
