/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A vCPU under KVM that stores to a page of a pcow image that must be copied
 * first.
 *
 * The page is mapped read-only, so KVM_RUN returns -EFAULT, in most kernels
 * without an address.  The instruction has not been executed: make the page
 * writable and run the vCPU again.  Where it was is found out or guessed (see
 * target/i386/pcow/find.c), which costs a few ioctls; what cannot be guessed
 * (some of the stores that the processor makes by itself; scattered vectors)
 * is found by userfaultfd, see pcow_map_watch().
 *
 * The image may be unplugged meanwhile.  One that was found in the memory of
 * the guest stays as long as RCU is held (the flat view has a reference), one
 * from the list of RAM blocks as long as the images are locked.
 */
#include "qemu/osdep.h"
#include <linux/kvm.h>
#include <pcow.h>
#include "cpu.h"
#include "exec/ramlist.h"
#include "hw/core/cpu.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/rcu.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"
#include "fault.h"

#define RETRY_INTERVAL_NS (10 * 1000 * 1000)

/*
 * How often a vCPU may come back with the same registers before we give up:
 * without a store of anybody being served meanwhile, which may have cost us
 * the watch; and in all
 */
#define MAX_TRIES_ALONE 10
#define MAX_TRIES 1000
/*
 * A try after so long is the first one: the vCPU has been somewhere else, and
 * has the same registers again, as in a loop.
 */
#define TRIES_APART_NS (100 * 1000 * 1000)

/* A vCPU that stays where it is */
static __thread struct {
    struct kvm_regs regs;
    unsigned tries, tries_alone;
    uint64_t served;
    int64_t at;
} stuck;

/*
 * The vCPU cannot go on, but whoever removes the cause can let it try again
 * (cont), which an internal error would not allow.
 */
static int stop_vm(void)
{
    bql_lock();
    vm_stop(RUN_STATE_IO_ERROR);
    bql_unlock();
    return EXCP_INTERRUPT;
}

/* Returns true if there is no space, which is to be waited for. */
static bool serve(CPUState *cpu, const HostMemPcowAccess *access)
{
    uint8_t *host = (uint8_t *)pcow_map_address(access->pcow->map) +
                    access->offset;
    int ret = access->lost ? -EIO : hostmem_pcow_trap(host, access->store);

    if (ret == 0) {
        stuck.tries = stuck.tries_alone = 0;
    } else if (ret == -ENOSPC && !access->certain) {
        /* Gone since it was looked at: the vCPU comes back. */
    } else if (ret == -ENOSPC && !hostmem_pcow_fails_when_full(host)) {
        return true;
    } else {
        hostmem_pcow_memory_error(cpu, host, ret);
    }
    return false;
}

/* Is the vCPU where it was? */
static void note_registers(const struct kvm_regs *regs)
{
    if (memcmp(regs, &stuck.regs, sizeof(*regs)) ||
        get_clock() - stuck.at > TRIES_APART_NS) {
        stuck.regs = *regs;
        stuck.tries = stuck.tries_alone = 0;
    }
}

/* Finds it, and serves it before the image can go away. */
static bool serve_found(CPUState *cpu, bool *is_full)
{
    HostMemPcowAccess access;
    struct kvm_regs regs;

    if (kvm_vcpu_ioctl(cpu, KVM_GET_REGS, &regs) < 0) {
        return false;
    }
    note_registers(&regs);
    RCU_READ_LOCK_GUARD();
    if (!hostmem_pcow_kvm_find_access(cpu, &regs, stuck.tries, &access)) {
        return false;
    }
    *is_full = serve(cpu, &access);
    return true;
}

/*
 * A store that a watch has found, but could not serve; not one of long ago, as
 * this vCPU has begun a watch.  The list of blocks keeps no image, and the
 * guest may not see this one any more.
 */
static bool serve_watched(CPUState *cpu, bool *is_full)
{
    bool found = false;
    RAMBlock *block;

    RCU_READ_LOCK_GUARD();
    hostmem_pcow_lock_images();
    RAMBLOCK_FOREACH(block) {
        uint64_t offset;

        if (block->pcow && pcow_map_watch_found(block->pcow->map, &offset) &&
            !pcow_map_is_accessible(block->pcow->map, offset, true)) {
            *is_full = serve(cpu, &(HostMemPcowAccess) {
                block->pcow, offset, .store = true, .certain = true,
            });
            found = true;
            break;
        }
    }
    hostmem_pcow_unlock_images();
    return found;
}

/* Stores that were served so far, in all images */
static uint64_t count_served(void)
{
    uint64_t served = 0;
    RAMBlock *block;

    RCU_READ_LOCK_GUARD();
    hostmem_pcow_lock_images();
    RAMBLOCK_FOREACH(block) {
        if (block->pcow) {
            struct pcow_map_stats stats;

            pcow_map_get_stats(block->pcow->map, &stats);
            served += stats.write_traps +
                      qatomic_read(&block->pcow->write_traps);
        }
    }
    hostmem_pcow_unlock_images();
    return served;
}

/* The vCPU comes back unchanged.  Is there nothing left to try? */
static bool is_hopeless(void)
{
    uint64_t served = count_served();

    stuck.tries++;
    stuck.tries_alone++;
    if (served != stuck.served) {
        stuck.served = served;
        stuck.tries_alone = 0;
    }
    return stuck.tries > MAX_TRIES || stuck.tries_alone > MAX_TRIES_ALONE;
}

/* Let userfaultfd find out.  Returns 0 if that has begun. */
static int watch_all(CPUState *cpu)
{
    struct pcow_error error;
    bool failed = false;
    RAMBlock *block;
    int ret = -EFAULT;

    WITH_RCU_READ_LOCK_GUARD() {
        hostmem_pcow_lock_images();
        RAMBLOCK_FOREACH(block) {
            if (block->pcow && !block->pcow->readonly) {
                ret = hostmem_pcow_watch(block->pcow, &error);
                if (ret < 0) {
                    hostmem_pcow_send_error(block->pcow, 0, error.message);
                    failed = true;
                    break;
                }
            }
        }
        hostmem_pcow_unlock_images();
    }
    if (!failed) {
        return ret;
    }
    stuck.tries = 1;
    stuck.tries_alone = 0;
    error_report("vCPU %d stores to a page of a pcow image that must be copied "
                 "first, but KVM does not say to which, and %s. The VM is "
                 "paused and nothing is lost: remove the cause, and continue",
                 cpu->cpu_index, error.message);
    return stop_vm();
}

int hostmem_pcow_kvm_fault(CPUState *cpu)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };
    bool is_full = false;
    int ret = 0;

    if (!hostmem_pcow_high) {
        return -EFAULT;
    }
    if (serve_found(cpu, &is_full) ||
        (stuck.tries > 1 && serve_watched(cpu, &is_full))) {
        if (is_full) {
            /* kicks of the vCPU end this early, and the loop sees to them */
            nanosleep(&interval, NULL);
        }
    } else if (is_hopeless()) {
        /* Neither we nor userfaultfd know of it: it is not an image's. */
        stuck.tries = 0;
        ret = -EFAULT;
    } else if (stuck.tries > 1) {
        ret = watch_all(cpu);
    }
    /* now, as a watch may take its time */
    stuck.at = get_clock();
    return ret;
}
