/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the versions of QEMU call differently that the files of pcow fit: 10.0
 * and 10.2.
 */
#ifndef SYSTEM_PCOW_COMPAT_H
#define SYSTEM_PCOW_COMPAT_H

#include "exec/tb-flush.h"
#include "migration/savevm.h"
#if __has_include("system/memory.h")        /* since 10.1 */
#include "system/address-spaces.h"
#include "system/memory.h"
#include "system/ramblock.h"

/* SaveVMHandlers: what is sent at last, when the VM is stopped */
#define save_live_complete_precopy save_complete

/* The VM is stopped, so that nobody executes what is flushed. */
static inline void tb_flush(CPUState *cpu)
{
    tb_flush__exclusive_or_serial();
}

static inline int hostmem_pcow_loadvm(QEMUFile *file, Error **errp)
{
    return qemu_loadvm_state(file, errp);
}
#else
#include "exec/address-spaces.h"
#include "exec/memory.h"
#include "exec/ramblock.h"

/* It reports errors itself. */
static inline int hostmem_pcow_loadvm(QEMUFile *file, Error **errp)
{
    return qemu_loadvm_state(file);
}
#endif

#endif
