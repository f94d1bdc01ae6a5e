/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Locks on the layers of an image, beside the lock on the whole image that file_open() takes. See
 * "Locks" in format.rst.
 *
 * A snapshot never changes, so it may be read while somebody writes to the active layer. Two things
 * have to be kept away from a reader: a change of the tree while it loads the tables, and the
 * deletion of the very snapshot that it reads. All are open file description locks: they end with
 * the process that holds them.
 */
#ifndef PCOW_IMAGE_LOCK_H
#define PCOW_IMAGE_LOCK_H

#include "image/file.h"

/*
 * Keep the tree of layers as it is (shared), or have it for a change (exclusive). Waits for the
 * others, but not for ever: -EBUSY. Whoever changes the tree comes before those who arrive to read
 * it.
 */
int lock_tree(const struct file *file, bool exclusive, struct pcow_error *error);
void unlock_tree(const struct file *file);

/*
 * Read a snapshot (shared), or be sure that nobody does (exclusive): 0, or -EBUSY at once. The tree
 * must be locked. Kept until the file is closed, or unlock_snapshot().
 */
int lock_snapshot(const struct file *file, uint32_t layer, bool exclusive);
void unlock_snapshot(const struct file *file, uint32_t layer);

/*
 * Make checksums of data: nobody else does until unlock_checksums(), or the file is closed. 0, or
 * -EBUSY at once.
 */
int lock_checksums(const struct file *file, struct pcow_error *error);
void unlock_checksums(const struct file *file);

/*
 * For what may change anything (repair): have the tree and every snapshot to oneself until the file
 * is closed.
 */
int lock_everything(const struct file *file, struct pcow_error *error);

#endif
