/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What is done to an image as a whole: making, opening and closing it with its chain, its size, its
 * seal, what it stands on. On top of everything below; nothing there calls this.
 */
#ifndef PCOW_OPERATIONS_OPERATIONS_H
#define PCOW_OPERATIONS_OPERATIONS_H

#include "image/image.h"

/* Beside enum pcow_open_flags: an image that pcow_add_mirror() was interrupted on. */
enum { OPEN_AMENDING = 1 << 16 };

/*
 * What pcow_open(), pcow_create(), pcow_add_mirror() and pcow_unseal() do, seen by an observer
 * (NULL: none).
 */
int image_open(const char *path, unsigned flags, const char *snapshot, struct observer *observer,
               pcow_image **image, struct pcow_error *error);
int image_create(const char *path, const struct pcow_create_options *options,
                 struct observer *observer, struct pcow_error *error);
int image_add_mirror(const char *path, struct observer *observer, struct pcow_error *error);
int image_unseal(const char *path, struct observer *observer, struct pcow_error *error);

/*
 * Find the directory of an image that was opened by its path, links resolved. If it is another than
 * that of the path, the path is replaced.
 */
int image_open_directory(struct pcow_image *image, struct pcow_error *error);

/* The chain below an open image, as its base record says. */
int image_open_base(struct pcow_image *image, struct pcow_error *error);

/*
 * Fill *record so that an image in the directory of base_path may stand on it. A snapshot is
 * pinned. *held: the base, open so that it stays as it is; to be closed when the record has been
 * published. NULL if unchecked.
 */
int base_record_make(struct base_record *record, const char *image_path, const char *base_path,
                     const char *base_snapshot, bool unchecked, pcow_image **held,
                     struct pcow_error *error);

#endif
