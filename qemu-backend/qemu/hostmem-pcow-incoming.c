/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The destination of a live migration; see hostmem-pcow-migration.h.
 *
 * The stream may be damaged, or come from somebody else: every offset and
 * length is checked, and nothing is stored before the header fits.  An image
 * that a failed migration has left holds data, and is not taken again: it
 * could show pages that the source has dropped since.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qemu/cutils.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/units.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "migration/qemu-file.h"
#include "system/hostmem-pcow-migration.h"

static bool check_empty(HostMemPcow *pcow, Error **errp)
{
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    if (!info.data_size && !info.snapshots) {
        return true;
    }
    error_setg(errp, "pcow image '%s' holds data, or has snapshots: a VM "
               "migrates to an empty image. Delete it, make a new one on the "
               "same base (pcow-img create -b), and migrate again",
               pcow_path(pcow->image));
    return false;
}

static bool load_header(HostMemPcow *pcow, QEMUFile *f, Error **errp)
{
    const char *path = pcow_path(pcow->image);
    HostMemPcowIdentity here, there = {};
    uint32_t version = qemu_get_be32(f);

    there.size = qemu_get_be64(f);
    qemu_get_buffer(f, there.bases, sizeof(there.bases));
    if (qemu_file_get_error(f)) {
        error_setg(errp, "the stream ended");
        return false;
    }
    if (version != HOSTMEM_PCOW_STREAM_VERSION) {
        error_setg(errp, "pcow image '%s' comes in version %" PRIu32 " of the "
                   "stream, which this QEMU does not know: migrate between "
                   "QEMUs of one version", path, version);
        return false;
    }
    if (pcow->readonly) {
        error_setg(errp, "pcow image '%s' is read-only here, and writable at "
                   "the source", path);
        return false;
    }
    if (!hostmem_pcow_get_identity(pcow, 0, &here, errp)) {
        return false;
    }
    if (there.size != here.size) {
        error_setg(errp, "pcow image '%s' has %" PRIu64 " bytes, that of the "
                   "source %" PRIu64 ": make one of that size", path, here.size,
                   there.size);
        return false;
    }
    if (memcmp(there.bases, here.bases, sizeof(here.bases))) {
        error_setg(errp, "pcow image '%s' stands on another base than that of "
                   "the source, and what is in the base does not travel: make "
                   "it on a copy of the very file (same UUID)", path);
        return false;
    }
    return check_empty(pcow, errp);
}

/* Stores that would wait for space wait with the BQL held: fail instead. */
static bool make_writable(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                          Error **errp)
{
    int ret = hostmem_pcow_resolve(pcow, offset, length, true, false);

    if (ret < 0) {
        error_setg_errno(errp, -ret, "pcow image '%s' cannot take what arrives "
                         "at offset %#" PRIx64 "%s", pcow_path(pcow->image),
                         offset, ret == -ENOSPC ?
                         ": its pool is full, make room and migrate again" :
                         "");
        return false;
    }
    return true;
}

static bool load_pages(HostMemPcow *pcow, QEMUFile *f, HostMemPcowRecord kind,
                       uint64_t offset, Error **errp)
{
    uint8_t *host = pcow_map_address(pcow->map);
    uint64_t size = pcow_size(pcow->image);
    uint32_t length = qemu_get_be32(f);

    if (offset >= size || !length ||
        length > HOSTMEM_PCOW_STREAM_LENGTH || length > size - offset ||
        !QEMU_IS_ALIGNED(length, HOSTMEM_PCOW_STREAM_PAGE)) {
        error_setg(errp, "damaged stream: %" PRIu32 " bytes at offset %#" PRIx64
                   " of pcow image '%s'", length, offset,
                   pcow_path(pcow->image));
        return false;
    }
    if (kind == HOSTMEM_PCOW_DATA) {
        return make_writable(pcow, offset, length, errp) &&
               qemu_get_buffer(f, host + offset, length) == length;
    }
    /* What reads as zeros already, as new memory does, takes no space */
    if (hostmem_pcow_readable(pcow, offset, length, false) &&
        buffer_is_zero(host + offset, length)) {
        return true;
    }
    if (!make_writable(pcow, offset, length, errp)) {
        return false;
    }
    memset(host + offset, 0, length);
    return true;
}

/* *more: false after a record that ends a part */
static bool load_record(HostMemPcow *pcow, QEMUFile *f, bool *more,
                        Error **errp)
{
    uint64_t word = qemu_get_be64(f);
    HostMemPcowRecord kind = word % HOSTMEM_PCOW_STREAM_PAGE;
    int ret = qemu_file_get_error(f);

    *more = kind != HOSTMEM_PCOW_END && kind != HOSTMEM_PCOW_FINISH;
    if (ret) {
        error_setg_errno(errp, -ret, "the stream ended");
        return false;
    }
    if ((kind == HOSTMEM_PCOW_HEADER) != (pcow->arrival == PCOW_AWAITED)) {
        error_setg(errp, "damaged stream: record %d of pcow image '%s' comes "
                   "out of order", kind, pcow_path(pcow->image));
        return false;
    }
    switch (kind) {
    case HOSTMEM_PCOW_HEADER:
        if (!load_header(pcow, f, errp)) {
            return false;
        }
        pcow->arrival = PCOW_ARRIVING;
        return true;
    case HOSTMEM_PCOW_DATA:
    case HOSTMEM_PCOW_ZERO:
        return load_pages(pcow, f, kind, word - kind, errp);
    case HOSTMEM_PCOW_END:
        return true;
    case HOSTMEM_PCOW_FINISH:
        /* The source gives up its copy after this: ours is durable first */
        if (hostmem_pcow_flush(pcow, errp) < 0) {
            return false;
        }
        pcow->arrival = PCOW_ARRIVED;
        return true;
    }
    error_setg(errp, "damaged stream: unknown record %d of pcow image '%s'",
               kind, pcow_path(pcow->image));
    return false;
}

int hostmem_pcow_incoming_load(QEMUFile *f, void *opaque, int version)
{
    HostMemPcow *pcow = opaque;
    Error *err = NULL;
    bool more = true;

    while (more) {
        if (!load_record(pcow, f, &more, &err)) {
            int ret = qemu_file_get_error(f);

            if (err) {
                error_report_err(err);
            }
            return ret ?: -EINVAL;
        }
    }
    return 0;
}
