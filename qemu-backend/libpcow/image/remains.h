/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Remains: blocks that hold what nobody sees any more. Of free slabs, after revert, delete and
 * shrink; of pages that are not valid, in slabs whose pages a merge has taken away; of either, what
 * a crash left. No operation waits for the file system to take them: it commits, marks the slab,
 * and the blocks go back to the pool
 *
 *   by the thread of a mapped image, at once (monitor/ahead.c),
 *   by pcow_reclaim() and pcow_close(),
 *   before anything is told that the pool is full.
 *
 * In class page-cache no hole is made in a slab that a guest may store to. The page cache keeps a
 * file in folios of up to 2 MiB. A system call (a read with O_DIRECT into the guest's memory) has
 * looked its page up, which pins the folio, and stores later. A hole in it makes the kernel write
 * the folio and cut it; one that is pinned it cannot cut, and drops as a whole
 * (truncate_inode_partial_folio(); XFS, ext4 from Linux 6.16 on). What the call stores then is in
 * no file. So a slab of the active layer is emptied before the first page of it is mapped for
 * stores (slab_back()). What comes later, of copies that fail, waits, marked, until the slab is
 * frozen or the image is closed, and is filled with zeros where a hole would do. Whole slabs are
 * whole folios.
 *
 * On the medium nothing says what is marked, and nothing needs to: a free slab with blocks, and
 * blocks of a page that is not valid, are what a crash leaves as well. Whoever opens a file for
 * writing suspects every slab of it (slabs_at_open) and finds them again. Until they are punched
 * out nobody may take them for zeros: slab_take() empties a slab, and who fills a page with zeros
 * asks slab_is_suspect().
 */
#ifndef PCOW_IMAGE_REMAINS_H
#define PCOW_IMAGE_REMAINS_H

#include "image/image.h"

/*
 * Mark a slab; pages: that have just ceased to be seen. To be called before it can be taken again.
 * Async-signal-safe.
 */
void remains_leave(struct pcow_image *image, uint64_t slab, unsigned pages);
/*
 * Punch out what must not be taken for zeros, of a slab that is claimed or not yet anybody's. What
 * the file system does not take, or must wait, is marked. Async-signal-safe.
 */
void remains_discard(struct pcow_image *image, uint64_t slab, unsigned page, unsigned pages);
/*
 * Must a hole in the slab wait, see above? Not to be asked of a slab that nobody owns.
 * Async-signal-safe.
 */
bool remains_must_wait(const struct pcow_image *image, uint64_t slab);
/* The file system did not take it: it stays marked, without being due. Async-signal-safe. */
void remains_keep(struct pcow_image *image, uint64_t slab);
/* What is marked is due, also what has waited or was refused. Async-signal-safe. */
void remains_look_again(struct pcow_image *image);
/* The slab was emptied by who took it. Async-signal-safe. */
void remains_forget(struct pcow_image *image, uint64_t slab);

/*
 * Punch out the pages of a slab that are neither valid nor prepared. holes: also where the file
 * system says that there is nothing, which it says of blocks that were allocated and never written.
 * The claim is held, or nobody else uses the slab.
 */
int remains_empty_pages(struct pcow_image *image, uint64_t slab, bool holes);

/*
 * Blocks of pages that are not valid, or of the slab if it is free, may hold anything.
 * Async-signal-safe.
 */
static inline bool slab_is_suspect(const struct pcow_image *image, uint64_t slab)
{
    return slab < image->slabs_at_open
           || (__atomic_load_n(&image->remains[slab / 64], __ATOMIC_ACQUIRE) >> (slab % 64) & 1);
}

/*
 * Mark what a former writer may have left when it was killed: free slabs that have blocks, and, if
 * owned, every slab that somebody owns, which takes looking at all of it.
 */
void remains_find(struct pcow_image *image, bool owned);

/*
 * Something was marked since reclaim() last began to go through all, or it has not come to the end.
 */
bool remains_are_due(const struct pcow_image *image);

#endif
