/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Memory of the guest that KVM itself stores to: the clock, the time that was
 * stolen, interrupts that need no EOI, the registers when a vCPU enters system
 * management.  The guest has told KVM by MSRs where it is.
 *
 * If it lies in a pcow image, a snapshot makes its pages read-only, and KVM's
 * stores fail without a word: the guest misses flushes of its TLB and
 * interrupts, and hangs; after a failed entry into system management KVM runs
 * it no more.  There is no exit to serve.  So before a vCPU runs for the first
 * time after a snapshot, it makes these pages writable as if it had stored to
 * them.
 *
 * Not covered: the interfaces of Hyper-V and Xen, the control blocks of
 * virtual machines within the guest, and what the guest tells of only later
 * without having stored to it since (its clock, after it was suspended).  Nor
 * switches of tasks by the processor (32 bits), which KVM makes by itself, and
 * page tables that it shadows for a virtual machine within the guest: of a
 * store to one of these that comes out as MMIO it does not hear.
 */
#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "cpu.h"
#include "exec/cpu-common.h"
#include "exec/target_page.h"
#include "hw/boards.h"
#include "hw/core/cpu.h"
#include "hw/i386/x86.h"
#include "qemu/error-report.h"
#include "qemu/rcu.h"
#include "qemu/timer.h"
#include "standard-headers/asm-x86/kvm_para.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/pcow-compat.h"
#include "fault.h"

#define RETRY_INTERVAL_NS (10 * 1000 * 1000)
/* Every try tells of the error, if it is not a lack of space */
#define PUT_OFF_NS (10LL * 1000 * 1000 * 1000)

typedef struct Area {
    uint32_t msr;
    unsigned align, length;     /* bytes; of what it points to */
} Area;

/* Linux, Documentation/virt/kvm/x86/msr.rst */
#define ENABLED 1

static const Area areas[] = {
    { MSR_KVM_SYSTEM_TIME, 2, 32 },
    { MSR_KVM_SYSTEM_TIME_NEW, 2, 32 },
    { MSR_KVM_ASYNC_PF_EN, 64, 64 },
    { MSR_KVM_STEAL_TIME, 64, 64 },
    { MSR_KVM_PV_EOI_EN, 4, 4 },
};

/*
 * Intel SDM, volume 3, "SMRAM": where the registers go, from SMBASE on, and
 * what that is after a reset
 */
#define SMM_STATE 0xfe00
#define SMM_STATE_LENGTH 0x200
#define SMM_BASE_AT_RESET 0x30000

/* Of the freezes, those after which this vCPU has made its areas writable */
static __thread unsigned served;
/* If that failed: after which of them, and when to try again */
static __thread unsigned put_off_freezes;
static __thread int64_t retry_at;

/* 0 if KVM does not have it, or not for this vCPU */
static uint64_t get_msr(CPUState *cpu, uint32_t msr)
{
    struct {
        struct kvm_msrs info;
        struct kvm_msr_entry entry;
    } msrs = {
        .info.nmsrs = 1,
        .entry.index = msr,
    };

    return kvm_vcpu_ioctl(cpu, KVM_GET_MSRS, &msrs) == 1 ? msrs.entry.data : 0;
}

/* Returns 0 or a negative errno; -EAGAIN: no space, which is waited for */
static int make_page_writable(AddressSpace *memory, hwaddr gpa)
{
    RAMBlock *block;
    uint64_t offset;
    uint8_t *host;
    int ret;

    RCU_READ_LOCK_GUARD();
    host = hostmem_pcow_find_ram(memory, gpa, &block, &offset);
    if (!host || !block->pcow || block->pcow->readonly) {
        return 0;
    }
    ret = hostmem_pcow_make_writable(host, true);
    if (ret == -ENOSPC && !hostmem_pcow_fails_when_full(host)) {
        return -EAGAIN;
    }
    return ret < 0 ? ret : 0;
}

/*
 * Goes on after an error, which may be of one page alone; @failed is the first
 * one then.  Returns false if there is no space, and the vCPU is wanted.
 */
static bool make_writable(CPUState *cpu, AddressSpace *memory, hwaddr gpa,
                          uint64_t length, int *failed)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };
    hwaddr last = gpa + length - 1;

    /* The guest may have given any address, the very last ones as well. */
    for (;; gpa = (gpa | ~TARGET_PAGE_MASK) + 1) {
        int ret;

        while ((ret = make_page_writable(memory, gpa)) == -EAGAIN) {
            if (hostmem_pcow_kvm_is_wanted(cpu)) {
                return false;
            }
            nanosleep(&interval, NULL);
        }
        if (ret && !*failed) {
            *failed = ret;
        }
        if ((gpa & TARGET_PAGE_MASK) == (last & TARGET_PAGE_MASK)) {
            return true;
        }
    }
}

static bool has_smm(void)
{
    Object *machine = object_dynamic_cast(OBJECT(current_machine),
                                          TYPE_X86_MACHINE);

    return machine && x86_machine_is_smm_enabled(X86_MACHINE(machine));
}

static bool make_smm_writable(CPUState *cpu, int *failed)
{
    AddressSpace *memory = cpu_get_address_space(cpu, X86ASIdx_SMM);
    uint64_t base[] = { SMM_BASE_AT_RESET, get_msr(cpu, MSR_IA32_SMBASE) };
    bool done = true;

    for (unsigned i = 0; i < ARRAY_SIZE(base) && done; i++) {
        done = make_writable(cpu, memory, base[i] + SMM_STATE,
                             SMM_STATE_LENGTH, failed);
    }
    return done;
}

static bool make_areas_writable(CPUState *cpu, int *failed)
{
    bool done = true;

    for (unsigned i = 0; i < ARRAY_SIZE(areas) && done; i++) {
        uint64_t value = get_msr(cpu, areas[i].msr);

        if (value & ENABLED) {
            done = make_writable(cpu, &address_space_memory,
                                 value & -(uint64_t)areas[i].align,
                                 areas[i].length, failed);
        }
    }
    return done;
}

/* The MSRs of Hyper-V's interface are not looked at. */
static void warn_of_hyperv(CPUState *cpu)
{
    const X86CPU *x86_cpu = X86_CPU(cpu);
    RAMBlock *block;
    uint64_t offset;

    RCU_READ_LOCK_GUARD();
    if ((x86_cpu->hyperv_features || x86_cpu->hyperv_passthrough) &&
        hostmem_pcow_find_ram(&address_space_memory, 0, &block, &offset) &&
        block->pcow) {
        warn_report_once("RAM of the guest is on a pcow image: what KVM stores "
                         "there for Hyper-V enlightenments is lost after a "
                         "snapshot; start the VM without hv-* CPU flags");
    }
}

/*
 * No access of the guest has failed, so it gets no machine check: its kernel
 * may be anywhere, and would not survive one.
 */
static void put_off(unsigned freezes, int error)
{
    put_off_freezes = freezes;
    retry_at = qemu_clock_get_ns(QEMU_CLOCK_REALTIME) + PUT_OFF_NS;
    warn_report_once("RAM of the guest is on a pcow image, and memory that KVM "
                     "stores to (clock, stolen time) cannot be made writable "
                     "after a snapshot: %s; the guest may hang until it can, "
                     "which is tried again", strerror(-error));
}

int hostmem_pcow_kvm_prepare_shared(CPUState *cpu)
{
    unsigned freezes = qatomic_load_acquire(&hostmem_pcow_freezes);
    int failed = 0;

    if (freezes == served ||
        (freezes == put_off_freezes &&
         qemu_clock_get_ns(QEMU_CLOCK_REALTIME) < retry_at)) {
        return 0;
    }
    warn_of_hyperv(cpu);
    if (!make_areas_writable(cpu, &failed) ||
        (has_smm() && !make_smm_writable(cpu, &failed))) {
        return EXCP_INTERRUPT;
    }
    if (failed) {
        put_off(freezes, failed);
    } else {
        served = freezes;
    }
    return 0;
}
