/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Golden images: files made once, by make_golden.c, and kept as text in golden/, with what was
 * found in them beside it. An image that was written by any version of pcow must open for ever.
 *
 * NAME.image: the length of the file, and each page that holds anything as its offset and its
 * 8-byte words, "word*count" for runs. NAME.txt: what check says, what it repairs, what info and
 * snapshots show, and a digest of what each view reads.
 */
#ifndef PCOW_TEST_GOLDEN_H
#define PCOW_TEST_GOLDEN_H

#include <stdio.h>

#include "support.h"

/* Write the file at path as text / make the file again. */
void golden_store(const char *path, FILE *text);
void golden_load(FILE *text, const char *path);

/*
 * Look at NAME.pcow in directory, and at a copy of it for writing and repairing, which is left
 * behind as NAME-copy.pcow; tell in out. Names that begin with "v1" are of format 1.
 */
void golden_describe(const char *directory, const char *name, FILE *out);

#endif
