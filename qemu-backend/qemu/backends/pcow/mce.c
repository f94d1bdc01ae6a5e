/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A machine check for the guest: memory of a pcow image is lost, and it has
 * accessed it, or may do so.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "cpu.h"
#include "hw/core/cpu.h"
#include "qemu/rcu.h"
#include "qemu/timer.h"
#include "system/hostmem-pcow.h"
#include "system/hw_accel.h"
#include "system/kvm.h"
#include "system/pcow-compat.h"

#define MCE_BANK 9
/* of CPUs that have no part in it, as cpu_x86_inject_mce() has it */
#define OTHERS_BANK 1
/* A page that is lost again after this time has been there meanwhile. */
#define WARN_AGAIN_NS (10 * NANOSECONDS_PER_SECOND)

typedef struct FindArgs {
    const MemoryRegion *mr;
    hwaddr offset, address;
    bool found;
} FindArgs;

static bool find_range(Int128 start, Int128 len, const MemoryRegion *mr,
                       hwaddr offset_in_region, void *opaque)
{
    FindArgs *args = opaque;

    if (mr == args->mr && args->offset >= offset_in_region &&
        int128_lt(int128_make64(args->offset - offset_in_region), len)) {
        args->address = int128_get64(start) + args->offset - offset_in_region;
        args->found = true;
    }
    return args->found;
}

/* Where the guest sees a byte of the image. */
static bool guest_address(HostMemPcow *pcow, uint64_t offset, hwaddr *address)
{
    FindArgs args = { &pcow->backend->mr, offset };

    RCU_READ_LOCK_GUARD();
    flatview_for_each_range(address_space_to_flatview(&address_space_memory),
                            find_range, &args);
    *address = args.address;
    return args.found;
}

#ifdef TARGET_I386

/* KVM has another exception for it, and QEMU can queue one only. */
static bool has_exception(const CPUX86State *env)
{
    return kvm_enabled() && env->exception_nr != -1;
}

/*
 * Intel models tell all CPUs.  One that the guest does not use takes no machine
 * checks, and cpu_x86_inject_mce() would reset the VM for it.
 */
static void tell_others(CPUState *cpu)
{
    CPUState *other;

    CPU_FOREACH(other) {
        if (other == cpu) {
            continue;
        }
        cpu_synchronize_state(other);
        if (X86_CPU(other)->env.cr[4] & CR4_MCE_MASK &&
            !has_exception(&X86_CPU(other)->env)) {
            cpu_x86_inject_mce(NULL, X86_CPU(other), OTHERS_BANK,
                               MCI_STATUS_VAL | MCI_STATUS_UC,
                               MCG_STATUS_MCIP | MCG_STATUS_RIPV, 0, 0, 0);
        }
    }
}

/* as kvm_mce_inject() has it: a data load, or an error found by scrubbing */
static void inject(CPUState *cpu, hwaddr address, bool required)
{
    X86CPU *x86 = X86_CPU(cpu);
    CPUX86State *env = &x86->env;
    uint64_t status = MCI_STATUS_VAL | MCI_STATUS_EN | MCI_STATUS_MISCV |
                      MCI_STATUS_ADDRV;
    uint64_t mcg_status = MCG_STATUS_MCIP | MCG_STATUS_RIPV |
                          (required ? MCG_STATUS_EIPV : 0);
    bool broadcast = cpu_x86_support_mca_broadcast(env);

    if (!IS_AMD_CPU(env)) {
        status |= MCI_STATUS_UC | MCI_STATUS_S |
                  (required ? MCI_STATUS_AR | 0x134 : 0xc0);
    } else if (required) {
        status |= MCI_STATUS_UC | MCI_STATUS_POISON;
    } else {
        /* no exception: the guest finds it when it looks at the banks */
        status |= MCI_STATUS_DEFERRED | MCI_STATUS_POISON;
    }
    if (env->mcg_ext_ctl & MCG_EXT_CTL_LMCE_EN) {
        mcg_status |= MCG_STATUS_LMCE;
        broadcast = false;
    }
    cpu_x86_inject_mce(NULL, x86, MCE_BANK, status, mcg_status, address,
                       (MCM_ADDR_PHYS << 6) | 0xc, 0);
    if (broadcast) {
        tell_others(cpu);
    }
}

/* What do_inject_x86_mce() would do nothing with, or reset the VM, is not. */
static HostMemPcowMce tell_cpu(CPUState *cpu, hwaddr address, bool required)
{
    CPUX86State *env = &X86_CPU(cpu)->env;

    cpu_synchronize_state(cpu);
    if (!(env->mcg_cap & MCG_SER_P) ||
        ((env->mcg_cap & MCG_CTL_P) && env->mcg_ctl != UINT64_MAX) ||
        env->mce_banks[4 * MCE_BANK] != UINT64_MAX ||
        !(env->cr[4] & CR4_MCE_MASK)) {
        return HOST_MEM_PCOW_MCE_DEAF;
    }
    if (env->mcg_status & MCG_STATUS_MCIP || has_exception(env)) {
        return HOST_MEM_PCOW_MCE_BUSY;
    }
    inject(cpu, address, required);
    return HOST_MEM_PCOW_MCE_SENT;
}

#else

static HostMemPcowMce tell_cpu(CPUState *cpu, hwaddr address, bool required)
{
    return HOST_MEM_PCOW_MCE_DEAF;
}

#endif

HostMemPcowMce hostmem_pcow_machine_check(CPUState *cpu, HostMemPcow *pcow,
                                          uint64_t offset)
{
    hwaddr address;

    return guest_address(pcow, offset, &address) ?
           tell_cpu(cpu, address, true) : HOST_MEM_PCOW_MCE_DEAF;
}

typedef struct WarnArgs {
    const void *lost;
    bool found;
} WarnArgs;

/* The kernel tells each address of a page; if we are slow, only one of them. */
static bool warn_of(HostMemPcow *pcow, void *opaque, Error **errp)
{
    WarnArgs *args = opaque;
    uint64_t offset, page;
    hwaddr address;

    if (!pcow_map_find(pcow->map, args->lost, &offset)) {
        return true;
    }
    args->found = true;
    hostmem_pcow_lose(pcow, offset);
    page = offset & -PCOW_PAGE_SIZE;
    if (pcow->warned_at && get_clock() - pcow->warned_at < WARN_AGAIN_NS &&
        pcow->warned == page) {
        return true;
    }
    pcow->warned = page;
    pcow->warned_at = get_clock();
    hostmem_pcow_tell_error(pcow, offset, -EHWPOISON, "nobody has accessed it "
                            "yet, and a guest that takes machine checks is "
                            "warned");
    if (first_cpu && guest_address(pcow, offset, &address)) {
        tell_cpu(first_cpu, address, false);
    }
    return true;
}

bool hostmem_pcow_warn_guest(const void *address)
{
    WarnArgs args = { address };

    hostmem_pcow_foreach(warn_of, &args, NULL);
    return args.found;
}
