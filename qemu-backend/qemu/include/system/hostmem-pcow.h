/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * memory-backend-file on a pcow image: a chain of images mapped as guest
 * memory by libpcow.
 *
 * A RAM block of such a backend has RAMBlock.pcow set; that, and not the kind
 * of device in front of it, is how the rest of QEMU recognises it.
 */
#ifndef SYSTEM_HOSTMEM_PCOW_H
#define SYSTEM_HOSTMEM_PCOW_H

#include "block/snapshot.h"
#include "qapi/qapi-builtin-types.h"
#include "qapi/qapi-types-migration.h"
#include "qapi/qapi-types-qom.h"
#include "migration/vmstate.h"
#include "qemu/event_notifier.h"
#include "qemu/iov.h"
#include "qemu/notify.h"
#include "system/hostmem.h"

struct pcow_error;              /* of libpcow */

#define PCOW_BASES_SIZE 32      /* of a SHA-256 */

/* What a VM state records of an image, and loading it checks. */
typedef struct HostMemPcowIdentity {
    uint8_t uuid[16];
    uint64_t size;              /* bytes */
    uint64_t generation;        /* of a read-only image, else 0 */
    uint32_t snapshot_id;       /* of a writable image, else 0 */
    uint8_t bases[PCOW_BASES_SIZE]; /* hash of the files below; zero: none */
} HostMemPcowIdentity;

/* Of an image in a live migration to this QEMU */
typedef enum HostMemPcowArrival {
    PCOW_AWAITED,
    PCOW_ARRIVING,
    PCOW_ARRIVED,               /* complete, and durable; still marked */
    PCOW_SETTLED,               /* it is the VM's, and has no mark */
} HostMemPcowArrival;

/* Of one kind of errors */
typedef struct HostMemPcowLog {
    uint64_t untold;
    int64_t at;                 /* the last line; 0: none that is of late */
} HostMemPcowLog;

/* Accesses of QEMU itself that failed, and of which nobody was told yet */
typedef struct HostMemPcowLost {
    unsigned count;
    int error;
    uint64_t offset;            /* the last one */
} HostMemPcowLost;

typedef struct HostMemPcow {
    /* properties of memory-backend-file */
    HostMemFormat format;
    HostMemPcowEngine engine;
    int full;                   /* HostMemPcowFull */

    /* what hostmem_pcow_alloc() opened; map is NULL without a pcow image */
    HostMemoryBackend *backend;
    struct pcow_image *image;
    struct pcow_map *map;
    char *id;
    bool readonly;
    bool plugged;               /* the machine was made without it */
    bool discard_blocked;
    Notifier exit;

    /* traps of vCPUs that hostmem_pcow_trap() served, and who waits for space */
    uint64_t write_traps, read_traps, full_waits;
    uint64_t pages;             /* copied or zeroed so far */
    bool waiting;               /* a vCPU waits for space, and an event has said so */
    int64_t full_at;            /* when one last found no space, get_clock() */
    uint64_t full_offset;
    EventNotifier became_full;
    QEMUTimer *listener;

    /* backends/pcow/space.c: percent that should be free, if it was set */
    uint8_t watermark;
    bool has_watermark;
    bool low;                   /* less is, and an event has said so */
    bool blind;                 /* nobody can look, and a warning has said so */
    QEMUTimer *space;
    unsigned spare_missing;     /* backends/pcow/spare.c: looks in a row */

    /* backends/pcow/tell.c: by whether it was for want of space */
    uint64_t errors, stores_full;
    HostMemPcowLog log[2];
    QEMUTimer *log_timer;
    /* likewise: stores that wait for space */
    uint64_t full_untold, full_last, waits_counted;
    bool full_told;             /* and PCOW_POOL_RESUMED is to come */
    int64_t space_told_at[2];   /* by whether stores wait */
    QEMUTimer *space_timer;
    HostMemPcowLost lost[2];    /* backends/pcow/cover.c, likewise */

    /* backends/pcow/mce.c: a page that the guest was warned of, and when */
    uint64_t warned;
    int64_t warned_at;

    uint32_t snapshot_id;       /* being saved, loaded or deleted; 0: none */
    /* migration/pcow/savevm.c: being saved; NULL: it is one, or none is */
    struct HostMemPcowSaving *saving;
    unsigned flushes;           /* in worker threads, or about to be */
    /*
     * A flush has told the host that something is lost; the guest, and the
     * snapshot that it was ahead of, are still to be told.  Atomic
     */
    bool untold_to_guest, untold_to_snapshot;

    /* With the BQL: its snapshots change, see hostmem_pcow_co_change() */
    bool changing;
    bool migration_ends;        /* and what it has left is being deleted */

    /* migration/pcow/identity.c */
    VMStateDescription vmstate;
    HostMemPcowIdentity identity;
    uint64_t address;           /* of the memory device in the guest; or 0 */
    bool verified;              /* by the loadvm under way */
    bool forking;               /* it loads the state of what the image is on */
    char *mismatch;             /* what it found instead */

    /* migration/pcow/loadvm.c */
    Notifier machine_ready;
    char *loading_mark;         /* by a loadvm that has not ended, or NULL */
    char *loading_name;         /* of the snapshot that bears the mark */
    GPtrArray *foreign_marks;   /* by a VM with other disks than this one */
    VMChangeStateEntry *state_changed;

    /* migration/pcow/outgoing.c, migration/pcow/incoming.c */
    struct HostMemPcowOutgoing *outgoing;   /* NULL: no migration to elsewhere */
    NotifierWithReturn migration;
    HostMemPcowArrival arrival;
    VMChangeStateEntry *arrival_ended;      /* NULL: none has begun here */
    uint64_t arrived_bytes;     /* since the last flush */
} HostMemPcow;

/* ---- hostmem-file.c ---- */

HostMemPcow *hostmem_file_get_pcow(Object *backend);

/* ---- backends/pcow/backend.c ---- */

void hostmem_pcow_class_init(ObjectClass *oc);

/*
 * Is @path to be opened as a pcow image?  By the format property, or by name
 * and magic together; never by content alone, which belongs to the guest.
 * Returns false with @errp set if it is named like one but is none.
 */
bool hostmem_pcow_probe(const HostMemPcow *pcow, const char *path,
                        bool *is_pcow, Error **errp);
bool hostmem_pcow_alloc(HostMemPcow *pcow, HostMemoryBackend *backend,
                        const char *path, bool readonly, uint64_t align,
                        uint64_t offset, bool discard_data, Error **errp);
void hostmem_pcow_finalize(HostMemPcow *pcow);

/*
 * What query-memory-devices lists of @devices, which it takes: all but a
 * virtio-pmem on an image.  libvirt 9.0 starts no domain that has one, and
 * ends one that it finds running, as it does not know the kind.
 * Later ones note its address, to give it to the next QEMU.  Without, it is
 * the first that is free: another one only if a DIMM in front of it was
 * unplugged.
 */
MemoryDeviceInfoList *hostmem_pcow_listed(MemoryDeviceInfoList *devices);

/* Call @fn for each pcow backend until it returns false; returns the last. */
typedef bool HostMemPcowFn(HostMemPcow *pcow, void *opaque, Error **errp);
bool hostmem_pcow_foreach(HostMemPcowFn *fn, void *opaque, Error **errp);

/*
 * Can the device keep the promise of an NVDIMM, that what the guest has flushed
 * from its CPU caches is durable?  Unless @told_volatile, fails if not.
 */
bool hostmem_pcow_check_nvdimm(HostMemPcow *pcow, bool told_volatile,
                               Error **errp);

/* Fails if there is a pcow backend, which @user cannot be given access to. */
bool hostmem_pcow_check_no_fd_user(const char *user, Error **errp);
/* Fails if there is a pcow backend: for vhost that does not ask first. */
bool hostmem_pcow_check_no_vhost(Error **errp);

/* ---- backends/pcow/places.c ---- */

void hostmem_pcow_places_init(void);

/*
 * Around a walk of a vCPU over the RAM blocks without the BQL: the images that
 * it finds stay.
 */
void hostmem_pcow_lock_images(void);
void hostmem_pcow_unlock_images(void);

/* Host addresses between which all images lie; high is 0 without one. */
extern uintptr_t hostmem_pcow_low, hostmem_pcow_high;

static inline bool hostmem_pcow_may_cover(const void *address)
{
    return unlikely((uintptr_t)address < hostmem_pcow_high &&
                    (uintptr_t)address >= hostmem_pcow_low);
}

void hostmem_pcow_add_place(HostMemPcow *pcow, void *host, uint64_t length);
/* It goes away: nobody is at it any more, and nobody is told of its errors. */
void hostmem_pcow_remove_place(HostMemPcow *pcow);
/* The image at a host address, or NULL, and where in it; in a handler, too. */
HostMemPcow *hostmem_pcow_find(const void *host, uint64_t *offset);

/* ---- backends/pcow/access.c ---- */

/*
 * Make a range of the RAM block accessible to the host kernel, which gets
 * EFAULT from a page that a store of our own would have made writable.
 * Returns 0, or -errno if the access must fail; then, if @report, an event
 * says so.  Any thread.
 */
int hostmem_pcow_resolve(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                         bool is_write, bool report);
/*
 * For a store of our own, by a pointer, which would wait for space with the
 * BQL held.
 */
int hostmem_pcow_prepare_own_store(HostMemPcow *pcow, uint64_t offset,
                                   uint64_t length, bool report);
/* Returns 0 for memory that is no image. */
int hostmem_pcow_prepare_store_at(void *host, uint64_t length);
/*
 * A system call is about to load from there.  If that cannot be prepared, it
 * will fail.
 */
void hostmem_pcow_prepare_load_at(void *host, uint64_t length);
/* The same of so much of it as is returned, for who loads the rest later on */
uint64_t hostmem_pcow_prepare_some_load_at(const void *host, uint64_t length);
/*
 * A device maps memory of the guest, to access it by a pointer.  So much of it
 * is prepared as takes no time: what the kernel may load from, but for block
 * requests; and some that may be stored to, which saves traps.
 */
void hostmem_pcow_prepare_mapped(HostMemPcow *pcow, uint64_t offset,
                                 uint64_t length, bool is_write);
/*
 * Between the two calls this thread maps memory of the guest that nobody is
 * going to access, as the guest does not use it: it is not prepared.
 */
void hostmem_pcow_map_for_nobody(bool begins);
bool hostmem_pcow_is_for_nobody(void);
/*
 * Serve the trap of a vCPU at @address, in a signal handler.  Returns 0 if it
 * can go on, -ENOSPC if there is no space, -EFAULT if that is not an image.
 */
int hostmem_pcow_trap(void *address, bool is_write);
/*
 * The same for a store that is about to come, if it is to an image: of a vCPU
 * in user mode, or of the @kernel.
 */
int hostmem_pcow_make_writable(void *address, bool kernel);

/* pcow_map_watch(), counted */
int hostmem_pcow_watch(HostMemPcow *pcow, struct pcow_error *error);
/*
 * The same for the buffer of a block request that is about to be submitted; in
 * a worker, if it takes long.  Returns -errno, or how many watches have begun
 * so far.
 */
int coroutine_fn hostmem_pcow_co_prepare_buffer(QEMUIOVector *qiov,
                                                size_t offset, size_t bytes,
                                                bool is_write);
/*
 * A request that loads from the buffer has failed with -errno, after so many
 * other tries: may that be for a watch that was beginning, or for a hole in a
 * full pool?  Then the buffer can be loaded from now.
 * @ended: what hostmem_pcow_co_prepare_buffer() has returned
 */
bool hostmem_pcow_may_retry(QEMUIOVector *qiov, size_t offset, size_t bytes,
                            int ended, int error, unsigned tries);

/* Can the byte be loaded?  Where SIGBUS is meant to be served. */
bool hostmem_pcow_can_load(const void *host);
/* A handler of SIGBUS: was it that load?  Then it goes on at @context. */
bool hostmem_pcow_skip_trial(void *context);
/* Can all of the range?  With @report, an event says so if not. */
bool hostmem_pcow_readable(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                           bool report);

/* Does a store that finds the pool full fail, rather than wait? */
bool hostmem_pcow_fails_when_full(const void *address);

/* ---- backends/pcow/flush.c ---- */

/* Make everything stored so far durable.  Returns 0 or -errno.  Any thread. */
int hostmem_pcow_flush(HostMemPcow *pcow, Error **errp);
/*
 * The same for the guest, in a worker thread: begin where the job is submitted,
 * in the main loop, and end is the job.  In between the image stays what it is.
 * What was lost is told to the guest, also if one of the others was told.
 */
void hostmem_pcow_begin_flush(HostMemPcow *pcow);
int hostmem_pcow_end_flush(HostMemPcow *pcow, Error **errp);
/* Main loop */
void hostmem_pcow_await_flushes(HostMemPcow *pcow);
/* The same in a worker thread, while the guest and the main loop run */
int coroutine_fn hostmem_pcow_co_flush(HostMemPcow *pcow, Error **errp);
/*
 * Until not much can be left for a flush that the guest waits for.  An error is
 * one of hostmem_pcow_all_flush() after it.
 */
void coroutine_fn hostmem_pcow_co_all_flush_ahead(void);
/* Fails, once, if one of those has failed: no later flush tells it again. */
bool hostmem_pcow_all_flushed_ahead(Error **errp);
/* The same in the main thread, which keeps the guest from nothing meanwhile */
void hostmem_pcow_all_flush_ahead(void);

/* ---- backends/pcow/change.c ---- */

/*
 * Call @fn, which changes the snapshots of the image and waits for its medium,
 * in a worker thread, while the guest and the main loop run.  Nobody else may
 * call the library for the image meanwhile, but for what it allows beside any
 * call: so whoever does anything to snapshots, or lists them, waits first.
 */
bool coroutine_fn hostmem_pcow_co_change(HostMemPcow *pcow, HostMemPcowFn *fn,
                                         void *opaque, Error **errp);
/*
 * The same in the main thread, which does nothing else, but keeps the guest
 * from nothing: without the BQL.
 */
bool hostmem_pcow_change_unlocked(HostMemPcow *pcow, HostMemPcowFn *fn,
                                  void *opaque, Error **errp);
/*
 * Until no image is being changed so, nor has snapshots of a migration that has
 * ended.  Main loop; not while the guest is held.
 */
void coroutine_mixed_fn hostmem_pcow_await_changes(void);
bool hostmem_pcow_at_rest(void);
/* Perhaps it is: who waits looks. */
void hostmem_pcow_tell_at_rest(void);

typedef struct HostMemPcowDeletion {
    const char *name;
    uint64_t freed;             /* bytes, when it is done */
} HostMemPcowDeletion;

typedef struct HostMemPcowRenaming {
    const char *name, *new_name;
    int ret;                    /* of the library, when it is done */
} HostMemPcowRenaming;

/* A snapshot that is made in steps, see pcow_snapshot_prepare() */
typedef struct HostMemPcowMaking {
    const char *name;
    int64_t date_sec;
    uint32_t date_nsec;
    uint64_t token;             /* 0: nothing has begun */
} HostMemPcowMaking;

/* Each a HostMemPcowFn; @opaque is one of the above, which they fill in. */
bool hostmem_pcow_delete_snapshot(HostMemPcow *pcow, void *deletion,
                                  Error **errp);
bool hostmem_pcow_rename_snapshot(HostMemPcow *pcow, void *renaming,
                                  Error **errp);
/*
 * The steps before and after it is frozen, with the flushes that they take:
 * what the guest has not flushed is part of it, too.
 */
bool hostmem_pcow_prepare_snapshot(HostMemPcow *pcow, void *making,
                                   Error **errp);
bool hostmem_pcow_finish_snapshot(HostMemPcow *pcow, void *making,
                                  Error **errp);
bool hostmem_pcow_abandon_snapshot(HostMemPcow *pcow, void *making,
                                   Error **errp);

/* ---- backends/pcow/error.c ---- */

bool hostmem_pcow_error_init(Error **errp);
/*
 * The host's kernel has told that the page at this offset is lost: no access to
 * it succeeds any more, also where the kernel forgets it.  Main loop.
 */
void hostmem_pcow_lose(HostMemPcow *pcow, uint64_t offset);
/* Only that: in a handler, too */
int hostmem_pcow_mark_lost(HostMemPcow *pcow, uint64_t offset,
                           struct pcow_error *error);

/* ---- backends/pcow/tell.c ---- */

void hostmem_pcow_begin_telling(HostMemPcow *pcow);
/* With what has not been told yet */
void hostmem_pcow_end_telling(HostMemPcow *pcow);
/* An access failed, or @count of them.  Main loop, also those below. */
void hostmem_pcow_tell_error(HostMemPcow *pcow, uint64_t offset, int error,
                             const char *consequence);
void hostmem_pcow_tell_errors(HostMemPcow *pcow, uint64_t offset, int error,
                              uint64_t count, const char *consequence);
/* A store of a vCPU waits for space. */
void hostmem_pcow_tell_full(HostMemPcow *pcow, uint64_t offset);
/*
 * Stores of other threads do, or did: as many as the library has counted, whose
 * queue of events may have been full.
 */
void hostmem_pcow_tell_waits(HostMemPcow *pcow, uint64_t offset);
/* Perhaps none does any more. */
void hostmem_pcow_tell_resumed(HostMemPcow *pcow);
/* Does a store of another thread than a vCPU?  Any thread. */
bool hostmem_pcow_has_waiting_store(const HostMemPcow *pcow);
/* An access of a device failed, and it knows.  Any thread. */
void hostmem_pcow_send_error(HostMemPcow *pcow, uint64_t offset,
                             const char *error);

/* ---- backends/pcow/report.c ---- */

/*
 * An access of @cpu at @host failed.  It gets a machine check soon; until then
 * it is to try again.  In its thread, without locks.
 */
void hostmem_pcow_memory_error(CPUState *cpu, const void *host, int error);
/* The vCPU is unplugged, and its thread has ended. */
void hostmem_pcow_forget_cpu(CPUState *cpu);
/* That is under way. */
bool hostmem_pcow_is_being_told(const CPUState *cpu);
/* The image goes away, and its errors that have not been told with it. */
void hostmem_pcow_forget_errors(HostMemPcow *pcow);

/* ---- backends/pcow/mce.c ---- */

typedef enum HostMemPcowMce {
    HOST_MEM_PCOW_MCE_SENT,
    HOST_MEM_PCOW_MCE_BUSY,     /* with one; another would reset it */
    HOST_MEM_PCOW_MCE_DEAF,     /* it takes none, or would not survive it */
} HostMemPcowMce;

/* A machine check for a vCPU that cannot go on.  Main loop. */
HostMemPcowMce hostmem_pcow_machine_check(CPUState *cpu, HostMemPcow *pcow,
                                          uint64_t offset);
/*
 * The kernel says that memory at this address of ours is lost, which nobody has
 * accessed yet.  False if it is none of an image, or the guest does not see it.
 * Main loop.
 */
bool hostmem_pcow_warn_guest(const void *address);

/* ---- backends/pcow/tcg.c ---- */

void hostmem_pcow_tcg_init(void);
/* In a signal handler: true for a trap of generated code, which goes on. */
bool hostmem_pcow_tcg_serve(const siginfo_t *info, void *context);
/* The same, of a store of a helper that has failed: does not return then. */
void hostmem_pcow_tcg_leave_store(const void *address, int error,
                                  const void *context);
/* Is the vCPU to leave its loop rather than to run?  In its thread. */
bool hostmem_pcow_tcg_waits(CPUState *cpu);
void hostmem_pcow_prepare_load(CPUState *cpu, const void *host, uintptr_t ra);
void hostmem_pcow_prepare_store(CPUState *cpu, void *host, uintptr_t ra);

/* ---- target/i386/pcow/fault.c ---- */

/*
 * KVM_RUN of this vCPU returned -EFAULT.  Returns 0 if it can be run again,
 * EXCP_INTERRUPT if the VM is being stopped, -EFAULT if it was not an access
 * to an image.
 */
int hostmem_pcow_kvm_fault(CPUState *cpu);
/*
 * KVM emulates some instructions (rep ins, rep movs from a device).  It cannot
 * store to a page that must be copied first, and leaves that to us as if the
 * page were a device: KVM_EXIT_MMIO.  Returns true if it is such a store; it is
 * done before the vCPU runs again.
 */
bool hostmem_pcow_kvm_begin_store(CPUState *cpu);
/*
 * Do it, if there is one.  Returns 0, or EXCP_INTERRUPT if it still waits for
 * space and somebody wants something of the vCPU; also while a machine check
 * for the vCPU is under way, which is to find it where it is.
 */
int hostmem_pcow_kvm_finish_store(CPUState *cpu);
/* The vCPU is reset, or its state loaded: what it waited with is past. */
void hostmem_pcow_kvm_drop_store(CPUState *cpu);
/* The vCPU of this thread ends. */
void hostmem_pcow_kvm_forget_store(void);
/*
 * How many vCPUs have one to do.  Their registers are past the instruction, and
 * no VM state has the store.
 */
extern unsigned hostmem_pcow_kvm_stores;
/* Of a VM that is stopped: fails if it has one. */
bool hostmem_pcow_check_no_stores(Error **errp);

/* ---- target/i386/pcow/shared.c ---- */

/*
 * Make the pages of images writable that KVM itself stores to for this vCPU, if
 * a snapshot may have changed that since the vCPU ran.  Returns 0, or
 * EXCP_INTERRUPT as hostmem_pcow_kvm_finish_store().
 */
int hostmem_pcow_kvm_prepare_shared(CPUState *cpu);

/* ---- backends/pcow/qmp.c ---- */

void hostmem_pcow_handle_events(void *pcow);
void hostmem_pcow_handle_full(EventNotifier *notifier);
/* No vCPU has found the pool full for a second: it goes on. */
void hostmem_pcow_handle_silence(void *pcow);
/* The mapped image that is the backend @id; fails if there is none. */
HostMemPcow *hostmem_pcow_by_id(const char *id, Error **errp);

/* ---- backends/pcow/snapshot.c ---- */

/* Of a call of libpcow: false if it has failed, with its words in @errp. */
bool hostmem_pcow_propagate(int ret, const struct pcow_error *error,
                            Error **errp);

/*
 * Revert the image, without a @name to what it stands on, and forget what was
 * derived from its contents.
 */
bool hostmem_pcow_revert(HostMemPcow *pcow, const char *name, Error **errp);

/* ---- backends/pcow/hold.c ---- */

#define HOSTMEM_PCOW_LIMIT_MS 100

/*
 * Nobody may store to an image while all of its pages change owner: vCPUs,
 * iothreads and block requests with buffers there are held.  The run state
 * stays what it is, so that management sees no stop and no resume.
 *
 * The first two fail, with the guest as it was, if such a request or an
 * iothread does not end within a limit.  The first one does not wait for
 * requests, as for a VM that is stopped, and the second one does not hold the
 * guest while it waits.  Main loop; nothing of it runs until the release, which
 * tells for how many nanoseconds the guest was held.
 */
bool hostmem_pcow_hold_guest(Error **errp);
bool coroutine_fn hostmem_pcow_co_hold_guest(uint32_t limit_ms, Error **errp);
uint64_t hostmem_pcow_release_guest(void);
/*
 * Around a request with this buffer, if it lies in an image; then begin returns
 * true, perhaps after a while.
 */
bool coroutine_fn hostmem_pcow_begin_request(const QEMUIOVector *qiov);
void hostmem_pcow_end_request(void);
/*
 * Fails while a migration is under way, from here (what the image gets now
 * would stay behind, and holding the guest must not meet the end of the
 * migration) or to here (the image is not the VM's yet), or a dump (which loads
 * from images in a thread that is not held), or unless hostmem_pcow_at_rest().
 */
bool hostmem_pcow_check_settled(Error **errp);
/*
 * How often pages may have become read-only that were writable: images that
 * were mapped, ends of a hold, and slabs that could not be mapped.  With the
 * BQL; any thread may read it.
 */
extern unsigned hostmem_pcow_freezes;
void hostmem_pcow_note_freeze(void);
/* The same while vCPUs run: before they go on they make their areas writable */
void hostmem_pcow_forget_areas(void);
/* Also while that is still under way.  Any thread may ask. */
bool hostmem_pcow_guest_is_held(void);

/* ---- backends/pcow/space.c ---- */

void hostmem_pcow_space_class_init(ObjectClass *oc);
/* Look at the pool of a mapped image now and then, until stopped.  Main loop. */
void hostmem_pcow_watch_space(HostMemPcow *pcow);
void hostmem_pcow_end_space(HostMemPcow *pcow);

/* ---- backends/pcow/spare.c ---- */

/*
 * Room is kept for a last checkpoint of the VM, for so many bytes of state in
 * the image @home; NULL: none is, any more.
 */
void hostmem_pcow_keep_spare(const HostMemPcow *home, uint64_t state_size);
/* The checkpoint that is taken now gets it, if the pool has no other. */
void hostmem_pcow_use_spare(bool used);
/*
 * The pool is full for a store that cannot be put off: true if it is worth
 * another try, at once.
 */
bool hostmem_pcow_lend_spare(const void *address);
/* By the clock: an image may be a new one, or its pool have no room. */
void hostmem_pcow_look_at_spare(HostMemPcow *pcow);

/* ---- migration/pcow/identity.c ---- */

void hostmem_pcow_vmstate_register(HostMemPcow *pcow);
void hostmem_pcow_vmstate_unregister(HostMemPcow *pcow);
bool hostmem_pcow_get_identity(HostMemPcow *pcow, uint32_t snapshot_id,
                               HostMemPcowIdentity *identity, Error **errp);
/* That of its base, at the snapshot that shows; fails if it is on none. */
bool hostmem_pcow_get_base_identity(HostMemPcow *pcow,
                                    HostMemPcowIdentity *identity,
                                    Error **errp);
/*
 * After loadvm: fails if the VM state did not fit an image or, if it could be
 * @loaded, said nothing of one.
 */
bool hostmem_pcow_all_verified(bool loaded, Error **errp);

/* ---- migration/pcow/savevm.c ---- */

struct pcow_snapshot;
/* The snapshot @name, or @id without a name; its id is 0 if there is none. */
bool hostmem_pcow_find_snapshot(struct pcow_image *image, const char *name,
                                uint32_t id, struct pcow_snapshot *found,
                                Error **errp);

/* Fails if there is a pcow backend, which a snapshot of disks would leave out. */
bool hostmem_pcow_check_disk_only(Error **errp);

/*
 * The pcow side of savevm, loadvm and delvm: all images or none.  @devices are
 * the block devices that take part, as in snapshot-save.
 */
bool hostmem_pcow_all_check_new(const char *name, bool has_devices,
                                strList *devices, Error **errp);
/*
 * The VM is about to be stopped for a snapshot of this date: all that can be
 * done before is, and the medium is waited for.
 */
bool hostmem_pcow_all_prepare_snapshot(GDateTime *date, bool has_devices,
                                       strList *devices, Error **errp);
/* Could an image have a new snapshot of that name, of the whole VM? */
bool hostmem_pcow_all_check_name(const char *name, Error **errp);
/*
 * Takes the snapshot under the name of a mark, without waiting for a medium.  It
 * is none before hostmem_pcow_all_flush(), and has that name until
 * hostmem_pcow_all_finish_snapshot(), when the VM runs again.
 */
bool hostmem_pcow_all_create_snapshot(const QEMUSnapshotInfo *sn,
                                      bool has_devices, strList *devices,
                                      Error **errp);
/* What it has of the guest, and the snapshots, are durable from here on. */
bool hostmem_pcow_all_flush(Error **errp);
bool hostmem_pcow_all_finish_snapshot(const char *name, Error **errp);
void hostmem_pcow_all_undo_snapshot(void);
/*
 * Around the deletion on the disks; end deletes what begin has marked.  If the
 * disks fail, hostmem_pcow_all_recover() takes back or finishes.
 */
bool hostmem_pcow_all_begin_delete(const char *name, bool has_devices,
                                   strList *devices, Error **errp);
bool hostmem_pcow_all_end_delete(Error **errp);

/* ---- migration/pcow/outgoing.c ---- */

void hostmem_pcow_migration_register(HostMemPcow *pcow);
void hostmem_pcow_migration_unregister(HostMemPcow *pcow);
/*
 * Fails if the VM has pcow images and they cannot go along, to or from @addr.
 * What a file descriptor is of shows only when it is opened: one that is no
 * socket fails then.
 */
bool hostmem_pcow_check_migration(MigrationAddress *addr, Error **errp);
/* Does a migration call its own snapshots so? */
bool hostmem_pcow_is_migration_name(const char *name);

/* ---- migration/pcow/incoming.c ---- */

/* Fails if the image is one to which a VM migrates, and that has not ended. */
bool hostmem_pcow_check_arrived(HostMemPcow *pcow, Error **errp);
/* Does an image that waits for a VM have a snapshot of that name? */
bool hostmem_pcow_is_arrival_name(const char *name);
/* Is a VM expected here, or one of its images marked still? */
bool hostmem_pcow_is_arriving(void);
/*
 * The stream of a migration to here has been loaded: the images are the VM's
 * from now, before anything else is.  Ends this QEMU if that fails.
 */
void hostmem_pcow_incoming_end(void);

/* ---- migration/pcow/loadvm.c ---- */

void hostmem_pcow_loadvm_register(HostMemPcow *pcow);
void hostmem_pcow_loadvm_unregister(HostMemPcow *pcow);
/*
 * Fails unless every image and every disk has the snapshot that belongs to VM
 * state @sn.  Marks it, for the disks are reverted next, and the images only
 * then.  The mark of a load that fails halfway stays until the snapshot is
 * loaded again, or the VM runs.
 */
bool hostmem_pcow_all_check_load(const QEMUSnapshotInfo *sn, bool has_devices,
                                 strList *devices, Error **errp);
/* Fails if a load has failed so, unless it was that of the snapshot @name. */
bool hostmem_pcow_check_not_loading(const char *name, Error **errp);
bool hostmem_pcow_all_revert_snapshot(const char *name, Error **errp);
/* Takes the marks of a load away, if there are any. */
bool hostmem_pcow_all_end_load(Error **errp);

/* ---- migration/pcow/carrier.c ---- */

/*
 * A snapshot that is being taken or deleted, or @loading, reverted to, as the
 * name of it in an image.
 */
typedef struct HostMemPcowMark {
    bool loading;
    uint32_t date_sec, date_nsec;   /* of the snapshot */
    unsigned disks;                 /* that have a part of it, or shall have */
} HostMemPcowMark;

char *hostmem_pcow_mark_name(const HostMemPcowMark *mark);
bool hostmem_pcow_is_mark(const char *name);
/* How many disks take part; with @mark: how many have a snapshot of its date. */
bool hostmem_pcow_count_disks(bool has_devices, strList *devices,
                              const HostMemPcowMark *mark, unsigned *count,
                              Error **errp);
/* Fails if a disk has a snapshot @name, which savevm would overwrite. */
bool hostmem_pcow_check_new_on_disks(const char *name, bool has_devices,
                                     strList *devices, Error **errp);
/* Fails if there is a disk that savevm would take along. */
bool hostmem_pcow_check_no_disks(Error **errp);
/* Fails if a disk cannot be reverted to the snapshot of VM state @sn. */
bool hostmem_pcow_check_load_on_disks(const QEMUSnapshotInfo *sn,
                                      bool has_devices, strList *devices,
                                      Error **errp);
/* Finish or take back what a QEMU that was killed left unfinished: no load */
void hostmem_pcow_all_recover(void);
/* The same for loads as well.  If one cannot be finished, this QEMU ends. */
void hostmem_pcow_recover_at_start(void);
/*
 * The marks of an image that is plugged are those of another VM, whose disks
 * decide: leave them.
 */
void hostmem_pcow_note_foreign_marks(HostMemPcow *pcow);
/*
 * Fails if @pcow is plugged and a QEMU that was reverting it with another VM,
 * or this one, was killed: disks cannot be reverted any more.
 */
bool hostmem_pcow_check_plug(HostMemPcow *pcow, Error **errp);
bool hostmem_pcow_present(void);

/* ---- migration/pcow/parts.c, recovery.c: see migration/pcow/checkpoint.h ---- */

/* May be called for each image. */
void checkpoint_init(void);
/* The VM runs, with memory and devices as they are. */
void checkpoint_note_running(void);

/* Is that the name of a checkpoint of the VM that is unfinished? */
bool hostmem_pcow_is_checkpoint_mark(const char *name);
/*
 * Finish or take back what a QEMU that was killed left of those, reverts only
 * at the start, as above.
 */
void checkpoint_recover(bool at_start);

#endif
