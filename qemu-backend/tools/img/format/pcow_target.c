/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>

#include "format/target.h"
#include "interrupt.h"
#include "report.h"
#include "unfinished.h"

struct pcow_target {
    struct target target;
    pcow_image *image;
    bool sealed, checksums;
};

static int write_image(struct target *target, uint64_t offset, const void *buffer, size_t length,
                       struct pcow_error *error)
{
    return pcow_write(((struct pcow_target *)target)->image, offset, buffer, length, error);
}

static int zero_image(struct target *target, uint64_t offset, uint64_t length,
                      struct pcow_error *error)
{
    return pcow_write_zeroes(((struct pcow_target *)target)->image, offset, length, error);
}

static int obey(void *opaque, uint64_t done, uint64_t total)
{
    (void)opaque;
    (void)done;
    (void)total;
    return interrupt_pending();
}

static int finish_image(struct target *target, struct pcow_error *error)
{
    struct pcow_target *pcow = (struct pcow_target *)target;
    int r = pcow_flush(pcow->image, error);

    if (!r && pcow->checksums) {
        r = pcow_checksum(pcow->image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, obey, NULL, error);
    }
    r = r || !pcow->sealed ? r : pcow_seal(pcow->image, error);
    return r ? r : pcow_finish(pcow->image, error);
}

static void close_image(struct target *target)
{
    struct pcow_target *pcow = (struct pcow_target *)target;

    pcow_close(pcow->image);
    free(pcow);
}

int pcow_target_open(const struct target_options *options, struct target **target,
                     struct pcow_error *error)
{
    static const struct target_operations operations = {write_image, zero_image, finish_image,
                                                        close_image};
    const struct pcow_create_options create = {
        .virtual_size = options->size, .cluster_size = options->cluster_size, .base = options->base,
        .base_snapshot = options->base_snapshot,
    };
    struct pcow_target *pcow;
    int r = options->existing ? 0 : pcow_create(options->path, &create, error);

    if (r) {
        return r;
    }
    pcow = calloc(1, sizeof(*pcow));
    if (!pcow) {
        return fail(error, -ENOMEM, "out of memory");
    }
    r = pcow_open(options->path, PCOW_OPEN_WRITE, NULL, &pcow->image, error);
    if (!r) {
        r = check_no_revert(pcow->image, error);
        if (r) {
            pcow_close(pcow->image);
        }
    }
    if (r) {
        free(pcow);
        return r;
    }
    pcow->target.operations = &operations;
    pcow->sealed = options->sealed;
    pcow->checksums = options->checksums;
    pcow->target.size = pcow_size(pcow->image);
    *target = &pcow->target;
    return 0;
}
