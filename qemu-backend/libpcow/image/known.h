/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What memory knows of a page of metadata: a writer has loaded all that counts, and each change of
 * it is made in memory when its store has succeeded. So when nobody stores, and no store has
 * failed, a page that says something else was overwritten by somebody else.
 *
 * Not known: bitmaps of slabs without data, records of layers that are not alive (but that they are
 * not), whether a snapshot is pinned, and a copy of the header that this writer has not stored.
 */
#ifndef PCOW_IMAGE_KNOWN_H
#define PCOW_IMAGE_KNOWN_H

#include "image/image.h"

/*
 * Put what is known of a page of metadata (4 KiB) of a group over its content, as it is in the
 * file; nobody else changes the image. 0, or -EIO: what memory has cannot be right itself.
 */
int known_page(const void *image, uint64_t group, unsigned page, void *content);

#endif
