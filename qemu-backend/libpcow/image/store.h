/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores to the metadata of a file, in its window. All of them are made here or in slabs.c: before
 * one, its page is marked in the mirror.
 */
#ifndef PCOW_IMAGE_STORE_H
#define PCOW_IMAGE_STORE_H

#include "image/file.h"

/*
 * Metadata in the window: store, flush, fence. The blocks below must have been allocated
 * (file_allocate). One aligned word is the commit point of every update: everything that it
 * publishes must be durable before. In class page-cache -EIO, too, if another request was told of
 * what was lost. lazily: in class page-cache it is left to the next flush: for what may reach the
 * medium in any order.
 */
int file_store64(struct file *file, uint64_t offset, uint64_t value, bool lazily);
int file_store64_at(struct file *file, uint64_t *where, uint64_t offset, uint64_t value,
                    bool lazily);
/*
 * Settle now what was stored lazily to [offset, offset + length), which lies in one group. since:
 * of failures_count(), before it was stored, see file_check_since().
 */
int file_sync_range(struct file *file, uint64_t offset, size_t length, uint64_t since);
int file_store(struct file *file, uint64_t offset, const void *from, size_t length);
int file_store_lazily(struct file *file, uint64_t offset, const void *from, size_t length);
/* Store the word that is there, so that its page is dirty. It has its block. */
int file_touch(struct file *file, uint64_t offset);

#endif
