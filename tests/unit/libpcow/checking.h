/* SPDX-License-Identifier: BSD-3-Clause */
/* What check says of "image.pcow" in the scratch directory, and a repair of it that is killed. */
#ifndef PCOW_TEST_CHECKING_H
#define PCOW_TEST_CHECKING_H

#include "support.h"

struct findings {
    char text[16384];                          /* a line each */
};

/* For pcow_check() and its like; opaque: struct findings. */
void add_finding(void *opaque, enum pcow_finding_kind kind, const char *message);
/* pcow_check(), which must be able to look; the findings are those of this call. */
struct pcow_check_result check_image(unsigned flags, struct findings *findings);
/* Repair it, with its loss, in a child that ends at this step. False: it came to its end. */
bool repair_until(unsigned step);

#endif
