/* SPDX-License-Identifier: BSD-3-Clause */
/* One slab of data and its checksum: for who compares all, and who makes what is missing. */
#ifndef PCOW_OPERATIONS_VERIFY_DATA_H
#define PCOW_OPERATIONS_VERIFY_DATA_H

#include "image/datasum.h"
#include "image/image.h"

#define TEXT_SIZE sizeof((struct pcow_error *)0)->message

struct verify {
    struct pcow_image *image;
    pcow_finding_fn finding;           /* NULL: nobody is told */
    void *opaque;
    struct pcow_data_result *result;
    unsigned hidden;
    void *buffer;                      /* DATASUM_BUFFER bytes */
    struct datasum_subject subject;
    struct datasum datasum;
    char first[TEXT_SIZE];             /* the first finding of damage */
};

enum verdict {
    VERDICT_NONE,                      /* no data, or no checksum, and nobody says there was one */
    VERDICT_GOOD,
    VERDICT_DAMAGED,                   /* data or checksum, or that is gone; it was told */
};

int verify_slab(struct verify *verify, uint64_t slab, enum verdict *verdict);
/* Has it no checksum, and nothing says that it had one? Nothing is told or counted. */
int verify_may_make(struct verify *verify, uint64_t slab, bool *may);
/* How many were found that were not told. */
void verify_end(const struct verify *verify);

#endif
