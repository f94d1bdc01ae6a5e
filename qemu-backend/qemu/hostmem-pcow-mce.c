/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A machine check for the guest: memory of a pcow image that it has accessed is
 * lost.
 */
#include "qemu/osdep.h"
#include "cpu.h"
#include "exec/address-spaces.h"
#include "exec/memory.h"
#include "hw/core/cpu.h"
#include "qemu/rcu.h"
#include "system/hostmem-pcow.h"
#include "system/hw_accel.h"

#define MCE_BANK 9

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

static bool inject(CPUState *cpu, hwaddr address)
{
    X86CPU *x86 = X86_CPU(cpu);
    CPUX86State *env = &x86->env;
    uint64_t status = MCI_STATUS_VAL | MCI_STATUS_UC | MCI_STATUS_EN |
                      MCI_STATUS_MISCV | MCI_STATUS_ADDRV;
    uint64_t mcg_status = MCG_STATUS_MCIP | MCG_STATUS_RIPV |
                          MCG_STATUS_EIPV;
    int flags = cpu_x86_support_mca_broadcast(env) ? MCE_INJECT_BROADCAST : 0;

    cpu_synchronize_state(cpu);
    /* where do_inject_x86_mce() would do nothing, or reset the VM */
    if (!(env->mcg_cap & MCG_SER_P) ||
        ((env->mcg_cap & MCG_CTL_P) && env->mcg_ctl != UINT64_MAX) ||
        env->mce_banks[4 * MCE_BANK] != UINT64_MAX ||
        !(env->cr[4] & CR4_MCE_MASK) || (env->mcg_status & MCG_STATUS_MCIP)) {
        return false;
    }
    /* as kvm_mce_inject() does: a data load, action required */
    if (IS_AMD_CPU(env)) {
        status |= MCI_STATUS_POISON;
    } else {
        status |= MCI_STATUS_S | MCI_STATUS_AR | 0x134;
    }
    if (env->mcg_ext_ctl & MCG_EXT_CTL_LMCE_EN) {
        mcg_status |= MCG_STATUS_LMCE;
        flags = 0;
    }
    cpu_x86_inject_mce(NULL, x86, MCE_BANK, status, mcg_status, address,
                       (MCM_ADDR_PHYS << 6) | 0xc, flags);
    return true;
}

#else

static bool inject(CPUState *cpu, hwaddr address)
{
    return false;
}

#endif

bool hostmem_pcow_machine_check(CPUState *cpu, HostMemPcow *pcow,
                                uint64_t offset)
{
    hwaddr address;

    return guest_address(pcow, offset, &address) && inject(cpu, address);
}
