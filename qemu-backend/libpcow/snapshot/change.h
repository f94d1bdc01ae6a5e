/* SPDX-License-Identifier: BSD-3-Clause */
/* Around each change of the tree. */
#ifndef PCOW_SNAPSHOT_CHANGE_H
#define PCOW_SNAPSHOT_CHANGE_H

#include "image/image.h"

/*
 * Nobody may be loading the tables meanwhile, nor copying in the background; what an earlier
 * operation has left is done first. 0, and then change_end().
 */
int change_begin(struct pcow_image *image, struct pcow_error *error);
void change_end(struct pcow_image *image);

/* The same in two steps, for who may still refuse in between: then unlock_tree(). */
int change_lock(struct pcow_image *image, struct pcow_error *error);
void change_hold(struct pcow_image *image);
void change_let_go(struct pcow_image *image);

/* As change_begin(), for who makes a snapshot: it goes on where it was. */
int change_begin_making(struct pcow_image *image, struct pcow_error *error);

/*
 * Before an image is closed that is no child's: what the file says of a snapshot that nobody was
 * told of is taken back, as far as that can be done.
 */
void snapshot_close(struct pcow_image *image);

#endif
