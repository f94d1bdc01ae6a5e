/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * "All data of this layer has checksums", a flag of its record: so one that is gone is damage, and
 * not one that was never made. Of a frozen layer: nobody stores to it, and its checksums are dropped
 * by a merge only.
 *
 * Invariant: where the flag is, all slabs with data of the layer have a checksum on the medium. It
 * is set when they have, and cleared, durably, before the first of them is dropped, or a slab
 * without one becomes the layer's. The tree is locked for both. VM state does not count.
 */
#ifndef PCOW_SNAPSHOT_SUMMED_H
#define PCOW_SNAPSHOT_SUMMED_H

#include "image/image.h"

/* What the file says now. */
bool summed_is_set(const struct pcow_image *image, const struct layer *layer);

/*
 * After checksums were made and are on the medium: set it where it is true. wanted: of each layer,
 * in their order; NULL: of all. The first for the writer, without the tree locked; the second beside
 * a writer, with it locked exclusively: of snapshots.
 */
int summed_note(struct pcow_image *image, const bool *wanted, struct pcow_error *error);
int summed_note_beside_writer(const struct pcow_image *image, struct file *file,
                              const bool *wanted, struct pcow_error *error);

/* Before its checksums are dropped, by the writer. */
int summed_clear(struct pcow_image *image, struct layer *layer, struct pcow_error *error);

#endif
