/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The moments in which nobody stores to the memory of the guest: no vCPU, no
 * request, no iothread; and whether there may be one.
 *
 * Of the block requests only those matter whose buffers lie in an image, as the
 * kernel may store there at any time (by DMA, to pages that it has pinned).
 * While somebody wants to hold the guest, no other one of them begins; the
 * guest runs on until those that have begun have ended, or the limit is over.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "block/aio.h"
#include "hw/core/cpu.h"
#include "hw/virtio/vhost.h"
#include "migration/misc.h"
#include "qapi/error.h"
#include "qemu/coroutine.h"
#include "qemu/lockable.h"
#include "qemu/main-loop.h"
#include "qemu/queue.h"
#include "qemu/timer.h"
#include "system/cpus.h"
#include "system/hostmem-pcow.h"
#include "system/iothread.h"
#include "system/runstate.h"

/* ---- requests ------------------------------------------------------------ */

/* Whoever waits, in the main loop, until no request has a buffer in an image */
typedef struct Holder {
    Coroutine *waits;
    QEMUBH *wake;
    QLIST_ENTRY(Holder) next;
} Holder;

static struct {
    unsigned in_flight;
    unsigned closed;            /* by so many; others but to read: with lock */
    QemuMutex lock;
    CoQueue gate;
    QLIST_HEAD(, Holder) holders;
} requests;

static void __attribute__((constructor)) requests_init(void)
{
    qemu_mutex_init(&requests.lock);
    qemu_co_queue_init(&requests.gate);
}

/* No part of a buffer spans two RAM blocks. */
static bool lies_in_image(const QEMUIOVector *qiov)
{
    uint64_t offset;

    for (int i = 0; i < qiov->niov; i++) {
        if (qiov->iov[i].iov_len &&
            hostmem_pcow_find(qiov->iov[i].iov_base, &offset)) {
            return true;
        }
    }
    return false;
}

static void end_request(void)
{
    Holder *holder;

    if (qatomic_fetch_dec(&requests.in_flight) > 1 ||
        !qatomic_read(&requests.closed)) {
        return;
    }
    QEMU_LOCK_GUARD(&requests.lock);
    QLIST_FOREACH(holder, &requests.holders, next) {
        qemu_bh_schedule(holder->wake);
    }
}

static void coroutine_fn begin_request(void)
{
    for (;;) {
        /* Who closes the gate looks at the number after that. */
        qatomic_inc(&requests.in_flight);
        smp_mb__after_rmw();
        if (!qatomic_read(&requests.closed)) {
            return;
        }
        end_request();
        qemu_mutex_lock(&requests.lock);
        if (requests.closed) {
            qemu_co_queue_wait(&requests.gate, &requests.lock);
        }
        qemu_mutex_unlock(&requests.lock);
    }
}

bool coroutine_fn hostmem_pcow_begin_request(const QEMUIOVector *qiov)
{
    if (!lies_in_image(qiov)) {
        return false;
    }
    begin_request();
    return true;
}

void hostmem_pcow_end_request(void)
{
    end_request();
}

static void close_gate(void)
{
    qemu_mutex_lock(&requests.lock);
    qatomic_set(&requests.closed, requests.closed + 1);
    qemu_mutex_unlock(&requests.lock);
    smp_mb();
}

static void open_gate(void)
{
    qemu_mutex_lock(&requests.lock);
    qatomic_set(&requests.closed, requests.closed - 1);
    while (!requests.closed &&
           qemu_co_enter_next(&requests.gate, &requests.lock)) {
    }
    qemu_mutex_unlock(&requests.lock);
}

static void wake_holder(void *opaque)
{
    Holder *holder = opaque;

    if (holder->waits) {
        aio_co_wake(g_steal_pointer(&holder->waits));
    }
}

/* Until there is none, or get_clock() is at the deadline.  The gate is closed. */
static void coroutine_fn await_requests(int64_t deadline)
{
    AioContext *context = qemu_get_aio_context();
    Holder holder = { .wake = aio_bh_new(context, wake_holder, &holder) };
    QEMUTimer *timer = aio_timer_new(context, QEMU_CLOCK_REALTIME, SCALE_NS,
                                     wake_holder, &holder);

    WITH_QEMU_LOCK_GUARD(&requests.lock) {
        QLIST_INSERT_HEAD(&requests.holders, &holder, next);
    }
    smp_mb();
    timer_mod(timer, deadline);
    while (qatomic_read(&requests.in_flight) && get_clock() < deadline) {
        if (!timer_pending(timer)) {
            timer_mod(timer, deadline);
        }
        holder.waits = qemu_coroutine_self();
        qemu_coroutine_yield();
    }
    WITH_QEMU_LOCK_GUARD(&requests.lock) {
        QLIST_REMOVE(&holder, next);
    }
    timer_free(timer);
    qemu_bh_delete(holder.wake);
}

/* ---- iothreads ----------------------------------------------------------- */

/* Shared with iothreads that come to it late, when nobody waits any more */
typedef struct Park {
    unsigned references;
    QemuSemaphore parked;
    QemuEvent release;
} Park;

static Park *park;              /* while the guest is held */

static void unref_park(Park *p)
{
    if (qatomic_fetch_dec(&p->references) == 1) {
        qemu_sem_destroy(&p->parked);
        qemu_event_destroy(&p->release);
        g_free(p);
    }
}

static void park_iothread(void *opaque)
{
    Park *p = opaque;

    qemu_sem_post(&p->parked);
    qemu_event_wait(&p->release);
    unref_park(p);
}

static int hold_iothread(Object *obj, void *opaque)
{
    IOThread *iothread =
        (IOThread *)object_dynamic_cast(obj, TYPE_IOTHREAD);
    unsigned *count = opaque;

    if (iothread) {
        qatomic_inc(&park->references);
        aio_bh_schedule_oneshot(iothread_get_aio_context(iothread),
                                park_iothread, park);
        ++*count;
    }
    return 0;
}

/* The time may be over; each of them gets a little all the same. */
static int milliseconds_until(int64_t deadline)
{
    return MAX((deadline - get_clock()) / SCALE_MS, 10);
}

static bool park_iothreads(int64_t deadline)
{
    unsigned count = 0;
    bool ok = true;

    park = g_new0(Park, 1);
    park->references = 1;
    qemu_sem_init(&park->parked, 0);
    qemu_event_init(&park->release, false);
    object_child_foreach(object_get_objects_root(), hold_iothread, &count);
    bql_unlock();
    for (unsigned i = 0; i < count && ok; i++) {
        ok = qemu_sem_timedwait(&park->parked,
                                milliseconds_until(deadline)) == 0;
    }
    bql_lock();
    return ok;
}

static void release_iothreads(void)
{
    qemu_event_set(&park->release);
    unref_park(g_steal_pointer(&park));
}

/* ---- the guest ----------------------------------------------------------- */

unsigned hostmem_pcow_freezes;

static bool held, paused;
static int64_t held_at;

bool hostmem_pcow_guest_is_held(void)
{
    return qatomic_read(&held);
}

void hostmem_pcow_note_freeze(void)
{
    qatomic_store_release(&hostmem_pcow_freezes, hostmem_pcow_freezes + 1);
}

/* The kernel's own pages, of clocks and the like, may be among them. */
void hostmem_pcow_forget_areas(void)
{
    CPUState *cpu;

    hostmem_pcow_note_freeze();
    CPU_FOREACH(cpu) {
        qemu_cpu_kick(cpu);
    }
}

static void release(void)
{
    release_iothreads();
    hostmem_pcow_note_freeze();
    qatomic_set(&held, false);
    if (paused) {
        resume_all_vcpus();
    }
}

static bool does_not_wait(HostMemPcow *pcow, void *opaque, Error **errp)
{
    if (!hostmem_pcow_has_waiting_store(pcow)) {
        return true;
    }
    error_setg(errp, "a store of a device to the pcow image '%s' waits for "
               "space in its pool: the VM has run on, and nothing was changed. "
               "Free space or extend the pool, and try again",
               pcow_path(pcow->image));
    return false;
}

/*
 * vCPUs first, as one of them may be about to submit a request; then the
 * iothreads, which may be taking requests from a queue that the guest filled
 * before, and need the BQL if that reads or writes the registers of a device.
 * Then vhost in the kernel: what it asks from here on is answered when the
 * guest is released.  Nothing here polls, so nothing else of the main loop
 * comes between.
 */
static bool hold(int64_t deadline, Error **errp)
{
    bool ok;

    assert(!held);
    qatomic_set(&held, true);
    held_at = get_clock();
    paused = runstate_is_running();
    if (paused) {
        pause_all_vcpus();
    }
    ok = park_iothreads(deadline);
    if (ok && !qatomic_read(&requests.in_flight)) {
        vhost_hold_memory();
        return true;
    }
    release();
    open_gate();
    if (!hostmem_pcow_foreach(does_not_wait, NULL, errp)) {
        return false;
    }
    if (ok) {
        error_setg(errp, "a disk has not ended its requests to memory of the "
                   "guest that is in a pcow image, in the time that was given "
                   "for it: the VM has run on, and nothing was changed. Try "
                   "again when its disks are faster, or give it more time");
    } else {
        error_setg(errp, "an iothread does not stop in the time that was given "
                   "for it: the VM has run on, and nothing was changed. Try "
                   "again");
    }
    return false;
}

bool hostmem_pcow_hold_guest(Error **errp)
{
    close_gate();
    return hold(get_clock() + HOSTMEM_PCOW_LIMIT_MS * SCALE_MS, errp);
}

bool coroutine_fn hostmem_pcow_co_hold_guest(uint32_t limit_ms, Error **errp)
{
    int64_t deadline = get_clock() + (int64_t)limit_ms * SCALE_MS;

    close_gate();
    await_requests(deadline);
    return hold(deadline, errp);
}

uint64_t hostmem_pcow_release_guest(void)
{
    uint64_t pause;

    vhost_release_memory();
    release();
    pause = get_clock() - held_at;
    open_gate();
    return pause;
}

bool hostmem_pcow_check_settled(Error **errp)
{
    if (migration_is_running()) {
        error_setg(errp, "the VM is being migrated, and what changes in its "
                   "pcow images now would stay behind: wait until that has "
                   "ended");
        return false;
    }
    if (hostmem_pcow_is_arriving()) {
        error_setg(errp, "the VM is being migrated to here, and has not "
                   "arrived, so its pcow images are not its own yet: wait for "
                   "it; or, if that has failed, end this QEMU");
        return false;
    }
    /* Who begins with something has waited for that; it has begun since */
    if (!hostmem_pcow_at_rest()) {
        error_setg(errp, "the snapshots of a pcow image of the VM are being "
                   "changed: wait until that has ended");
        return false;
    }
    /* Its thread is nobody's whom holding the guest stops. */
    if (qemu_system_dump_in_progress()) {
        error_setg(errp, "the memory of the VM is being dumped, which loads "
                   "from its pcow images: wait until that has ended");
        return false;
    }
    return true;
}
