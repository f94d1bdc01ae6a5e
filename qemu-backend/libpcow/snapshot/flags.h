/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The flags of a snapshot's record. They belong to whoever has the tree locked, also beside a
 * writer: so what the file says of them counts, and not what was loaded.
 */
#ifndef PCOW_SNAPSHOT_FLAGS_H
#define PCOW_SNAPSHOT_FLAGS_H

#include "image/image.h"

/* Take over what others have marked in the file since. */
int flags_refresh(const struct pcow_image *image, struct layer *layer, struct pcow_error *error);

/*
 * Beside a writer, see beside_writer.h, with the tree locked exclusively: durably set some and
 * clear others. -EBUSY: the record is that of another layer by now, or of no snapshot any more.
 */
int flags_change(const struct pcow_image *image, struct file *file, const struct layer *layer,
                 unsigned set, unsigned clear, struct pcow_error *error);

#endif
