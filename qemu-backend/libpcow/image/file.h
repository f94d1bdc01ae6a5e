/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * One open image file: descriptor, lock, size, and its mapping in windows of one group (32 GiB of
 * address space) each. Metadata is updated through the windows; what is read at open comes through
 * pread(), so that a file cut short under us is an error and not a signal, and so that looking at a
 * hole on tmpfs does not fill it.
 */
#ifndef PCOW_IMAGE_FILE_H
#define PCOW_IMAGE_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "format/format2.h"
#include "image/lost.h"
#include "persist/persist.h"

/* file_open.c: open, lock, close; window.c: windows; shared.c: blocks that others have, too;
 * folio.c: stores to what the page cache has; file.c: everything else */
struct file {
    char *path;
    int fd;
    bool writable;
    uint64_t size;                    /* end of file in bytes; grows only, by file_grow() */
    struct persist persist;
    uint8_t *window[MAX_GROUPS];      /* atomically set once */
    uint8_t *settled_window[MAX_GROUPS];
    /* one bit a slab, see file_is_filled(); NULL: none yet; atomically set once */
    uint64_t *filled;
    bool growing;                     /* claim of file_grow() */
    bool may_share;                   /* blocks with a copy of it; writers, not in class volatile */
    bool huge;                        /* the kernel may map it with entries of 2 MiB */
    /* of the failures in persist: those that a flush has told its user of; atomic */
    uint64_t told;
    struct lost_pages lost_pages;     /* class volatile: none */
    /*
     * of the end of file, of holes, with pwrite(): how many, and how many of them are on the medium
     */
    uint64_t changes, committed;
    /* see mirror.h */
    uint8_t uuid[PCOW_UUID_SIZE];
    unsigned heads;                   /* slabs of a group that hold no data, at its begin */
    uint64_t *marked;                 /* NULL: no mirror, or not open for writing */
    uint64_t marked_groups[MAX_GROUPS / 64];
    uint64_t marks;                   /* pages that were marked since it was opened */
    uint64_t *followed;               /* the same bits: of pages that were followed */
    uint64_t stores_begun, stores_ended;   /* of metadata, see mirror_begin_store() */
    /* class page-cache: groups of which the medium says that marks may be lost */
    uint64_t unordered_groups[MAX_GROUPS / 64];
    /*
     * A store of metadata has failed, or what it was to be followed by: memory may know less, or
     * more, than the file. Atomic
     */
    bool unsure;
    /* by no more than is asked for: the end of a file that was cut short tells what is missing */
    bool grows_exactly;
    /* see mirror_tell(); checksums: those of pages that were made anew */
    struct { uint64_t pages, first, checksums; bool unsure; } overwritten;
    /* one bit a slab that may have a checksum of its data; NULL: none has; see datasum.h */
    uint64_t *summed;
};

static inline void file_become_unsure(struct file *file)
{
    __atomic_store_n(&file->unsure, true, __ATOMIC_RELAXED);
}

enum file_open_flags {
    FILE_WRITE = 1 << 0,
    FILE_FORCE_SHARE = 1 << 1,        /* no lock */
    FILE_NO_FOLLOW = 1 << 2,          /* the last component must not be a symbolic link */
};

#define MAX_REPLACED 100               /* times that a file may be replaced while it is opened */

/* Has somebody else a writer's lock, or can that not be asked? */
bool file_has_writer(const struct file *file);

/*
 * Open an existing regular file, relative to directory (AT_FDCWD). -EBUSY: locked by somebody else.
 * observer: NULL but in tests.
 */
int file_open(struct file *file, int directory, const char *name, const char *shown_path,
              unsigned flags, struct observer *observer, struct pcow_error *error);
/*
 * Is the name another file's by now, or nobody's? Of a file that was opened without its lock, when
 * another lock keeps it from being replaced.
 */
bool file_is_replaced(const struct file *file, int directory, const char *name, unsigned flags);
/* Adopt the descriptor of a new file (create); takes the writer's lock. */
int file_adopt(struct file *file, int fd, const char *path, struct observer *observer,
               struct pcow_error *error);
void file_close(struct file *file);

/*
 * Whole-buffer pread: 0, -ENODATA if the file ends inside, -EIO if a part is lost, or a negative
 * errno.
 */
int file_read(const struct file *file, uint64_t offset, void *buffer, size_t length);

/*
 * Settled is a range of the file whose blocks were written and are known to the medium, and stay
 * where they are. A store to it is durable without MAP_SYNC; and with MAP_SYNC it may wait for a
 * commit that concerns other blocks of the file only.
 */
enum file_map_for {
    FILE_MAP_LOADS,
    FILE_MAP_STORES,
    FILE_MAP_SETTLED,                 /* stores to a settled range */
    FILE_MAP_LATER,                   /* nothing yet */
};

/*
 * Map a piece of the file at a fixed address, and nothing for lost pages of it: 0 or a negative
 * errno. fixed: MAP_FIXED; or for a file without lost pages MAP_FIXED_NOREPLACE, then on an error
 * nothing is mapped. Async-signal-safe.
 */
int file_map(const struct file *file, void *address, size_t length, uint64_t offset,
             enum file_map_for what, int fixed);

/*
 * Map a slab for stores with the page table that its window has filled, which is moved as a whole
 * (Linux 5.13 and later); the window begins a new one. Class volatile, where both are mapped alike.
 * On an error nothing may be mapped at the address. Async-signal-safe.
 */
int file_move_window(struct file *file, void *address, uint64_t offset);

/*
 * Address of a file offset in its window (mapped on first use), or NULL with errno set.
 * Async-signal-safe.
 */
void *file_address(struct file *file, uint64_t offset);
/* The same for stores to a settled range. */
void *file_address_settled(struct file *file, uint64_t offset);

/*
 * Is a load through the window of file_address() likely to find this slab in the page table? Class
 * pmem, where one entry may do for all of it: always. Elsewhere it is what somebody has said who
 * has touched all of the slab, or what is used of it, until the page table was given back. To be
 * wrong costs a page fault. file_is_filled() is async-signal-safe.
 */
void file_note_filled(struct file *file, uint64_t offset);
bool file_is_filled(const struct file *file, uint64_t offset);
void file_free_filled(struct file *file);      /* by file_close() */

/*
 * Give back the page tables that the windows have for a range of whole slabs in one group; whoever
 * uses them meanwhile waits, and fills in what he needs anew. For a file without lost pages, at
 * which nothing must be mapped: 0 or a negative errno, then nothing has changed.
 */
int file_empty_window(const struct file *file, uint64_t offset, uint64_t length);

/* Does the address lie in one of its windows, and of which place in the file? Async-signal-safe. */
bool file_find_window_at(const struct file *file, const uint8_t *address, uint64_t *offset);

/*
 * Extend the end of file to at least size (rounded up in steps). Async-signal-safe; threads wait
 * for each other.
 */
int file_grow(struct file *file, uint64_t size);

/* Set the end of file; only for who has the file alone (create, check). */
int file_set_size(struct file *file, uint64_t size);

/*
 * Allocate blocks: 0 or -ENOSPC. / Give blocks back; the range then reads as zeros.
 * Async-signal-safe.
 */
int file_allocate(const struct file *file, uint64_t offset, uint64_t length);
/*
 * Allocate what has none, if anything: 0 or -ENOSPC, which is not returned if nothing was missing.
 * Its time does not depend on the size of the file.
 */
int file_allocate_holes(const struct file *file, uint64_t offset, uint64_t length);
int file_punch(struct file *file, uint64_t offset, uint64_t length);

/*
 * Before metadata is stored to the range through a mapping: its pages get blocks, and of their own.
 * A page may have a part of them, where blocks are smaller and a tool left out zeros; the kernel
 * wants all of them at the store, and to have none left then is a signal and no error. 0 or
 * -ENOSPC. Async-signal-safe.
 */
int file_allocate_metadata(const struct file *file, uint64_t offset, uint64_t length);

/*
 * Before a store through a mapping to a range, inside one slab, that has its blocks: see folio.c.
 * address: where the range lies, aligned in its slab of memory as in that of the file. mapped: what
 * of that slab of memory is mapped from the file, which may be mapped anew; NULL: it is a window.
 * 0, -ENOSPC, or -EIO if it cannot be read, or what else the slab holds cannot be written.
 * Async-signal-safe.
 */
int file_prepare_store(struct file *file, void *address, const struct page_set *mapped,
                       uint64_t offset, size_t length);

/*
 * Give the range blocks of its own where a copy of the file has them as well: 0 or -ENOSPC.
 * Async-signal-safe.
 */
int file_unshare(const struct file *file, uint64_t offset, uint64_t length);
bool file_may_share(int fd);

/*
 * Give a range that reads as zeros blocks. Class pmem: written ones, as the first store to an
 * unwritten block costs a commit of the file system's journal, for every page; here all of the
 * range costs one, that of the next file_commit(). Elsewhere the same as file_allocate().
 * Async-signal-safe.
 */
int file_allocate_written(const struct file *file, uint64_t offset, uint64_t length);

/*
 * Are there no blocks in the range? (Where the file system cannot tell: false.) Async-signal-safe.
 */
bool file_is_hole(const struct file *file, uint64_t offset, uint64_t length);
/* The first page (4 KiB) from offset on, before end, that may hold anything; end if none does. */
uint64_t file_next_data(const struct file *file, uint64_t offset, uint64_t end);
/*
 * May there be a part without blocks? (Where the file system cannot tell: true.) Async-signal-safe.
 */
bool file_has_hole(const struct file *file, uint64_t offset, uint64_t length);

/*
 * Copy [from, from + length) of memory to the file, allocating blocks: 0, -ENOSPC, or -EIO if the
 * source could not be read (media error, file cut short). Durable after file_sync().
 * Async-signal-safe.
 */
int file_write_data(struct file *file, uint64_t offset, const void *from, size_t length);
/*
 * The same over data that is there. Durable on return in class pmem: blocks that were written cost
 * nothing there.
 */
int file_overwrite(struct file *file, uint64_t offset, const void *from, size_t length);

/* Write with pwrite(): 0, -ENOSPC or another negative errno. */
int file_write(const struct file *file, uint64_t offset, const void *from, size_t length);

/*
 * Make all data written so far durable where that is not implied (class page-cache). -EIO also if
 * another thread was told instead. Async-signal-safe.
 */
int file_sync(struct file *file);
/*
 * -EIO if data was lost that was written after failures_count() was *since*: what a sync that has
 * succeeded meanwhile does not tell, see failures.h. Async-signal-safe.
 */
int file_check_since(struct file *file, uint64_t since);

/*
 * Commit what the file system was told about the file (end of file, allocated blocks, holes)
 * together with its data, in every class but volatile. Async-signal-safe.
 */
int file_commit(struct file *file);
/*
 * Every flush that is answered to a user begins and ends with these: -EIO if data was lost of which
 * no flush had told when it began. Of several at a time each tells.
 */
uint64_t file_begin_flush(const struct file *file);
int file_end_flush(struct file *file, uint64_t told);

/*
 * The same, if anything of that kind was done since the last commit. To be called before a word is
 * stored that relies on it: in a crash it would otherwise name a slab behind the end of file, or
 * pages whose blocks still hold what was punched out. Async-signal-safe.
 */
int file_settle(struct file *file);

/*
 * Settle what was stored in a window, in every class. since: of failures_count(), before it was
 * stored, see file_check_since().
 */
int file_put_on_medium(struct file *file, const void *where, size_t length, uint64_t since);

#endif
