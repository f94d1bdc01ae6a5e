/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A store of an instruction that KVM emulates (rep ins, rep movs from a device,
 * real mode on old processors) to a page of a pcow image that must be copied
 * first.
 *
 * To KVM the page is read-only, which to its emulator is a device: KVM_RUN
 * returns with KVM_EXIT_MMIO, the registers past the instruction, and the data
 * in kvm_run.  There they stay until the vCPU runs again, so the store may wait
 * for space, and whoever wants the vCPU meanwhile gets it.
 */
#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "cpu.h"
#include "exec/cpu-common.h"
#include "hw/core/cpu.h"
#include "qemu/rcu.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/kvm_int.h"
#include "system/pcow-compat.h"
#include "fault.h"

#define RETRY_INTERVAL_NS (10 * 1000 * 1000)
/* Between two looks whether a machine check is there */
#define PAUSE_NS (100 * 1000)
/* An instruction that is dropped may have so many stores of 8 bytes left */
#define MAX_STORES 4096

/* This vCPU has one to do */
static __thread bool left;

static void set_left(bool now)
{
    if (now != left) {
        qatomic_add(&hostmem_pcow_kvm_stores, now ? 1 : -1);
        left = now;
    }
}

/* The page of an image that the vCPU accesses, or NULL */
static uint8_t *find_target(CPUState *cpu)
{
    const struct kvm_run *run = cpu->kvm_run;
    RAMBlock *block;
    uint64_t offset;
    uint8_t *host = hostmem_pcow_find_ram(hostmem_pcow_kvm_memory(cpu),
                                          run->mmio.phys_addr, &block,
                                          &offset);

    if (!host || !block->pcow ||
        (run->mmio.is_write && block->pcow->readonly)) {
        return NULL;
    }
    return host;
}

/*
 * KVM's emulator leaves a load to us that it cannot do: the memory is lost.  It
 * gets zeros, as the instruction cannot be taken back, and a machine check is
 * the next thing that the guest sees.
 */
static void check_load(CPUState *cpu)
{
    uint8_t *host = find_target(cpu);

    if (host && !hostmem_pcow_can_load(host)) {
        hostmem_pcow_memory_error(cpu, host, -EIO);
    }
}

bool hostmem_pcow_kvm_begin_store(CPUState *cpu)
{
    if (hostmem_pcow_high) {
        RCU_READ_LOCK_GUARD();
        if (cpu->kvm_run->mmio.is_write) {
            set_left(find_target(cpu));
        } else {
            check_load(cpu);
        }
    }
    return left;
}

/* Does it have to wait? */
static bool finds_no_space(CPUState *cpu)
{
    uint8_t *host;
    int ret;

    RCU_READ_LOCK_GUARD();
    host = find_target(cpu);
    do {
        ret = host ? hostmem_pcow_trap(host, true) : 0;
        /* As long as it waits there is no state of the VM to be kept. */
    } while (ret == -ENOSPC && qatomic_read(&cpu->stop) &&
             !hostmem_pcow_fails_when_full(host) &&
             hostmem_pcow_lend_spare(host));
    if (ret == -ENOSPC && !hostmem_pcow_fails_when_full(host)) {
        return true;
    }
    if (ret < 0) {
        hostmem_pcow_memory_error(cpu, host, ret);
    }
    return false;
}

bool hostmem_pcow_kvm_is_wanted(CPUState *cpu)
{
    struct kvm_run *run = cpu->kvm_run;
    /* the latter is what a kick sets, for a KVM_RUN that is not there */
    bool wanted = qatomic_read(&cpu->exit_request) ||
                  qatomic_read(&run->immediate_exit);

    if (wanted) {
        qatomic_set(&run->immediate_exit, 0);
    }
    return wanted;
}

int hostmem_pcow_kvm_finish_store(CPUState *cpu)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };
    struct timespec pause = { 0, PAUSE_NS };
    struct kvm_run *run = cpu->kvm_run;

    if (hostmem_pcow_high && hostmem_pcow_is_being_told(cpu)) {
        /*
         * If the guest took an interrupt first, the machine check would come
         * in its kernel, which cannot survive one there.
         */
        nanosleep(&pause, NULL);
        return EXCP_INTERRUPT;
    }
    if (!left) {
        return 0;
    }
    while (finds_no_space(cpu)) {
        if (hostmem_pcow_kvm_is_wanted(cpu)) {
            return EXCP_INTERRUPT;
        }
        nanosleep(&interval, NULL);
    }
    set_left(false);
    address_space_rw(hostmem_pcow_kvm_memory(cpu), run->mmio.phys_addr,
                     MEMTXATTRS_UNSPECIFIED, run->mmio.data, run->mmio.len,
                     true);
    /* The pool is full, and the store has failed: wait as above. */
    return hostmem_pcow_is_being_told(cpu) ? EXCP_INTERRUPT : 0;
}

/* The vCPU goes away: what it was to store nobody waits for. */
void hostmem_pcow_kvm_forget_store(void)
{
    set_left(false);
}

/* KVM still has the instruction, and would go on with it after the reset. */
void hostmem_pcow_kvm_drop_store(CPUState *cpu)
{
    struct kvm_run *run = cpu->kvm_run;

    if (!left) {
        return;
    }
    set_left(false);
    if (!kvm_check_extension(kvm_state, KVM_CAP_IMMEDIATE_EXIT)) {
        return;
    }
    for (unsigned i = 0; i < MAX_STORES; i++) {
        int ret;

        qatomic_set(&run->immediate_exit, 1);
        ret = kvm_vcpu_ioctl(cpu, KVM_RUN, 0);
        qatomic_set(&run->immediate_exit, 0);
        if (ret < 0 || run->exit_reason != KVM_EXIT_MMIO) {
            break;
        }
    }
}
