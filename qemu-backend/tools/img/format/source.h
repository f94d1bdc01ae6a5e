/* SPDX-License-Identifier: BSD-3-Clause */
/* An image of any format to read from. */
#ifndef IMG_SOURCE_H
#define IMG_SOURCE_H

#include <stdbool.h>
#include <stddef.h>

#include "format/format.h"

#define MAX_CHUNK_SIZE ((size_t)2 << 20)       /* most bytes of one read or write */

struct source_extent {
    uint64_t length;                           /* at least 1 */
    bool zero;                                 /* known to read as zeros, without looking */
};

struct source;

struct source_operations {
    /* offset + length <= size, length <= MAX_CHUNK_SIZE */
    int (*read)(struct source *source, uint64_t offset, void *buffer, size_t length,
                struct pcow_error *error);
    /* of offset, at most length bytes long */
    int (*get_extent)(struct source *source, uint64_t offset, uint64_t length,
                      struct source_extent *extent, struct pcow_error *error);
    void (*close)(struct source *source);
};

struct source {
    const struct source_operations *operations;
    const char *path;                          /* as the user wrote it; borrowed */
    enum image_format format;
    uint64_t size;                             /* bytes that the guest sees */
    /*
     * the last answer about extents, because finding the end of a long one may take long (SEEK_HOLE
     * on tmpfs)
     */
    struct { uint64_t start, end; bool zero; } known;
};

struct source_options {
    const char *path;
    enum image_format format;
    const char *snapshot;                      /* NULL: the present state; not for raw */
    bool force_share;                          /* take no lock */
    /* of pcow: compare the data of a sealed one with their checksums before */
    bool compare_data;
    bool accept_damage;                        /* of pcow: do not look for any */
};

int source_open(const struct source_options *options, struct source **source,
                struct pcow_error *error);
int source_read(struct source *source, uint64_t offset, void *buffer, size_t length,
                struct pcow_error *error);
int source_get_extent(struct source *source, uint64_t offset, uint64_t length,
                      struct source_extent *extent, struct pcow_error *error);
void source_close(struct source *source);      /* NULL is allowed */

/* One for each kind of format. */
int raw_source_open(const struct source_options *options, struct source **source,
                    struct pcow_error *error);
int pcow_source_open(const struct source_options *options, struct source **source,
                     struct pcow_error *error);
int qcow2_source_open(const struct source_options *options, struct source **source,
                      struct pcow_error *error);

#endif
