/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/nbd.h"
#include "format/qcow2_header.h"
#include "format/qemu_img.h"
#include "format/target.h"
#include "interrupt.h"
#include "report.h"

struct qcow2_target {
    struct target target;
    struct nbd nbd;
};

static int write_image(struct target *target, uint64_t offset, const void *buffer, size_t length,
                       struct pcow_error *error)
{
    struct qcow2_target *qcow2 = (struct qcow2_target *)target;
    sigset_t old;
    int r;

    interrupt_hold(&old);
    r = qcow2->nbd.pwrite(qcow2->nbd.handle, buffer, length, offset, 0);
    interrupt_release(&old);
    return r ? nbd_fail(&qcow2->nbd, target->path, "write it", error) : 0;
}

static int zero_image(struct target *target, uint64_t offset, uint64_t length,
                      struct pcow_error *error)
{
    const uint64_t limit = UINT64_C(1) << 30;  /* a length must fit into 32 bits */
    struct qcow2_target *qcow2 = (struct qcow2_target *)target;
    sigset_t old;

    while (length) {
        uint64_t n = length < limit ? length : limit;
        int r;

        interrupt_hold(&old);
        r = qcow2->nbd.zero(qcow2->nbd.handle, n, offset, 0);
        interrupt_release(&old);
        if (r) {
            return nbd_fail(&qcow2->nbd, target->path, "write zeros to it", error);
        }
        offset += n;
        length -= n;
    }
    return 0;
}

static int finish_image(struct target *target, struct pcow_error *error)
{
    struct qcow2_target *qcow2 = (struct qcow2_target *)target;
    sigset_t old;
    int r;

    interrupt_hold(&old);
    r = qcow2->nbd.flush(qcow2->nbd.handle, 0) || qcow2->nbd.shutdown(qcow2->nbd.handle, 0);
    interrupt_release(&old);
    if (r) {
        return nbd_fail(&qcow2->nbd, target->path, "flush it", error);
    }
    return 0;
}

static void close_image(struct target *target)
{
    struct qcow2_target *qcow2 = (struct qcow2_target *)target;

    nbd_end(&qcow2->nbd);
    free(qcow2);
}

static int create(const struct target_options *options, struct pcow_error *error)
{
    char size[24], *arguments[12] = {"qemu-img", "create", "-q", "-f", "qcow2"};
    unsigned count = 5;
    int status, r;

    snprintf(size, sizeof(size), "%" PRIu64, options->size);
    if (options->qcow2_options) {
        arguments[count++] = "-o";
        arguments[count++] = (char *)options->qcow2_options;
    }
    arguments[count++] = "--";
    arguments[count++] = (char *)options->path;
    arguments[count] = size;
    r = qemu_img_run(arguments, false, &status, error);
    if (!r && status) {
        r = fail(error, -EIO, "%s: qemu-img could not create it as qcow2", options->shown_path);
    }
    return r;
}

int qcow2_target_open(const struct target_options *options, struct target **target,
                      struct pcow_error *error)
{
    static const struct target_operations operations = {write_image, zero_image, finish_image,
                                                        close_image};
    const struct nbd_server_options server = {
        .path = options->path, .shown_path = options->shown_path, .writable = true};
    struct qcow2_target *qcow2;
    int r = options->existing ? qcow2_check_header(options->path, options->shown_path, error)
                              : create(options, error);

    if (r) {
        return r;
    }
    qcow2 = calloc(1, sizeof(*qcow2));
    if (!qcow2) {
        return fail(error, -ENOMEM, "out of memory");
    }
    r = nbd_serve(&server, &qcow2->nbd, &qcow2->target.size, error);
    if (r) {
        free(qcow2);
        return r;
    }
    qcow2->target.operations = &operations;
    *target = &qcow2->target;
    return 0;
}
