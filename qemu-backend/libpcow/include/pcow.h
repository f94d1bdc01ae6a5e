/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * libpcow: virtual machine images for byte-addressable storage.
 *
 * An image is one file; it holds a tree of layers (snapshots) and may stand on a base image, which
 * may stand on another: the chain. The guest sees the active layer of the top image over its
 * ancestors. Three ways in:
 *
 *   pcow_open() + pcow_read()/pcow_write()   copy bytes in and out (tools),
 *   pcow_open() + pcow_map_create()          the chain as a range of memory, loads and stores at
 *                                            memory speed (QEMU),
 *   pcow_check()                             a file that may be damaged.
 *
 * Units: every offset, length and size is in bytes unless its name says otherwise.
 * Errors: functions return 0 (or a count) on success and a negative errno on failure; *error, which
 * may be NULL, then holds the same errno and one sentence that names the file and the way out.
 * Threads: calls on one image must be serialised by the caller, except pcow_map_resolve(),
 * pcow_map_settle(), pcow_map_show_holes(), pcow_map_flush(), pcow_map_next_event() and
 * pcow_map_get_stats(), which any thread may call while the map exists, and the stores of the
 * guest. A call that comes beside a snapshot create or a revert waits until that is over. Signals:
 * while the library has claimed a part of an image it has them blocked in its thread, but those
 * that tell of an instruction (SIGSEGV, SIGBUS and such), so that any handler may store to a map,
 * except in the thread of a create or a revert. Who waits for space takes them. Processes: a child
 * that was forked may close what it inherited, which leaves the file alone, and read from it; it
 * must not touch the memory of a map: a store there, or a load that would trap, is SIGSEGV. The
 * format is specified in doc/source/reference/format.rst.
 */
#ifndef PCOW_H
#define PCOW_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PCOW_PAGE_SIZE UINT64_C(4096)          /* the unit of copy-on-write */
/* The unit of file and address space; virtual sizes are multiples of it. */
#define PCOW_SLAB_SIZE (UINT64_C(2) << 20)
#define PCOW_MIN_CLUSTER_SIZE UINT64_C(4096)
#define PCOW_MAX_CLUSTER_SIZE PCOW_SLAB_SIZE
#define PCOW_DEFAULT_CLUSTER_SIZE (UINT64_C(64) << 10)
#define PCOW_MAX_VIRTUAL_SIZE (UINT64_C(16) << 40)
#define PCOW_MAX_CHAIN_DEPTH 128               /* image files in one chain, the top one included */
#define PCOW_SNAPSHOT_NAME_SIZE 128            /* bytes, the terminating NUL included */
#define PCOW_BASE_NAME_SIZE 256                /* bytes, the terminating NUL included */
#define PCOW_UUID_SIZE 16

/*
 * Options, and what is told of an image, a map or a check, grow at their end from one version to
 * the next. The caller passes the size that it was compiled with, in the functions that end in
 * _sized: options that it does not know are 0, and what it has no room for it is not told. The
 * functions without _sized do that by themselves; they are no symbols of the library, so that who
 * binds it without a compiler calls the others. -E2BIG: the program is newer than the library, and
 * asks for what that does not know. The other structures do not change before the library's number
 * does.
 */
struct pcow_error {
    int code;                                  /* negative errno */
    char message[1024];                        /* one sentence, no trailing newline */
};

typedef struct pcow_image pcow_image;          /* an open image with its chain of bases */
/* the image monitor: an open image mapped into this process */
typedef struct pcow_map pcow_map;

/*
 * Progress of long work; done goes from 0 to total (bytes). Return non-zero to cancel (-ECANCELED).
 */
typedef int (*pcow_progress_fn)(void *opaque, uint64_t done, uint64_t total);

/* What whoever looks for damage tells of it. */
enum pcow_finding_kind {
    PCOW_FINDING_CORRUPTION,                   /* damage: data may be wrong or lost */
    PCOW_FINDING_LEAK,                         /* space that nothing refers to; harmless */
    PCOW_FINDING_NOTE,                         /* what repair did */
};
typedef void (*pcow_finding_fn)(void *opaque, enum pcow_finding_kind kind, const char *message);

const char *pcow_version(void);

/* ---- what survives which failure ------------------------------------------------------------- */

enum pcow_persistence {
    /* DRAM (tmpfs, hugetlbfs, memfd): survives a process, not the host */
    PCOW_PERSISTENCE_VOLATILE,
    /* an ordinary file system: durable after pcow_map_flush()/msync */
    PCOW_PERSISTENCE_PAGE_CACHE,
    /* fsdax with MAP_SYNC: durable once flushed from the CPU caches */
    PCOW_PERSISTENCE_PMEM,
};

/* "volatile", "page-cache", "pmem" */
const char *pcow_persistence_name(enum pcow_persistence persistence);

enum pcow_survives {                           /* failures, as a set */
    /* the end of the process that mapped the image, of whatever kind */
    PCOW_SURVIVES_PROCESS = 1 << 0,
    PCOW_SURVIVES_HOST = 1 << 1,               /* a crash or reset of the host */
    /* loss of power, as far as platform and disk keep what they say they keep */
    PCOW_SURVIVES_POWER = 1 << 2,
};

/* What stored data survives; flushed: that pcow_map_flush() or pcow_flush() covered since. */
unsigned pcow_persistence_survives(enum pcow_persistence persistence, bool flushed);

/*
 * Class of the file system that holds path (a file or a directory; probed with an unlinked file).
 */
int pcow_probe_persistence(const char *path, enum pcow_persistence *persistence,
                           struct pcow_error *error);

/* ---- images ---------------------------------------------------------------------------------- */

struct pcow_create_options {
    uint64_t virtual_size;                     /* 0: that of the base */
    /* power of two, 4 KiB to 2 MiB; 0: PCOW_DEFAULT_CLUSTER_SIZE */
    uint64_t cluster_size;
    /* path of the base image, in the same directory; NULL: none */
    const char *base;
    /* snapshot of the base to stand on; NULL: its active layer */
    const char *base_snapshot;
    bool copy_on_read;                         /* see pcow_set_copy_on_read() */
    /*
     * record the base by name without opening it (as qemu-img create -u); needs virtual_size. The
     * image is not opened with it before pcow_rebase() has accepted the base.
     */
    bool base_unchecked;
    /* without the second copy of the metadata and its checksums, as images were made before */
    bool no_mirror;
};

/*
 * Make a new image.  Fails with -EEXIST if path exists.  A failed call leaves no file.
 * -EINVAL size or cluster size out of range; -EBUSY the base has a writer; -EXDEV the base is in
 * another directory.
 */
int pcow_create_sized(const char *path, const struct pcow_create_options *options,
                      size_t options_size, struct pcow_error *error);

static inline int pcow_create(const char *path, const struct pcow_create_options *options,
                              struct pcow_error *error)
{
    return pcow_create_sized(path, options, sizeof *options, error);
}

enum pcow_open_flags {
    /* exclusive: -EBUSY while anybody else has the image open */
    PCOW_OPEN_WRITE = 1 << 0,
    PCOW_OPEN_FORCE_SHARE =
        1 << 1, /* read-only without a lock; what a writer changes meanwhile may be seen half;
                                                  not for a snapshot: that is always seen whole */
    /* do not open the base; reads below the image return -ENOLINK */
    PCOW_OPEN_NO_BASE = 1 << 2,
    /* the file is format 1 (the format is never guessed); read-only */
    PCOW_OPEN_FORMAT_1 = 1 << 3,
};

/*
 * Open path and its chain. snapshot: NULL for the active layer, or the name of a snapshot to read
 * (not with WRITE). A snapshot can be read while somebody writes to the image; it is not deleted
 * until it is closed. -EMEDIUMTYPE not a pcow image; -ENOTSUP unknown feature or version; -EBADMSG
 * damaged, see pcow_check(); -EBUSY locked; -ENOENT base or snapshot missing; -ESTALE base changed
 * since, or nobody has looked at it yet; -EROFS sealed image opened for writing; -ELOOP a chain
 * that is too deep, or a symbolic link of another user, which is not followed.
 */
int pcow_open(const char *path, unsigned flags, const char *snapshot, pcow_image **image,
              struct pcow_error *error);
void pcow_close(pcow_image *image);            /* NULL is allowed; the map must be gone */
/*
 * All that pcow_close() does to the file, which is all that may be done with the image afterwards.
 * The map must be gone. -EBADMSG: metadata is not what was stored there, as somebody else has
 * written to the file meanwhile; the image is not opened again before pcow_check() has repaired it.
 */
int pcow_finish(pcow_image *image, struct pcow_error *error);
/*
 * For a server that goes into the background: the process that opened the image has ended or is
 * about to, without having changed it since, and this child of it goes on in its place. Not of an
 * image that is mapped.
 */
void pcow_adopt(pcow_image *image);

struct pcow_info {
    unsigned format;                           /* 1 or 2 */
    uint8_t uuid[PCOW_UUID_SIZE];              /* zero for format 1 */
    uint64_t virtual_size;
    uint64_t cluster_size;
    uint64_t file_size;                        /* end of file */
    uint64_t allocated_size;                   /* blocks that the file system holds for it */
    uint64_t data_size;                        /* guest pages valid in the active layer */
    uint64_t free_size;                        /* slabs of the file that no layer owns */
    /* grows whenever the image is changed by a new writer */
    uint64_t generation;
    uint64_t incompatible_features, read_only_compatible_features, compatible_features;
    bool mirror;                               /* a second copy of the metadata, with checksums */
    /* to which stores go: another one after each snapshot and each revert; 0 for format 1 */
    uint32_t active_layer;
    bool sealed;                               /* a template: no writer may open it */
    bool checksums;                            /* and all of its data has checksums */
    bool copy_on_read;                         /* see pcow_set_copy_on_read() */
    unsigned snapshots;
    unsigned chain_depth;                      /* files, this one included; 1 without a base */
    bool has_base;
    unsigned base_format;
    uint8_t base_uuid[PCOW_UUID_SIZE];
    char base_name[PCOW_BASE_NAME_SIZE];
    char base_snapshot[PCOW_SNAPSHOT_NAME_SIZE]; /* "" : the active layer of the base */
    enum pcow_persistence persistence;
};

void pcow_get_info_sized(const pcow_image *image, struct pcow_info *info, size_t info_size);

static inline void pcow_get_info(const pcow_image *image, struct pcow_info *info)
{
    pcow_get_info_sized(image, info, sizeof *info);
}

/* By what is seen that a file is the one that it was, and that no writer has come since. */
struct pcow_version {
    uint64_t inode, size, blocks;
    int64_t changed;                           /* nanoseconds since 1970, by the kernel's clock */
};

/*
 * What the tables of an image say, without its base and the bitmaps of its pages: quick to find out
 * of all images of a pool.
 */
struct pcow_summary {
    struct pcow_version version;
    /* nobody had it open for writing, nor came to while it was looked at */
    bool steady;
    uint8_t uuid[PCOW_UUID_SIZE];
    uint64_t virtual_size;
    uint64_t allocated_size;                   /* blocks that the file system holds for it */
    /* most that stores to the active layer can add to that; 0 if it is sealed */
    uint64_t may_grow;
    uint64_t may_grow_frozen;                  /* the same, after a snapshot was taken */
    bool sealed;
    unsigned snapshots;
    bool has_base;
    unsigned base_format;
    uint8_t base_uuid[PCOW_UUID_SIZE];
    /* id of the snapshot that it stands on; 0: the active layer of the base */
    uint32_t base_layer;
    char base_name[PCOW_BASE_NAME_SIZE];
};

/*
 * Look at the file of this name in an open directory, no link, taking no lock: what a writer
 * changes meanwhile may be seen half, but not the base. header_only: not even the layers are looked
 * at; virtual_size, snapshots and what may grow are 0. Errors as of pcow_open(); -ENOENT: it is not
 * there.
 */
int pcow_summarize_sized(int directory, const char *name, bool header_only,
                         struct pcow_summary *summary, size_t summary_size,
                         struct pcow_error *error);

static inline int pcow_summarize(int directory, const char *name, bool header_only,
                                 struct pcow_summary *summary, struct pcow_error *error)
{
    return pcow_summarize_sized(directory, name, header_only, summary, sizeof *summary, error);
}

const char *pcow_path(const pcow_image *image);
/*
 * The open file, whatever its name is by now: to look at its file system, or to open it once more
 * as /proc/self/fd/N. Borrowed.
 */
int pcow_fd(const pcow_image *image);
uint64_t pcow_size(const pcow_image *image);   /* virtual size of what is open */
pcow_image *pcow_base(pcow_image *image);      /* borrowed; NULL at the bottom of the chain */

/* Read what the guest would read.  offset + length <= pcow_size().  Returns 0. */
int pcow_read(pcow_image *image, uint64_t offset, void *buffer, size_t length,
              struct pcow_error *error);
/*
 * Write to the active layer; durable after pcow_flush(). -ENOSPC: pool full, what was there is
 * unchanged page by page; -EBUSY: mapped.
 */
int pcow_write(pcow_image *image, uint64_t offset, const void *buffer, size_t length,
               struct pcow_error *error);
/* Make a range read as zeros and give its space back where whole pages are covered. */
int pcow_write_zeroes(pcow_image *image, uint64_t offset, uint64_t length,
                      struct pcow_error *error);
int pcow_flush(pcow_image *image, struct pcow_error *error);

struct pcow_extent {
    uint64_t offset, length;                   /* guest range of equal status */
    bool present;                              /* some layer of the chain holds it */
    bool zero;                                 /* reads as zeros */
    bool data;                                 /* backed by allocated blocks */
    /* file of the chain that holds it, 0 = top (as qemu-img map) */
    unsigned depth;
    uint64_t file_offset;                      /* where in that file; valid if present */
    /* that file; NULL if not present; lives as long as the image */
    const char *path;
};

/* The extent that begins at offset; at most length bytes long, at least one page. */
int pcow_get_extent(pcow_image *image, uint64_t offset, uint64_t length, struct pcow_extent *extent,
                    struct pcow_error *error);

/* Grow, or shrink with allow_shrink (data beyond the end is given up).  Not while mapped. */
int pcow_resize(pcow_image *image, uint64_t virtual_size, bool allow_shrink,
                struct pcow_error *error);
/*
 * Stand on another base (NULL: on none). Unless unsafe, pages that would read differently are
 * copied into the image first, so that the guest sees no change. unsafe: only the name is recorded;
 * close the image afterwards. Not while mapped.
 */
int pcow_rebase(pcow_image *image, const char *base, const char *base_snapshot, bool unsafe,
                pcow_progress_fn progress, void *opaque, struct pcow_error *error);
/*
 * Copy the active layer into the base, which must be writable, and empty the layer. -EINVAL if the
 * image has snapshots.
 */
int pcow_commit(pcow_image *image, pcow_progress_fn progress, void *opaque,
                struct pcow_error *error);
/*
 * Seal: no writer may open the image any more (a template). The image must be open for writing;
 * clearing needs pcow_unseal().
 */
int pcow_seal(pcow_image *image, struct pcow_error *error);
int pcow_unseal(const char *path, struct pcow_error *error);
/*
 * Give an image that has none a mirror of its metadata, in place: what lies where it is to be is
 * moved, so the pool needs up to 4 MiB for each 32 GiB of file. An interrupted call leaves an image
 * that can be read, and for writing asks to be called again. Nothing happens to one that has it.
 * What the metadata says counts as right from then on: check it before.
 */
int pcow_add_mirror(const char *path, struct pcow_error *error);
enum pcow_checksum_flags {
    /* of the active layer as well, for pcow_seal(): whoever stores to what has one drops it */
    PCOW_CHECKSUM_ACTIVE = 1,
    /* also of what is known to be damaged, as it is: it counts as whole from then on */
    PCOW_CHECKSUM_ACCEPT_DAMAGE = 2,
    /* beside a writer: compare what the snapshot itself holds, not those below; for all in turn */
    PCOW_CHECKSUM_COMPARE_OWN = 4,
};
/*
 * Make checksums of data that is final: that of a snapshot and those below it in this file, or of
 * all (NULL). The image must be open for writing, and have no map. What has one keeps it, so this
 * can be cancelled and called again; it is compared, after the others are made. For progress, bytes
 * of slabs. -ENOTSUP: the file has no place for them.
 * -EUCLEAN, at the end: some of it is damaged, or its checksum is damaged or gone. finding (NULL:
 * nobody) was told what, in the words of pcow_check_data(), and error has the first. None is made
 * of that, unless the flag says so, and then 0 is returned; the rest has got them.
 */
int pcow_checksum(pcow_image *image, const char *snapshot, unsigned flags, pcow_finding_fn finding,
                  pcow_progress_fn progress, void *opaque, struct pcow_error *error);
/*
 * The same of a snapshot, and those below it in this file, while a VM may be writing to the image:
 * image is open at the snapshot, for reading, and so keeps it from being deleted. VM state gets
 * none. What becomes another snapshot's meanwhile is left out. The file must be writable for the
 * caller; nothing but checksums is stored to it. For a moment after every 128 MiB nobody can make,
 * delete or revert to a snapshot, and they wait. -EBUSY: the tree is being changed, or somebody
 * else makes checksums. -EIO, at the end: some of it cannot be read; the rest has got them.
 */
int pcow_checksum_beside_writer(pcow_image *image, unsigned flags, pcow_finding_fn finding,
                                pcow_progress_fn progress, void *opaque,
                                struct pcow_error *error);
/*
 * A switch of the image, kept in it: where a map finds data in an older layer or a base, the first
 * load copies the slab (2 MiB) into the active layer, as a store would. Costs that copy and its
 * space once; then the slab is one mapping. For maps made from now on.
 */
int pcow_set_copy_on_read(pcow_image *image, bool on, struct pcow_error *error);

/* ---- snapshots: a tree of layers inside one file --------------------------------------------- */

struct pcow_snapshot {
    uint32_t id;                               /* unique in the image for ever */
    uint32_t parent_id;                        /* nearest snapshot it descends from; 0: none */
    char name[PCOW_SNAPSHOT_NAME_SIZE];
    int64_t date_seconds;                      /* since the epoch */
    uint32_t date_nanoseconds;
    uint64_t virtual_size;
    uint64_t state_size;                       /* VM state stored with it */
    uint64_t data_size;                        /* guest pages valid in its own layer */
    bool current;                              /* the active layer stands on it */
    bool pinned;                               /* an image was made on it */
    /*
     * guest pages that it shows and another layer of the file holds; what shrinks have cut off
     * counts as well where those are too many to be added up
     */
    uint64_t shared_size;
    /* guest pages and VM state that only it keeps: given back when it is deleted now */
    uint64_t delete_frees;
};

/* The tree in order of creation; free with free().  count snapshots, none hidden. */
int pcow_snapshot_list(pcow_image *image, struct pcow_snapshot **list, size_t *count,
                       struct pcow_error *error);
/*
 * The oldest one whose name begins so; false if there is none. Faster than the list, which adds up
 * sizes.
 */
bool pcow_snapshot_find_prefix(const pcow_image *image, const char *prefix,
                               char name[PCOW_SNAPSHOT_NAME_SIZE]);
/*
 * O(1): freeze the active layer under this name and put an empty one on it. With a map attached
 * nobody may be storing to it during the call (vCPUs and I/O stopped), nor loading where a load may
 * trap and allocate (copy-on-read, an image in very many pieces): its range is write-protected on
 * return. -EEXIST name taken.
 */
int pcow_snapshot_create(pcow_image *image, const char *name, struct pcow_error *error);
/*
 * The same with a date of the caller's choice: what belongs together in several files can carry the
 * same one.
 */
int pcow_snapshot_create_at(pcow_image *image, const char *name, int64_t date_seconds,
                            uint32_t date_nanoseconds, struct pcow_error *error);
/*
 * The same in steps, for a guest that must not stand while a medium is waited for (class
 * page-cache): it stands from before freeze to after it, and freeze waits for no medium and for
 * nobody who reads the image. PCOW_FLUSH_FIRST of prepare and finish: what they have stored, or the
 * guest, has to be on the medium first; call pcow_map_flush() for all of the map, in any thread,
 * and then the same step again. Before finish gives 0 nobody can open the snapshot, and a crash
 * leaves none. *token names what prepare has begun. Another operation on the tree that comes in
 * between forgets what is prepared (-ESTALE of freeze: begin anew), and finishes itself what is
 * frozen; finish then gives 0, or -ESTALE if it was deleted since. *id (may be NULL) is the
 * snapshot's. abandon: on an error of a step, or instead of it. No snapshot then, whatever it
 * returns, but one that another operation has finished; the guest's memory is as it stored it; and
 * what it cannot do the next operation does. Freeze should come soon after prepare: what works for
 * the image in the background rests until then, for a minute at most, after which freeze may wait
 * for a step of that.
 */
#define PCOW_FLUSH_FIRST 1
int pcow_snapshot_prepare(pcow_image *image, const char *name, int64_t date_seconds,
                          uint32_t date_nanoseconds, uint64_t *token, struct pcow_error *error);
int pcow_snapshot_freeze(pcow_image *image, uint64_t token, struct pcow_error *error);
int pcow_snapshot_finish(pcow_image *image, uint64_t token, uint32_t *id, struct pcow_error *error);
int pcow_snapshot_abandon(pcow_image *image, uint64_t token, struct pcow_error *error);
/*
 * Drop the active layer and put an empty one on the snapshot; other branches stay. name NULL: on
 * the base, or nothing; of an image without snapshots (-EBUSY). -ENOENT. With a map attached nobody
 * may be accessing it during the call. Space: see pcow_reclaim().
 */
int pcow_snapshot_revert(pcow_image *image, const char *name, struct pcow_error *error);
/*
 * Metadata merge, no guest data copied; *freed (may be NULL): bytes of guest pages and VM state
 * that nothing shows any more, and whose blocks go back to the pool (see pcow_reclaim()). -EBUSY:
 * somebody reads the snapshot, or a file in the directory stands on it.
 */
int pcow_snapshot_delete(pcow_image *image, const char *name, uint64_t *freed,
                         struct pcow_error *error);
/*
 * Revert, delete and resize commit and return; the blocks of what was dropped go back to the pool
 * soon after: by the thread of the map, if there is one, else when the image is closed, in any case
 * before a full pool is reported. This does it now, with what a killed writer has left of that
 * kind; *reclaimed (may be NULL): bytes that the file became smaller by. In class page-cache what a
 * failed copy has left in a slab that is stored to waits for the next snapshot, or the end of the
 * map.
 */
int pcow_reclaim(pcow_image *image, uint64_t *reclaimed, struct pcow_error *error);
/* Whether pcow_snapshot_delete() would be refused now (-EBUSY, -ENOENT); changes nothing. */
int pcow_snapshot_check_delete(pcow_image *image, const char *name, struct pcow_error *error);
int pcow_snapshot_rename(pcow_image *image, const char *name, const char *new_name,
                         struct pcow_error *error);
/*
 * An image was made on the snapshot, so it is kept. If no file in the directory stands on it any
 * more, it need not be: look, and remember that. Also while somebody writes to the image.
 * pcow_snapshot_delete() does this itself if it may list the directory.
 */
int pcow_snapshot_unpin(const char *path, const char *name, struct pcow_error *error);
/*
 * VM state (device state, RAM) kept with a snapshot: written in any order, then made visible with
 * its length.
 */
int pcow_snapshot_write_state(pcow_image *image, const char *name, uint64_t offset,
                              const void *buffer, size_t length, struct pcow_error *error);
int pcow_snapshot_set_state_size(pcow_image *image, const char *name, uint64_t size,
                                 struct pcow_error *error);
int pcow_snapshot_read_state(pcow_image *image, const char *name, uint64_t offset, void *buffer,
                             size_t length, struct pcow_error *error);

/* ---- the image monitor ----------------------------------------------------------------------- */

enum pcow_engine {
    PCOW_ENGINE_AUTO,                          /* signal */
    /* write protection and SIGSEGV: stores of user-mode code (TCG, device models) */
    PCOW_ENGINE_SIGNAL,
    /* as signal; a virtual machine monitor serves the vCPUs, see pcow_map_is_accessible() */
    PCOW_ENGINE_KVM,
    /*
     * As signal, with quicker traps where stores are scattered: one mapping for such a slab, into
     * which pages are let by userfaultfd. A system call that accesses the range gets EFAULT if
     * pcow_map_resolve() was not called before, and some traps are SIGBUS: see pcow_serve_sigbus().
     * In class volatile on Linux 5.19 or later, and where SIGBUS is served; signal elsewhere.
     */
    PCOW_ENGINE_MINOR,
};

enum pcow_full_policy {
    /* a store that finds the pool full waits until there is space; loads never do */
    PCOW_FULL_WAIT,
    PCOW_FULL_FAIL,                            /* it gets SIGBUS, see pcow_serve_sigbus() */
};

enum pcow_event_kind {
    /* a store is waiting (or failed) for want of space */
    PCOW_EVENT_POOL_FULL = 1,
    PCOW_EVENT_POOL_RESUMED,                   /* space appeared, the store went on */
    PCOW_EVENT_ERROR,                          /* a store could not be served for another reason */
    /* slabs could not be mapped again: what was made accessible (anywhere) may not be */
    PCOW_EVENT_WITHDRAWN,
};

struct pcow_event {
    enum pcow_event_kind kind;
    int error;                                 /* negative errno */
    uint64_t offset;                           /* guest offset of the access */
};

struct pcow_map_options {
    enum pcow_engine engine;
    enum pcow_full_policy full_policy;
    /* memory mappings it may use; 0: all such maps together, three quarters of vm.max_map_count */
    unsigned vma_budget;
    /*
     * slabs kept prepared at least, also when idle, if so many can be used; 0: as the rate asks.
     * Class page-cache: none
     */
    unsigned prepared_slabs;
    /*
     * the program has a handler that asks pcow_serve_sigbus(); engine minor needs that, or that
     * there is none
     */
    bool serves_sigbus;
};

/*
 * Map the chain; one map per image, and the image must stay open until pcow_map_destroy().
 * Read-only images map read-only; of one in more pieces than vma_budget has room for, slabs (2 MiB)
 * are not mapped at first, and their first load, which traps, copies them to memory.
 */
int pcow_map_create_sized(pcow_image *image, const struct pcow_map_options *options,
                          size_t options_size, pcow_map **map, struct pcow_error *error);

static inline int pcow_map_create(pcow_image *image, const struct pcow_map_options *options,
                                  pcow_map **map, struct pcow_error *error)
{
    return pcow_map_create_sized(image, options, sizeof *options, map, error);
}

void pcow_map_destroy(pcow_map *map);
void *pcow_map_address(const pcow_map *map);   /* 2 MiB aligned, pcow_size() bytes */
/*
 * An access that cannot be served gets SIGBUS, at the instruction: si_code SI_QUEUE, si_pid this
 * process, si_value its address, si_errno the reason. Whoever serves SIGBUS asks this first: true
 * if the library met the error itself, in memory that it was reading for somebody, and goes on with
 * -EIO; or if it was a trap of engine minor, or in class page-cache a store to a page that has its
 * block, for whose neighbours the file system had no space, which is served. Async-signal-safe.
 * context: a ucontext_t. Where there is no handler when a map is created, the library installs one
 * that does this and nothing else, until the last map goes. A handler has SA_NODEFER, as there may
 * be another SIGBUS meanwhile. A thread that stores to a map (engine minor: or loads), or calls
 * pcow_map_resolve(), _prepare() or _trap(), must not have SIGBUS blocked, and must not be
 * cancellable at any instruction (PTHREAD_CANCEL_ASYNCHRONOUS): glibc ends it in a system call of
 * the trap even where that is forbidden, and what the trap had claimed stays so. One that is
 * cancelled in the usual way in a trap, or in a call of pcow_map_...(), ends after it. In other
 * calls of this library no thread may be cancelled: they hold locks, memory and files.
 */
bool pcow_serve_sigbus(const siginfo_t *info, void *context);
/*
 * Is this SIGBUS a trap of engine minor? Who does not ask pcow_serve_sigbus() then has to call
 * pcow_map_trap(). Async-signal-safe.
 */
bool pcow_is_trap(const siginfo_t *info);
/*
 * Serve an access as a trap would be, but for -ENOSPC instead of waiting; -EIO: it cannot be read.
 * For user-mode code, which can trap again, not for the kernel. Async-signal-safe.
 */
int pcow_map_trap(pcow_map *map, uint64_t offset, bool write);

/*
 * Make a range accessible for the kernel (system calls, DMA) before it touches it: what a trap
 * would do, done in advance. Returns -ENOSPC instead of waiting. Pages that may be stored to stay
 * so until a snapshot or a revert, or PCOW_EVENT_WITHDRAWN. For loads, where a pool in memory is
 * short of space, what pcow_map_show_holes() does is done as well.
 */
int pcow_map_resolve(pcow_map *map, uint64_t offset, uint64_t length, bool write,
                     struct pcow_error *error);
/*
 * The same for user-mode code, which will not find the pool full then. With engine minor it may
 * trap all the same; and in class page-cache, where what the page cache has of the file was dropped
 * and read anew by somebody since, which makes the first store want space for more than its page.
 */
int pcow_map_prepare(pcow_map *map, uint64_t offset, uint64_t length, bool write,
                     struct pcow_error *error);
/*
 * Would pcow_map_prepare() have nothing to do for a store to this page? An emulator asks this for
 * each store that its own page table has not, which is most often the case. False is no promise
 * that it would trap. Lock-free, async-signal-safe.
 */
bool pcow_map_can_store(const pcow_map *map, uint64_t offset);

/*
 * Wait until nobody is about to map the range anew. A system call that loads from it may have
 * returned EFAULT for that reason (a watch begins in steps, see pcow_map_watch()), and may be
 * repeated after this; if it fails again and again, it has another one.
 */
void pcow_map_settle(pcow_map *map, uint64_t offset, uint64_t length);
/*
 * Another one is a page without a block in a pool in memory that is full: a load would take one.
 * Such pages of the range show zeros afterwards. 1: there were any, and the call may be repeated.
 * 0: there were none, and all of it can be loaded; if the call has failed with EFAULT it may be
 * repeated a few times, as another access may have met the hole first. -EFAULT: not all of it can
 * be loaded.
 */
int pcow_map_show_holes(pcow_map *map, uint64_t offset, uint64_t length);
/*
 * Whether the page at offset may be loaded from (stored to) without EFAULT; class page-cache: now.
 * With engine minor: only where pcow_map_resolve() was called for its slab (2 MiB), as what nobody
 * asks for may become inaccessible again. A KVM vCPU that stores where it may not comes back with a
 * bare EFAULT: guess the address, ask this, call pcow_map_resolve() and run the vCPU again. Any
 * thread.
 */
bool pcow_map_is_accessible(const pcow_map *map, uint64_t offset, bool write);
/*
 * When no guess fits: until the next store to a page that may not be stored to, have userfaultfd
 * watch all such pages; it knows the address, and the store is served. Loads of them are slower
 * meanwhile. Any thread. -EPERM and others: userfaultfd is not available.
 */
int pcow_map_watch(pcow_map *map, struct pcow_error *error);
/*
 * Where the last watch found a store that it could not serve (pool full, media error):
 * pcow_map_resolve() it. False if none.
 */
bool pcow_map_watch_found(const pcow_map *map, uint64_t *offset);
/*
 * Make what was stored to a range durable, as far as the persistence class can: page-cache, msync()
 * of what is mapped for stores, or fdatasync() when that is much; pmem, flush of its cache lines,
 * or fdatasync() when they are many; volatile, nothing. -EIO: data was lost of which no flush had
 * told when this one began; what is stored from now on is another matter.
 */
int pcow_map_flush(pcow_map *map, uint64_t offset, uint64_t length, struct pcow_error *error);
/*
 * Map the slabs of a range anew, as the image has them: after the caller had put memory of his own
 * over a page, for instance to let an access to an unreadable one end.
 */
int pcow_map_restore(pcow_map *map, uint64_t offset, uint64_t length, struct pcow_error *error);
/*
 * Where the guest sees what lies at an address of the process. The kernel tells of memory that has
 * lost its content (BUS_MCEERR_AO) by one of the addresses that it is mapped at, which may be one
 * of the library's own. False: the guest does not see it.
 */
bool pcow_map_find(const pcow_map *map, const void *address, uint64_t *offset);
/*
 * The kernel has told that the page which the guest sees at this offset is lost (BUS_MCEERR_AO,
 * BUS_MCEERR_AR), and may forget it: in class page-cache it shows what the disk has in its place.
 * From this call on, until the file is closed, every access fails as one that cannot be served
 * does, the library's own as well. In class volatile the kernel keeps it, and this does nothing.
 * For one thread at a time.
 */
int pcow_map_lose(pcow_map *map, uint64_t offset, struct pcow_error *error);
/*
 * Keep blocks of the file for the last snapshot of a guest, which is made when the pool may have no
 * room: for state_size bytes of VM state with it (2 GiB at the most) and its records. And 2 MiB for
 * stores that trap and would wait: they get a block of that first, as it is no vCPU that waits
 * there, see pcow_map_trap(). What others store gets none of it. Returns at once: the thread of the
 * map takes the blocks, soon after there are some; again when they were used. Nothing on the medium
 * tells of them. keep false: they are given back, as they are by pcow_map_destroy().
 */
int pcow_map_keep_spare(pcow_map *map, bool keep, uint64_t state_size, struct pcow_error *error);
/*
 * From now on, or not any more, snapshots and VM state of the image that find the pool full are
 * made of what is kept.
 */
void pcow_map_use_spare(pcow_map *map, bool use);
/*
 * Of the 2 MiB: a block for a store that has found the pool full, and can neither trap nor be put
 * off. Try it again if this is true, at once: somebody else may be as fast. Async-signal-safe.
 */
bool pcow_map_lend_spare(pcow_map *map);
/* For poll(); readable while pcow_map_next_event() has something to say. */
int pcow_map_event_fd(const pcow_map *map);
bool pcow_map_next_event(pcow_map *map, struct pcow_event *event);

struct pcow_map_stats {
    enum pcow_engine engine;                   /* the one in force */
    uint64_t write_traps, read_traps;          /* accesses that had to be resolved */
    uint64_t pages_copied, pages_zeroed;       /* copy-on-write, expansion (4 KiB each) */
    /* slabs copied whole to stay inside the VMA budget */
    uint64_t slabs_promoted;
    /* by the thread that works ahead, since the map was made */
    uint64_t slabs_prepared;
    uint64_t slabs_missed;                     /* wanted before one was ready */
    uint64_t slabs_completed;                  /* hot slabs copied whole in the background */
    unsigned slabs_queued;                     /* guest slabs that wait for that thread */
    unsigned slabs_ready;                      /* prepared now */
    uint64_t pool_full_waits;
    uint64_t flushes;                          /* calls of pcow_map_flush() */
    uint64_t watches;                          /* calls of pcow_map_watch() */
    unsigned vmas, vma_budget;                 /* upper bound of mappings in use, and the limit */
    /* bytes of DRAM that the monitor itself uses, with such copies of read-only images */
    size_t memory;
    /* kept for the last snapshot, see pcow_map_keep_spare(): now, and as many as there should be */
    unsigned slabs_spare, slabs_spare_wanted;
    uint64_t stores_waiting;                   /* for space, now */
};

void pcow_map_get_stats_sized(const pcow_map *map, struct pcow_map_stats *stats,
                              size_t stats_size);

static inline void pcow_map_get_stats(const pcow_map *map, struct pcow_map_stats *stats)
{
    pcow_map_get_stats_sized(map, stats, sizeof *stats);
}

/* ---- check ----------------------------------------------------------------------------------- */

enum pcow_check_flags {
    PCOW_CHECK_REPAIR = 1 << 0,
    PCOW_CHECK_FORCE_SHARE = 1 << 1,
    /* with REPAIR: also if something is lost by it, see pcow_check() */
    PCOW_CHECK_ACCEPT_LOSS = 1 << 2,
    /* with REPAIR: only give space back; where there is a corruption, nothing is changed */
    PCOW_CHECK_LEAKS_ONLY = 1 << 3,
};

/*
 * What the guest or a snapshot could read, as long as nobody noticed the damage, and cannot after a
 * repair.
 */
enum pcow_loss_kind {
    PCOW_LOSS_DATA,                            /* pages of the guest */
    PCOW_LOSS_STATE,                           /* VM state of a snapshot */
    /* what the record of a layer said: its name, parent or size. No bytes are counted */
    PCOW_LOSS_SNAPSHOT,
    /* nothing tells whose it is, nor how much. No bytes are counted */
    PCOW_LOSS_UNKNOWN,
};

#define PCOW_NOWHERE UINT64_MAX

struct pcow_loss {
    enum pcow_loss_kind kind;
    uint32_t layer;                            /* 0: not known */
    const char *snapshot;                      /* NULL: the layer is none, or not known */
    /* where it lay, in VM state: of that; PCOW_NOWHERE: not known */
    uint64_t guest_offset;
    uint64_t length;                           /* of what is lost */
    uint64_t file_offset;                      /* of what there is of it; PCOW_NOWHERE: nothing */
    uint64_t content;                          /* bytes that are there, from its beginning on */
};

typedef void (*pcow_loss_fn)(void *opaque, const struct pcow_loss *loss);

/* What a number of lost bytes is. */
enum pcow_certainty {
    PCOW_EXACT,
    PCOW_AT_MOST,                              /* some of them may not have been in use */
    PCOW_ESTIMATE,                             /* what would tell is lost itself: it may be more */
};

struct pcow_check_result {
    uint64_t corruptions, corruptions_fixed;
    /* nobody wrote meanwhile: what was found is no mistake, and all was looked at */
    bool certain;
    /* of them those that no writing meanwhile looks like: all, if certain */
    uint64_t corruptions_certain;
    uint64_t leaks, leaks_fixed;               /* slabs */
    /* of them those that may hold data: what would tell may be lost, and has no mirror */
    uint64_t leaks_doubtful;
    /* of those what each host crash leaves where the file lies: what the guest had not flushed */
    uint64_t leaks_unflushed;
    /*
     * bytes of guest data and VM state that a repair gives up, or would; 0 and PCOW_ESTIMATE: some,
     * and nothing tells how many
     */
    uint64_t lost_size;
    enum pcow_certainty lost_certainty;
    /* ranges, with those of which no bytes are counted */
    uint64_t losses;
    /* nothing was repaired, as something would be lost */
    bool refused;
    /* path + this is the file that what was lost is kept in; "": there is none */
    char rescue_suffix[16];
    uint64_t slabs, slabs_used;
};

/*
 * Check one file (not its bases). Returns 0 if the check could be carried out, whatever it found:
 * see *result. -EMEDIUMTYPE if neither the header nor its copy is one of ours.
 *
 * A repair that would lose something is refused (result->refused), and changes nothing. With
 * PCOW_CHECK_ACCEPT_LOSS what it drops is first kept in a file beside the image, path + ".rescue",
 * which is on the medium before the image is touched: -EEXIST if one is there of a repair that was
 * done, -ENOSPC if there is no room; then nothing has changed, too. One that an interrupted repair
 * left stays, and the next is "-2" and so on. See doc/source/reference/rescue.rst.
 */
int pcow_check_sized(const char *path, unsigned flags, pcow_finding_fn finding, pcow_loss_fn loss,
                     void *opaque, struct pcow_check_result *result, size_t result_size,
                     struct pcow_error *error);

static inline int pcow_check(const char *path, unsigned flags, pcow_finding_fn finding,
                             void *opaque, struct pcow_check_result *result,
                             struct pcow_error *error)
{
    return pcow_check_sized(path, flags, finding, NULL, opaque, result, sizeof *result, error);
}

/* The same, and tell what is lost, or would be, range by range. loss: NULL, too. */
static inline int pcow_check_losses(const char *path, unsigned flags, pcow_finding_fn finding,
                                    pcow_loss_fn loss, void *opaque,
                                    struct pcow_check_result *result, struct pcow_error *error)
{
    return pcow_check_sized(path, flags, finding, loss, opaque, result, sizeof *result, error);
}

struct pcow_data_result {
    uint64_t verified;                         /* bytes that have the checksum that they should */
    uint64_t damaged;                          /* bytes of slabs that do not, or cannot be read */
    uint64_t unjudged;                         /* of slabs whose checksum is itself damaged */
    uint64_t without;                          /* bytes that have none */
    uint64_t corruptions;                      /* findings of damage; none can be repaired */
};

/*
 * Does the data of one file (not of its bases) have the checksums that were made of it? Nothing is
 * changed. The image must be one that can be opened, see pcow_check(). flags: with
 * PCOW_CHECK_FORCE_SHARE also while somebody writes to it.
 */
int pcow_check_data_sized(const char *path, unsigned flags, pcow_finding_fn finding,
                          pcow_progress_fn progress, void *opaque, struct pcow_data_result *result,
                          size_t result_size, struct pcow_error *error);

static inline int pcow_check_data(const char *path, unsigned flags, pcow_finding_fn finding,
                                  pcow_progress_fn progress, void *opaque,
                                  struct pcow_data_result *result, struct pcow_error *error)
{
    return pcow_check_data_sized(path, flags, finding, progress, opaque, result, sizeof *result,
                                 error);
}

#ifdef __cplusplus
}
#endif
#endif
