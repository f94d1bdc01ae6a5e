/* SPDX-License-Identifier: BSD-3-Clause */
/* checksum, seal --checksums: how what is damaged is told, and what the command ends with. */
#ifndef IMG_SUMS_H
#define IMG_SUMS_H

#include <pcow.h>
#include <stdbool.h>

#include "pace.h"

/* What pcow_checksum() gets as opaque. */
struct sums {
    struct pace pace;
    bool quiet;
    unsigned flags;                            /* enum pcow_checksum_flags */
};

/* As check tells it. */
void sums_finding(void *opaque, enum pcow_finding_kind kind, const char *message);
int sums_progress(void *opaque, uint64_t done, uint64_t total);
/* Report error, what they were not made with; returns the exit code: of damage that of check. */
int sums_failed(int code, const struct pcow_error *error);

#endif
