/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mirror: a second copy of each page of metadata, and a checksum of it in a third place. While
 * nobody changes a page, the three agree; if one of them is damaged, the two others tell which one,
 * and have what it held. No store of metadata pays for that but the first one to a page:
 *
 *   mark   before the first store to a page since it was opened, its checksum becomes *stale*;
 *   follow once a minute a mapped image's pages are copied beside the guest, mirror_follow.h;
 *   sync   when the writer closes the image, each stale page is compared with what memory knows of
 *          it and copied to the mirror, and then its checksum is stored.
 *
 * Invariant: where a checksum is valid, page and copy have it. So a mark is durable before the
 * store that it announces, and a checksum is stored when page and copy are on the medium. Class
 * page-cache does not sync each mark: one word, which is synced, says that a writer came whose
 * marks may be lost; after a crash no word of the group then tells anything, and the pages count.
 * The word 0 is no vote: that a page was never stored to cannot be told from a lost checksum.
 * "The mirror" in doc/source/reference/format.rst.
 */
#ifndef PCOW_IMAGE_MIRROR_H
#define PCOW_IMAGE_MIRROR_H

#include "image/file.h"

/*
 * Once the header of a file was read: does it have a mirror? For a writer: it is to be kept. 0 or
 * -ENOMEM.
 */
int mirror_attach(struct file *file, const struct header *header);
void mirror_detach(struct file *file);         /* by file_close() */

/* page: of the file. */
int mirror_mark_page(struct file *file, uint64_t page);

/*
 * Around each store of metadata in an image that may be mapped: before its page is marked, and
 * after it is on the medium and memory knows of it. They may be nested. See mirror_follow.h.
 * Async-signal-safe.
 */
static inline void mirror_begin_store(struct file *file)
{
    __atomic_fetch_add(&file->stores_begun, 1, __ATOMIC_SEQ_CST);
}

static inline void mirror_end_store(struct file *file)
{
    __atomic_fetch_add(&file->stores_ended, 1, __ATOMIC_SEQ_CST);
}

static inline uint64_t mirror_bit(uint64_t page)
{
    return page / (GROUP_SIZE / PCOW_PAGE_SIZE) * METADATA_PAGES + page % METADATA_PAGES;
}

static inline bool mirror_is_marked(const struct file *file, uint64_t page)
{
    uint64_t bit = mirror_bit(page);

    return __atomic_load_n(&file->marked[bit / 64], __ATOMIC_SEQ_CST) >> bit % 64 & 1;
}

/*
 * Metadata at [offset, offset + length) is about to be stored to: 0, or -ENOSPC or -EIO and it must
 * not be. What is no metadata, or has no mirror, is none of its business. Async-signal-safe.
 */
static inline int mirror_mark(struct file *file, uint64_t offset, size_t length)
{
    uint64_t page = offset / PCOW_PAGE_SIZE, end = (offset + length - 1) / PCOW_PAGE_SIZE + 1;
    int ret = 0;

    if (!file->marked || (offset >> SLAB_BITS) % SLABS_PER_GROUP)
        return 0;
    for (; page < end && !ret; page++)
        if (!mirror_is_marked(file, page))
            ret = mirror_mark_page(file, page);
    return ret;
}

/*
 * What the metadata is known to be: put() stores what is known of a page over its content, as it is
 * in the file. An error: that cannot be right, either.
 */
struct mirror_known {
    int (*put)(const void *opaque, uint64_t group, unsigned page, void *content);
    const void *opaque;
};

/*
 * Bring the mirror up to date; nobody stores to the metadata. On an error, or if somebody else has
 * the tree, what is left stays stale, which the next writer mends. known: NULL, the file counts.
 *
 * A page that is not what it is known to be was overwritten by somebody else, who does not keep the
 * format. Then the mirror gets what is known, with its checksum, and the page stays as it is: so
 * everybody finds it damaged, and check -r puts it right from the mirror.
 */
int mirror_sync(struct file *file, const struct mirror_known *known);
/* The same for who has the tree, and keeps it. */
int mirror_sync_alone(struct file *file, const struct mirror_known *known);
/* Do all checksums count, of the group that an offset is in? Not after a writer that was killed. */
bool mirror_is_settled(const struct file *file, uint64_t offset);
/*
 * Has the writer marked any page? When it has just opened the image: one that was killed has left
 * some.
 */
bool mirror_has_marked(const struct file *file);
/*
 * Were pages found that somebody else has overwritten? 0, or -EBADMSG with a sentence. Not for
 * checksums alone: those that were overwritten are right by then.
 */
int mirror_tell(const struct file *file, struct pcow_error *error);

/* May words of this page of checksums be older than what they are of? Also if that is damaged. */
static inline bool checksums_are_unordered(const uint64_t words[METADATA_PAGES])
{
    return words[CHECKSUMS_UNORDERED] != 0;
}

/*
 * Does each page of metadata that has a checksum have this one? Nobody else may be writing. A
 * writer takes over the pages that another one has left stale. 0, -EBADMSG, or another negative
 * errno.
 */
int mirror_verify(struct file *file, struct pcow_error *error);
/*
 * The same with the tree locked by the caller, and perhaps beside a writer: pages that it changes
 * are left out, in class page-cache all those of a group that it has changed. damaged, if not NULL:
 * with -EBADMSG the offset of the page.
 */
int mirror_verify_held(struct file *file, uint64_t *damaged, struct pcow_error *error);

/* Of a page of metadata (4 KiB) of a group, with the image and the place in it. */
uint32_t mirror_checksum(const struct file *file, uint64_t group, unsigned page,
                         const void *content);
/* What it holds: "header", "page bitmaps", ... */
const char *mirror_page_name(unsigned page);

#endif
