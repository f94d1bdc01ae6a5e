/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What fault.c, find.c, shared.c and store.c have in common.
 */
#ifndef TARGET_I386_PCOW_FAULT_H
#define TARGET_I386_PCOW_FAULT_H

#include <linux/kvm.h>
#include "exec/hwaddr.h"
#include "system/hostmem-pcow.h"

/* What the vCPU accesses: in system management mode other memory than else */
AddressSpace *hostmem_pcow_kvm_memory(CPUState *cpu);
/*
 * The byte of RAM or ROM at a guest-physical address, or NULL.  Within an RCU
 * read-side section, as is the use of it.
 */
uint8_t *hostmem_pcow_find_ram(AddressSpace *memory, hwaddr gpa,
                               RAMBlock **block, uint64_t *offset);
typedef struct HostMemPcowAccess {
    HostMemPcow *pcow;          /* NULL: none has been found */
    uint64_t offset;
    bool store;
    bool lost;                  /* a media error, or a file cut short */
    /*
     * It is what was refused.  Else it is a guess: to serve it may help, but
     * that there is no space for it says nothing of what the guest did.
     */
    bool certain;
} HostMemPcowAccess;

/*
 * What was refused to the vCPU, which has these registers; @again: and had
 * them when it was refused before, so that it may be guessed.  Within an RCU
 * read-side section, as is the use of it.
 */
bool hostmem_pcow_kvm_find_access(CPUState *cpu, const struct kvm_regs *regs,
                                  bool again, HostMemPcowAccess *access);
/*
 * Does somebody want something of the vCPU, which waits?  As after a KVM_RUN
 * that was interrupted, this is asked once.
 */
bool hostmem_pcow_kvm_is_wanted(CPUState *cpu);

#endif
