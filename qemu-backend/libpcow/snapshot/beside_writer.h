/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An image that somebody may be writing to, opened once more to store what belongs to a snapshot:
 * its mark (pin.h), checksums of its data (datasum.h). Each is ordered by the lock on the tree.
 */
#ifndef PCOW_SNAPSHOT_BESIDE_WRITER_H
#define PCOW_SNAPSHOT_BESIDE_WRITER_H

#include "image/image.h"

/*
 * The file of an image that is open for reading, without the lock of a writer; then file_close().
 * -EACCES, -EPERM or -EROFS: it may not be written. -ENOTSUP: it has features that only a newer
 * pcow may write.
 */
int beside_writer_open(const struct pcow_image *image, struct file *file, struct pcow_error *error);
/*
 * With the tree locked, before metadata is stored: what the header says now of the mirror. -EBUSY:
 * it is getting one.
 */
int beside_writer_attach(struct file *file, struct pcow_error *error);

#endif
