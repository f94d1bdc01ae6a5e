/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Checksums of data that is final: one for each file slab, of what it holds and whose that is.
 *
 * Invariant: where there is a checksum, the slab has it. So it is stored when what it tells of is
 * on the medium; and who is about to change the slab - its owner, its bitmap, what a valid page
 * holds - drops it first: a durable store of 0. That costs nothing in an image that has none, and
 * for each slab it is done once. "Checksums of data" in doc/source/reference/format.rst.
 */
#ifndef PCOW_IMAGE_DATASUM_H
#define PCOW_IMAGE_DATASUM_H

#include "image/file.h"

/* Once its mirror is attached, and its size known: a writer notes which slabs have one. */
int datasum_attach(struct file *file);
/*
 * What other processes have made since, see pcow_checksum(): of the slabs [first, end) of one group.
 * They make those of snapshots only, and publish them with the tree locked (shared). So whoever is
 * about to change slabs of a snapshot looks first, with the tree locked for that change.
 */
int datasum_look(struct file *file, uint64_t first, uint64_t end);
void datasum_detach(struct file *file);        /* by file_close() */

/* ---- drop ------------------------------------------------------------------------------------ */

static inline bool datasum_may_be(const struct file *file, uint64_t slab)
{
    uint64_t *summed = __atomic_load_n(&file->summed, __ATOMIC_ACQUIRE);

    return summed && __atomic_load_n(&summed[slab / 64], __ATOMIC_ACQUIRE) >> slab % 64 & 1;
}

int datasum_drop_this(struct file *file, uint64_t slab);
/*
 * Before the slab is changed: 0, or -ENOSPC or -EIO and it must not be. Async-signal-safe, as all
 * of these.
 */
static inline int datasum_drop(struct file *file, uint64_t slab)
{
    return datasum_may_be(file, slab) ? datasum_drop_this(file, slab) : 0;
}
/* The same of many: each lazily, and then those of [first, end), in one group, are settled. */
int datasum_drop_lazily(struct file *file, uint64_t slab);
int datasum_settle(struct file *file, uint64_t first, uint64_t end);
/* Before metadata is stored to [offset, offset + length): of the slabs that it is of. */
int datasum_drop_for(struct file *file, uint64_t offset, size_t length);

/* ---- make and verify ------------------------------------------------------------------------- */

/* What a checksum is of. */
struct datasum_subject {
    uint64_t slab;
    struct owner owner;
    struct page_set valid;             /* OWNER_DATA; other kinds are read in whole */
};

#define DATASUM_BUFFER (256u << 10)    /* what a cache holds */

/* buffer: DATASUM_BUFFER bytes. 0, or what file_read() gives. */
int datasum_hash(const struct file *file, const struct datasum_subject *subject, void *buffer,
                 uint64_t hash[2]);
/* Whole, for this place of this image? */
bool datasum_is_good(const struct file *file, uint64_t slab, const struct datasum *datasum);
/*
 * In two steps: the hash, on which nothing relies yet, lazily; and when that is on the medium the
 * word that publishes it, lazily, too.
 */
int datasum_store_hash(struct file *file, const struct datasum_subject *subject,
                       const uint64_t hash[2]);
int datasum_publish(struct file *file, const struct datasum_subject *subject);

/*
 * Beside a writer, between the two. First the page of the entry is put on the medium, and made so
 * that to publish waits for nothing.
 */
int datasum_settle_hash(struct file *file, const struct datasum_subject *subject);
/*
 * Then, with the tree locked: does the file still say the same of the slab, and is its hash the one
 * that was stored?
 */
int datasum_is_unchanged(const struct file *file, const struct datasum_subject *subject,
                         const uint64_t hash[2], bool *same);
/* After a drop that is on the medium: nobody has to drop it again. */
int datasum_note_dropped(struct file *file, uint64_t slab);

#endif
