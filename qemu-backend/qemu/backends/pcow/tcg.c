/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A vCPU under TCG that stores to a page for which the pool has no space, or
 * accesses one that cannot be read.
 *
 * libpcow would wait inside the trap, where nothing can reach the vCPU: stop,
 * snapshots and quit would wait as well.  Leave the instruction instead, as for
 * a page fault of the guest, before it has done anything.  The vCPU looks for
 * requests and tries again, unless it got a machine check meanwhile.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include <ucontext.h>
#include "accel/tcg/tb-internal.h"
#include "exec/cpu-common.h"
#include "hw/core/cpu.h"
#include "qemu/main-loop.h"
#include "qemu/rcu.h"
#include "system/hostmem-pcow.h"
#include "tcg/tcg.h"

#define RETRY_INTERVAL_NS (10 * 1000 * 1000)
/* Between two looks whether a machine check is there */
#define PAUSE_NS (100 * 1000)
/* Bytes, by one store of a helper */
#define MOST_STORED 16

/*
 * A machine check is under way: a guest that took an interrupt first would have
 * it in its kernel, which cannot survive one there.
 */
bool hostmem_pcow_tcg_waits(CPUState *cpu)
{
    struct timespec pause = { 0, PAUSE_NS };

    if (!hostmem_pcow_is_being_told(cpu)) {
        return false;
    }
    nanosleep(&pause, NULL);
    return true;
}

/* There is no space at @host: wait a little, or let the vCPU have the error. */
static void wait_or_fail(CPUState *cpu, const void *host)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };

    if (hostmem_pcow_fails_when_full(host)) {
        hostmem_pcow_memory_error(cpu, host, -ENOSPC);
    } else {
        nanosleep(&interval, NULL);
    }
}

/*
 * The store of a helper that has been prepared last by this thread.  It is not
 * tried with a load before, for which it would have to wait: whether the page
 * can be had is told by the store itself, see hostmem_pcow_tcg_leave_store().
 */
static __thread struct {
    const void *host;
    uintptr_t ra;
} prepared;

/* A helper loads from host memory, on behalf of generated code at @ra. */
void hostmem_pcow_prepare_load(CPUState *cpu, const void *host, uintptr_t ra)
{
    prepared.ra = 0;
    if (ra && !hostmem_pcow_can_load(host)) {
        hostmem_pcow_memory_error(cpu, host, -EIO);
        cpu_loop_exit_restore(cpu, ra);
    }
}

/*
 * It stores: at once if that is all it has asked for.  Who stores later, or
 * more than that, prepares a load as well, and is told here of what is lost.
 */
void hostmem_pcow_prepare_store(CPUState *cpu, void *host, uintptr_t ra)
{
    int ret = ra ? hostmem_pcow_make_writable(host, false) : 0;

    prepared.host = host;
    prepared.ra = ra;
    if (ret == -ENOSPC) {
        wait_or_fail(cpu, host);
        cpu_loop_exit_restore(cpu, ra);
    }
    if (ret == -EIO) {
        hostmem_pcow_memory_error(cpu, host, ret);
        cpu_loop_exit_restore(cpu, ra);
    }
}

/* The kernel may tell the page and no more. */
static bool is_prepared(const void *address)
{
    uintptr_t at = (uintptr_t)address, host = (uintptr_t)prepared.host;

    return at - host < MOST_STORED ||
           at == (host & -(uintptr_t)PCOW_PAGE_SIZE);
}

/*
 * In the handler of SIGBUS: does not return if that store has failed.  The same
 * page may be loaded from by the next walk of the guest's page table.  The same
 * address may be stored to later on, by a device for which the vCPU came here:
 * that has the BQL, or another RCU section than the vCPU's own, and none of what
 * it holds would be released.
 */
void hostmem_pcow_tcg_leave_store(const void *address, int error,
                                  const void *opaque)
{
    const ucontext_t *context = opaque;
    bool is_write = context->uc_mcontext.gregs[REG_ERR] & 2;
    uintptr_t ra = prepared.ra;

    if (!ra || !is_write || !is_prepared(address) || !current_cpu ||
        !current_cpu->running || bql_locked() ||
        get_ptr_rcu_reader()->depth != 1) {
        return;
    }
    prepared.ra = 0;
    hostmem_pcow_memory_error(current_cpu, address, error);
    cpu_loop_exit_restore(current_cpu, ra);
}

/* Generated code that stores to host memory by itself traps. */
static struct sigaction previous;

bool hostmem_pcow_tcg_serve(const siginfo_t *info, void *opaque)
{
    const ucontext_t *context = opaque;
    uintptr_t pc = context->uc_mcontext.gregs[REG_RIP];
    bool is_write = context->uc_mcontext.gregs[REG_ERR] & 2;
    int ret;

    if (!current_cpu || !current_cpu->running ||
        !in_code_gen_buffer((void *)(pc - tcg_splitwx_diff))) {
        return false;
    }
    ret = hostmem_pcow_trap(info->si_addr, is_write);
    if (ret == -ENOSPC || ret == -EIO) {
        if (ret == -ENOSPC) {
            wait_or_fail(current_cpu, info->si_addr);
        } else {
            hostmem_pcow_memory_error(current_cpu, info->si_addr, ret);
        }
        if (cpu_restore_state(current_cpu, pc + GETPC_ADJ)) {
            cpu_loop_exit(current_cpu);
        }
    }
    return ret == 0;
}

static void handle_sigsegv(int signum, siginfo_t *info, void *opaque)
{
    int saved_errno = errno;
    bool served = info->si_code > 0 && hostmem_pcow_tcg_serve(info, opaque);

    errno = saved_errno;
    if (!served) {
        previous.sa_sigaction(signum, info, opaque);
    }
}

void hostmem_pcow_tcg_init(void)
{
    struct sigaction action = {
        .sa_sigaction = handle_sigsegv,
        .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER,
    };

    if (!previous.sa_sigaction) {
        sigemptyset(&action.sa_mask);
        sigaction(SIGSEGV, &action, &previous);
    }
}
