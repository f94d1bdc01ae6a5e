/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The destination of a live migration; see migration/pcow/stream.h.
 *
 * The stream may be damaged, or come from somebody else: every offset and
 * length is checked, and nothing is stored before the header fits.
 *
 * Until the VM has arrived, the image bears a mark, and nobody but an incoming
 * migration opens it: it is less than the VM has, or more than it knows of, and
 * looks like an image.  Who makes it for that may mark it from the beginning.
 * One that a failed migration has left holds data, and is not taken again: it
 * could show pages that the source has dropped since.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/units.h"
#include "io/channel-socket.h"
#include "io/channel-tls.h"
#include "migration/migration.h"
#include "migration/qemu-file.h"
#include "stream.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"
#include <poll.h>

#define MARK ".arriving"
#define FLUSH_BYTES (64 * MiB)

bool hostmem_pcow_is_arrival_name(const char *name)
{
    return !strcmp(name, MARK);
}

bool hostmem_pcow_check_arrived(HostMemPcow *pcow, Error **errp)
{
    struct pcow_snapshot mark;

    if (pcow->readonly || runstate_check(RUN_STATE_INMIGRATE)) {
        return true;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, MARK, 0, &mark, errp)) {
        return false;
    }
    if (mark.id) {
        error_setg(errp, "pcow image '%s' was made for a VM that migrates to "
                   "here, and has not arrived: the VM is where it was. Delete "
                   "the image; or, if that VM is lost and this is the best "
                   "there is, delete its snapshot '%s'",
                   pcow_path(pcow->image), MARK);
    }
    return !mark.id;
}

/* Marked, from the header on. */
static bool check_empty(HostMemPcow *pcow, Error **errp)
{
    struct pcow_snapshot mark;
    struct pcow_error error;
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    if (!hostmem_pcow_find_snapshot(pcow->image, MARK, 0, &mark, errp)) {
        return false;
    }
    if (!info.data_size && info.snapshots == (mark.id ? 1 : 0) &&
        (!mark.id || !mark.data_size)) {
        if (mark.id ||
            pcow_snapshot_create(pcow->image, MARK, &error) == 0) {
            return true;
        }
        error_setg(errp, "%s", error.message);
        return false;
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
    int ret = hostmem_pcow_prepare_own_store(pcow, offset, length, false);

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
    struct pcow_extent extent;
    struct pcow_error error;
    int ret;

    if (offset >= size || !length ||
        length > HOSTMEM_PCOW_STREAM_LENGTH || length > size - offset ||
        !QEMU_IS_ALIGNED(length, HOSTMEM_PCOW_STREAM_PAGE)) {
        error_setg(errp, "damaged stream: %" PRIu32 " bytes at offset %#" PRIx64
                   " of pcow image '%s'", length, offset,
                   pcow_path(pcow->image));
        return false;
    }
    pcow->arrived_bytes += length;
    if (kind == HOSTMEM_PCOW_DATA) {
        return make_writable(pcow, offset, length, errp) &&
               qemu_get_buffer(f, host + offset, length) == length;
    }
    /* What reads as zeros already, as new memory does, takes no space */
    ret = pcow_get_extent(pcow->image, offset, length, &extent, &error);
    if (ret == 0 && extent.length >= length &&
        (!extent.present || extent.zero)) {
        return true;
    }
    if (!make_writable(pcow, offset, length, errp)) {
        return false;
    }
    memset(host + offset, 0, length);
    return true;
}

/* Durable, and somebody who keeps the mark is found while it can still fail. */
static bool finish(HostMemPcow *pcow, Error **errp)
{
    struct pcow_error error;

    if (hostmem_pcow_flush(pcow, errp) < 0) {
        return false;
    }
    if (pcow_snapshot_check_delete(pcow->image, MARK, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    pcow->arrival = PCOW_ARRIVED;
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
    if ((kind == HOSTMEM_PCOW_HEADER) != (pcow->arrival == PCOW_AWAITED) ||
        pcow->arrival >= PCOW_ARRIVED) {
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
        /* Now and then, so that it does not take long when the VM is stopped */
        if (pcow->arrived_bytes < FLUSH_BYTES) {
            return true;
        }
        pcow->arrived_bytes = 0;
        return hostmem_pcow_flush(pcow, errp) == 0;
    case HOSTMEM_PCOW_FINISH:
        return finish(pcow, errp);
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

/* ---- the end ------------------------------------------------------------- */

/*
 * The marks go all together, and as late as can be: an image without one that
 * is not the VM's would be started with beside the VM itself.  After the images
 * come the states of the devices, of which each may fail.  So it is done when
 * the stream has been loaded,
 *
 *   before the VM runs, as from there on this image alone is right, and before
 *   disks are taken over for it, which changes them (a persistent bitmap of a
 *   qcow2 file is marked as in use); and
 *
 *   also if it does not run yet (-S, or it was paused), before the source is
 *   told (on the return path): the source may be gone after that, and nobody
 *   would know that what is marked is all there is.
 *
 * What fails here ends this QEMU, so that the source does not hear of success
 * and goes on.  A source without a return path waits for nothing: it has ended
 * then, paused, and can be let go on by hand.
 */
static bool is_settled(HostMemPcow *pcow, void *opaque, Error **errp)
{
    return pcow->arrival == PCOW_AWAITED || pcow->arrival == PCOW_SETTLED;
}

bool hostmem_pcow_is_arriving(void)
{
    return hostmem_pcow_present() &&
           (runstate_check(RUN_STATE_INMIGRATE) ||
            !hostmem_pcow_foreach(is_settled, NULL, NULL));
}

static bool unmark(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_error error;

    if (pcow->arrival != PCOW_ARRIVED) {
        return true;
    }
    if (pcow_snapshot_delete(pcow->image, MARK, NULL, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    pcow->arrival = PCOW_SETTLED;
    return true;
}

static bool mark_again(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_error error;

    if (pcow->arrival == PCOW_SETTLED &&
        pcow_snapshot_create(pcow->image, MARK, &error) < 0) {
        error_report("delete the pcow image '%s', which is no longer what the "
                     "VM has, and nothing says so: %s", pcow_path(pcow->image),
                     error.message);
    }
    return true;
}

/* As far as it shows without waiting: the end of what it sends has come. */
static bool has_hung_up(QIOChannel *channel)
{
    struct pollfd end = { .events = POLLRDHUP };

    if (object_dynamic_cast(OBJECT(channel), TYPE_QIO_CHANNEL_TLS)) {
        channel = QIO_CHANNEL_TLS(channel)->master;
    }
    if (!object_dynamic_cast(OBJECT(channel), TYPE_QIO_CHANNEL_SOCKET)) {
        return false;
    }
    end.fd = QIO_CHANNEL_SOCKET(channel)->fd;
    return poll(&end, 1, 0) > 0;
}

/*
 * What came after the VM (a description of it) was cut off, or the source has
 * given up since (migrate_cancel).  It keeps its end open until it is told, but
 * only if there is a return path.
 */
static bool source_takes_it_for_failed(Error **errp)
{
    MigrationIncomingState *incoming = migration_incoming_get_current();

    if (!incoming->to_src_file || !incoming->from_src_file ||
        (!qemu_file_get_error(incoming->from_src_file) &&
         !has_hung_up(qemu_file_get_ioc(incoming->from_src_file)))) {
        return false;
    }
    error_setg(errp, "the connection broke when all was here, which the source "
               "takes for a failure");
    return true;
}

void hostmem_pcow_incoming_end(void)
{
    Error *err = NULL;

    if (hostmem_pcow_foreach(is_settled, NULL, NULL)) {
        return;
    }
    if (!source_takes_it_for_failed(&err)) {
        /* It takes a while: look again */
        if (hostmem_pcow_foreach(unmark, NULL, &err) &&
            !source_takes_it_for_failed(&err)) {
            return;
        }
        hostmem_pcow_foreach(mark_again, NULL, NULL);
    }
    error_reportf_err(err, "the VM does not start here, but goes on where it "
                      "was: ");
    exit(EXIT_FAILURE);
}

/* For ways to run that do not come by there; nothing is left to do as a rule. */
static void vm_state_changed(void *opaque, bool running, RunState state)
{
    if (running) {
        hostmem_pcow_incoming_end();
    }
}

void hostmem_pcow_incoming_register(HostMemPcow *pcow)
{
    if (!pcow->readonly && runstate_check(RUN_STATE_INMIGRATE)) {
        /* Before devices go on, which may store to the image */
        pcow->arrival_ended = qemu_add_vm_change_state_handler_prio(
            vm_state_changed, pcow, -1);
    }
}

void hostmem_pcow_incoming_unregister(HostMemPcow *pcow)
{
    if (pcow->arrival_ended) {
        qemu_del_vm_change_state_handler(pcow->arrival_ended);
    }
}
