/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The moments in which nobody stores to the memory of the guest: no vCPU, no
 * request, no iothread; and whether there may be one.
 */
#include "qemu/osdep.h"
#include "block/aio.h"
#include "block/block-global-state.h"
#include "hw/core/cpu.h"
#include "hw/virtio/vhost.h"
#include "migration/misc.h"
#include "qapi/error.h"
#include "qemu/main-loop.h"
#include "system/cpus.h"
#include "system/hostmem-pcow.h"
#include "system/iothread.h"
#include "system/runstate.h"

/* The iothreads that hostmem_pcow_hold_guest() holds */
static struct {
    bool ready;
    unsigned count;
    QemuSemaphore parked, left;
    QemuEvent release;
} iothreads;

static void park_iothread(void *opaque)
{
    qemu_sem_post(&iothreads.parked);
    qemu_event_wait(&iothreads.release);
    qemu_sem_post(&iothreads.left);
}

static int hold_iothread(Object *obj, void *opaque)
{
    IOThread *iothread =
        (IOThread *)object_dynamic_cast(obj, TYPE_IOTHREAD);

    if (iothread) {
        aio_bh_schedule_oneshot(iothread_get_aio_context(iothread),
                                park_iothread, NULL);
        iothreads.count++;
    }
    return 0;
}

/*
 * Draining polls, and a job of another snapshot may begin there, and hold the
 * guest within: it gets what is missing, and gives that back alone.
 */
static unsigned held, parked;

unsigned hostmem_pcow_freezes;

bool hostmem_pcow_guest_is_held(void)
{
    return qatomic_read(&held) > 0;
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

static void park_iothreads(void)
{
    if (!iothreads.ready) {
        qemu_sem_init(&iothreads.parked, 0);
        qemu_sem_init(&iothreads.left, 0);
        qemu_event_init(&iothreads.release, false);
        iothreads.ready = true;
    }
    qemu_event_reset(&iothreads.release);
    iothreads.count = 0;
    object_child_foreach(object_get_objects_root(), hold_iothread, NULL);
    bql_unlock();
    for (unsigned i = 0; i < iothreads.count; i++) {
        qemu_sem_wait(&iothreads.parked);
    }
    bql_lock();
}

static void release_iothreads(void)
{
    qemu_event_set(&iothreads.release);
    for (unsigned i = 0; i < iothreads.count; i++) {
        qemu_sem_wait(&iothreads.left);
    }
}

/*
 * vCPUs first, as one of them may be about to submit a request; then the
 * requests, which need the iothreads to end; then the iothreads, which may be
 * taking new requests from a queue that the guest filled before, and need the
 * BQL if that reads or writes the registers of a device.  Then vhost in the
 * kernel: what it asks from here on is answered when the guest is released.
 */
void hostmem_pcow_hold_guest(void)
{
    qatomic_set(&held, held + 1);
    if (held == 1 && runstate_is_running()) {
        pause_all_vcpus();
    }
    bdrv_drain_all_begin();
    if (parked++ == 0) {
        park_iothreads();
    }
    vhost_hold_memory();
}

void hostmem_pcow_release_guest(void)
{
    vhost_release_memory();
    if (--parked == 0) {
        release_iothreads();
    }
    bdrv_drain_all_end();
    hostmem_pcow_note_freeze();
    qatomic_set(&held, held - 1);
    if (held == 0) {
        resume_all_vcpus();
    }
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
    /* Its thread is nobody's whom holding the guest stops. */
    if (qemu_system_dump_in_progress()) {
        error_setg(errp, "the memory of the VM is being dumped, which loads "
                   "from its pcow images: wait until that has ended");
        return false;
    }
    return true;
}
