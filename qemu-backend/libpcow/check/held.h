/* SPDX-License-Identifier: BSD-3-Clause */
/* What a page of metadata is about, in words: layers and ranges of the guest. */
#ifndef PCOW_CHECK_HELD_H
#define PCOW_CHECK_HELD_H

#include "check/check.h"

/*
 * Of a page of metadata (4 KiB) of a group, as check_read() finds it; an empty string if there is
 * nothing to say. 0 or a negative errno.
 */
int held_by_page(struct check *check, uint64_t group, unsigned page, char *text, size_t size);

#endif
