/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Format 1: the image format of "Towards Virtual Machine Image Management for Persistent Memory"
 * (MSST 2019), Tables I and II, as its published tool writes it. Read-only. Specified at the end of
 * doc/source/reference/format.rst.
 */
#ifndef PCOW_FORMAT1_FORMAT1_H
#define PCOW_FORMAT1_FORMAT1_H

#include "image/image.h"

/*
 * Scan an open file (image->file) and fill image->format1 and image->size; slabs_reserve(image,
 * guest slabs) gives the chain code its list entries. -EMEDIUMTYPE not format 1, -EBADMSG damaged.
 */
int format1_load(struct pcow_image *image, struct pcow_error *error);
void format1_unload(struct pcow_image *image);

/* Name of the base, or NULL if there is none; buffer has PCOW_BASE_NAME_SIZE bytes. */
const char *format1_base_name(const struct pcow_image *image, char *buffer);

void format1_get_info(const struct pcow_image *image, struct pcow_info *info);

/* Does this file hold any page of the guest slab? */
bool format1_has_slab(const struct pcow_image *image, uint64_t guest_slab);

/*
 * Where is this page of the guest? True if the file holds it; *offset is its place in the file.
 * *run (at least 1): how many pages from here on, not beyond the end of the guest slab, have the
 * same answer, and if held lie one behind the other in the file.
 */
bool format1_find(const struct pcow_image *image, uint64_t page, uint64_t *offset, unsigned *run);

#endif
