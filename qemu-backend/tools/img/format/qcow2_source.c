/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "format/nbd.h"
#include "format/qcow2_header.h"
#include "format/source.h"
#include "format/source_file.h"
#include "interrupt.h"
#include "report.h"

#define KEPT_EXTENTS 256

struct qcow2_source {
    struct source source;
    struct nbd nbd;
    int fd;                                    /* what other programs open is what it was */
    /*
     * the block status that one question brought, because a question is a round trip to another
     * process
     */
    struct { uint64_t end; bool zero; } kept[KEPT_EXTENTS];
    uint64_t kept_start;
    unsigned kept_count;
};

static int read_image(struct source *source, uint64_t offset, void *buffer, size_t length,
                      struct pcow_error *error)
{
    struct qcow2_source *qcow2 = (struct qcow2_source *)source;
    sigset_t old;
    int r;

    interrupt_hold(&old);
    r = qcow2->nbd.pread(qcow2->nbd.handle, buffer, length, offset, 0);
    interrupt_release(&old);
    return r ? nbd_fail(&qcow2->nbd, source->path, "read it", error) : 0;
}

/* entries: pairs of length and flags */
static int keep_extents(void *opaque, const char *context, uint64_t offset, uint32_t *entries,
                        size_t count, int *error)
{
    struct qcow2_source *qcow2 = opaque;

    (void)context;
    (void)error;
    qcow2->kept_start = offset;
    qcow2->kept_count = 0;
    for (size_t i = 0; i + 1 < count && qcow2->kept_count < KEPT_EXTENTS; i += 2) {
        offset += entries[i];
        qcow2->kept[qcow2->kept_count].end = offset;
        qcow2->kept[qcow2->kept_count++].zero = entries[i + 1] & LIBNBD_STATE_ZERO;
    }
    return 0;
}

static bool find_kept(const struct qcow2_source *qcow2, uint64_t offset,
                      struct source_extent *extent)
{
    if (!qcow2->kept_count || offset < qcow2->kept_start) {
        return false;
    }
    for (unsigned i = 0; i < qcow2->kept_count; i++) {
        if (offset < qcow2->kept[i].end) {
            *extent = (struct source_extent){.length = qcow2->kept[i].end - offset,
                                             .zero = qcow2->kept[i].zero};
            return true;
        }
    }
    return false;
}

static int get_extent(struct source *source, uint64_t offset, uint64_t length,
                      struct source_extent *extent, struct pcow_error *error)
{
    const uint64_t limit = UINT64_C(1) << 30;  /* a length must fit into 32 bits */
    struct qcow2_source *qcow2 = (struct qcow2_source *)source;
    nbd_extent_callback callback = {.callback = keep_extents, .user_data = qcow2};
    sigset_t old;
    int r;

    if (find_kept(qcow2, offset, extent)) {
        return 0;
    }
    qcow2->kept_count = 0;
    interrupt_hold(&old);
    r = qcow2->nbd.block_status(qcow2->nbd.handle, length < limit ? length : limit, offset,
                                callback, 0);
    interrupt_release(&old);
    if (r) {
        return nbd_fail(&qcow2->nbd, source->path, "get its block status", error);
    }
    if (!find_kept(qcow2, offset, extent)) {
        return fail(error, -EIO, "%s: qemu-nbd gave no block status", source->path);
    }
    return 0;
}

static void close_image(struct source *source)
{
    struct qcow2_source *qcow2 = (struct qcow2_source *)source;

    nbd_end(&qcow2->nbd);
    close(qcow2->fd);
    free(qcow2);
}

static int serve(const struct source_options *options, struct qcow2_source *qcow2,
                 struct pcow_error *error)
{
    char path[64];
    const struct nbd_server_options server = {
        .path = path,
        .held = true,
        .shown_path = options->path,
        .snapshot = options->snapshot,
        .force_share = options->force_share,
    };
    int r;

    snprintf(path, sizeof(path), "/proc/%ld/fd/%d", (long)getpid(), qcow2->fd);
    r = qcow2_check_header(path, options->path, error);
    r = r ? r : nbd_check_file(&server, error);
    r = r ? r : nbd_serve(&server, &qcow2->nbd, &qcow2->source.size, error);
    if (!r && !qcow2->nbd.can_meta_context(qcow2->nbd.handle, LIBNBD_CONTEXT_BASE_ALLOCATION)) {
        nbd_end(&qcow2->nbd);
        r = fail(error, -ENOTSUP, "%s: this qemu-nbd gives no block status; use QEMU 5 or later",
                 options->path);
    }
    return r;
}

int qcow2_source_open(const struct source_options *options, struct source **source,
                      struct pcow_error *error)
{
    static const struct source_operations operations = {read_image, get_extent, close_image};
    struct qcow2_source *qcow2 = calloc(1, sizeof(*qcow2));
    int r;

    if (!qcow2) {
        return fail(error, -ENOMEM, "out of memory");
    }
    qcow2->fd = source_file_open(options->path, error);
    r = qcow2->fd < 0 ? qcow2->fd : serve(options, qcow2, error);
    if (r) {
        if (qcow2->fd >= 0) {
            close(qcow2->fd);
        }
        free(qcow2);
        return r;
    }
    qcow2->source.operations = &operations;
    *source = &qcow2->source;
    return 0;
}
