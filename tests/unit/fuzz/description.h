/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An input of the fuzzer describes an image file instead of being one: which of a few healthy
 * images to begin with, and a list of patches to its metadata. Most patches carry a right checksum,
 * so that what is behind the checksums is reached.
 */
#ifndef PCOW_FUZZ_DESCRIPTION_H
#define PCOW_FUZZ_DESCRIPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Make the healthy images in a scratch directory; once, before the first materialize(). It is
 * removed at exit.
 */
void description_setup(void);

/*
 * Write the file that the input describes; the path is always the same. *format_1: the input is
 * about a format 1 image.
 */
const char *description_materialize(const uint8_t *data, size_t size, bool *format_1);

/* Has the image to begin with a mirror? */
bool description_has_mirror(const uint8_t *data, size_t size);
/* Damage one page of metadata of this file, as the input says. False: it has no checksum. */
bool description_damage(const char *path, const uint8_t *data, size_t size);

#endif
