/* SPDX-License-Identifier: BSD-3-Clause */
/* An image of any format to write to. */
#ifndef IMG_TARGET_H
#define IMG_TARGET_H

#include <stdbool.h>
#include <stddef.h>

#include "format/format.h"

struct target;

struct target_operations {
    /* offset + length <= size, length <= MAX_CHUNK_SIZE */
    int (*write)(struct target *target, uint64_t offset, const void *buffer, size_t length,
                 struct pcow_error *error);
    /* make a range read as zeros; offset + length <= size */
    int (*zero)(struct target *target, uint64_t offset, uint64_t length, struct pcow_error *error);
    /* make everything durable; the last call before close */
    int (*finish)(struct target *target, struct pcow_error *error);
    void (*close)(struct target *target);
};

struct target {
    const struct target_operations *operations;
    const char *path;                          /* for messages; borrowed */
    uint64_t size;                             /* bytes that the guest sees */
    /* what was not written reads as zeros (or as the base) */
    bool blank;
};

struct target_options {
    const char *path;
    const char *shown_path;                    /* for messages */
    enum image_format format;
    /* write into what is there; else path must not exist */
    bool existing;
    uint64_t size;                             /* of a new image */
    const char *base, *base_snapshot;          /* of a new pcow image; NULL: none */
    uint64_t cluster_size;                     /* of a new pcow image; 0: default */
    /* make a template of the pcow image when it is finished */
    bool sealed;
    /* and checksums of all its data before */
    bool checksums;
    /* of a new qcow2 image: for "qemu-img create -o"; NULL: none */
    const char *qcow2_options;
};

int target_open(const struct target_options *options, struct target **target,
                struct pcow_error *error);
int target_write(struct target *target, uint64_t offset, const void *buffer, size_t length,
                 struct pcow_error *error);
int target_zero(struct target *target, uint64_t offset, uint64_t length, struct pcow_error *error);
int target_finish(struct target *target, struct pcow_error *error);
void target_close(struct target *target);      /* NULL is allowed */

/* One for each kind of format. */
int raw_target_open(const struct target_options *options, struct target **target,
                    struct pcow_error *error);
int pcow_target_open(const struct target_options *options, struct target **target,
                     struct pcow_error *error);
int qcow2_target_open(const struct target_options *options, struct target **target,
                      struct pcow_error *error);

#endif
