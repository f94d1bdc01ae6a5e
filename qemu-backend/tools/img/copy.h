/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef IMG_COPY_H
#define IMG_COPY_H

#include "format/source.h"
#include "format/target.h"
#include "progress.h"

/* Does buffer hold zeros only? */
bool is_zero(const void *buffer, size_t length);

/*
 * Make target read as source, and as zeros behind its end; what is right already is not written, so
 * holes stay holes. base: what target reads as before, if it stands on a base; else NULL.
 */
int copy_image(struct source *source, struct source *base, struct target *target,
               struct progress *progress, struct pcow_error *error);

#endif
