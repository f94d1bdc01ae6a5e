/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Files of format 1, put together byte by byte from the tables of the paper and the layout in
 * format.rst.
 */
#ifndef PCOW_TEST_FORMAT1_FILES_H
#define PCOW_TEST_FORMAT1_FILES_H

#include "support.h"

#define PAGE 4096u

/* A file in the making: where the next cluster goes, and the current super and meta cluster. */
struct builder {
    int fd;
    uint32_t cluster_size;
    uint64_t end, super, meta;
    uint32_t segment, counter;
};

/*
 * An empty file in the scratch directory, with its first super cluster; the file that had the name
 * goes.
 */
struct builder build(const char *name, uint32_t cluster_size, uint32_t clusters, const char *base);
/*
 * A super cluster with an empty meta cluster behind it. size_field is what the file says, in bytes
 * or KB.
 */
void put_super(struct builder *b, uint32_t size_field, uint32_t clusters, const char *base);
/*
 * A data cluster. bitmap: pages copied, as in the file; what is not copied holds garbage that
 * nobody may see.
 */
void put_cluster(struct builder *b, uint32_t cluster, uint32_t bitmap, uint8_t generation);
void put32(const struct builder *b, uint64_t offset, uint32_t value);

/* The bytes that a page of the guest is filled with; every write (generation) has its own. */
void fill(uint8_t page[PAGE], uint32_t guest_page, uint8_t generation);

pcow_image *open_1(const char *name);
/* The page as put_cluster() filled it for this generation; 0: zeros. */
void expect_page(pcow_image *image, uint32_t guest_page, uint8_t generation);
/* It cannot be opened: with this error, and words that have this part and name the file. */
void expect_refused(const char *name, int code, const char *part);

#endif
