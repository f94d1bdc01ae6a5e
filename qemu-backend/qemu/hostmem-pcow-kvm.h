/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the parts of hostmem-pcow-kvm*.c have in common.
 */
#ifndef TARGET_I386_KVM_HOSTMEM_PCOW_KVM_H
#define TARGET_I386_KVM_HOSTMEM_PCOW_KVM_H

#include "exec/hwaddr.h"

/* What the vCPU accesses: in system management mode other memory than else */
AddressSpace *hostmem_pcow_kvm_memory(CPUState *cpu);
/*
 * The byte of RAM or ROM at a guest-physical address, or NULL.  Within an RCU
 * read-side section, as is the use of it.
 */
uint8_t *hostmem_pcow_find_ram(AddressSpace *memory, hwaddr gpa,
                               RAMBlock **block, uint64_t *offset);
/*
 * Does somebody want something of the vCPU, which waits?  As after a KVM_RUN
 * that was interrupted, this is asked once.
 */
bool hostmem_pcow_kvm_is_wanted(CPUState *cpu);

#endif
