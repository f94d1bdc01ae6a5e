/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Memory of a pcow image that cannot be accessed: a media error, a base that
 * was cut short, or a full pool whose policy is to fail.  The guest gets what
 * it would get from bad memory, a machine check; QEMU goes on.
 *
 * The host kernel tells by SIGBUS.  What happens depends on who accessed:
 *
 *   generated code          the instruction is left, a machine check comes
 *   a helper of TCG         finds it out by hostmem_pcow_can_load(), or by its
 *                           store: the same
 *   address_space_rw()      finds it out by hostmem_pcow_can_load(), MEMTX_ERROR
 *   a system call           EFAULT: the guest's request fails
 *   a vCPU under KVM        SIGBUS after KVM_RUN (hardware errors), or EFAULT;
 *                           a machine check comes
 *   any other code of QEMU  reads zeros, or has its store dropped if the pool is
 *                           full, and the VM is stopped
 *   nobody yet              the guest is warned, if it takes that
 *
 * QEMU's own handler, which is there for KVM, resets a guest that takes no
 * machine checks, and ends QEMU when another thread than a vCPU has the error.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include <ucontext.h>
#include "cpu.h"
#include "exec/cpu-common.h"
#include "hw/core/cpu.h"
#include "hw/virtio/vhost.h"
#include "qapi/error.h"
#include "qapi/qapi-events-pcow.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/pcow-compat.h"
#include "system/reset.h"
#include "system/runstate.h"
#include "system/tcg.h"
#include "report.h"
#ifdef CONFIG_TCG
#include "accel/tcg/tb-internal.h"
#include "tcg/tcg.h"
#endif

#define PAGE ((uintptr_t)PCOW_PAGE_SIZE)
/* A guest that is still busy with a machine check may keep us so often. */
#define MAX_BUSY 1000

/* The SIGBUS handler belongs to the process. */
static struct {
    struct sigaction previous;
    bool installed;
    /* How often a vCPU could not be told, as it was busy; of the main loop */
    uint16_t busy[HOST_MEM_PCOW_MAX_CPUS];
} process;

/* ---- in the main loop ---------------------------------------------------- */

/* The host's kernel says that it is lost, which it may forget (page cache). */
int hostmem_pcow_mark_lost(HostMemPcow *pcow, uint64_t offset,
                           struct pcow_error *error)
{
    int ret;

    hostmem_pcow_lock_images();
    ret = pcow_map_lose(pcow->map, offset, error);
    hostmem_pcow_unlock_images();
    return ret;
}

/* The guest might see what the disk has in the place of it. */
static void stop_vm(const char *reason)
{
    error_report("%s; the VM is stopped", reason);
    vm_stop(RUN_STATE_IO_ERROR);
}

void hostmem_pcow_lose(HostMemPcow *pcow, uint64_t offset)
{
    struct pcow_error error;

    if (hostmem_pcow_mark_lost(pcow, offset, &error) < 0) {
        stop_vm(error.message);
    }
    /* It would try the page again and again if it was told of it before. */
    vhost_forget_memory();
}

static void tell(const HostMemPcowReport *report, const char *consequence)
{
    hostmem_pcow_tell_error(report->pcow, report->offset, report->error,
                            consequence);
}

static bool lose_at(HostMemPcow *pcow, void *address, Error **errp)
{
    uint64_t offset;

    if (pcow_map_find(pcow->map, address, &offset)) {
        hostmem_pcow_lose(pcow, offset);
    }
    return true;
}

static void serve_unused(void *address)
{
    siginfo_t info = { .si_signo = SIGBUS, .si_code = BUS_MCEERR_AO };

    if (!hostmem_pcow_warn_guest(address)) {
        info.si_addr = address;
        process.previous.sa_sigaction(SIGBUS, &info, NULL);
    }
}

/* A vCPU tries to access it, again and again. */
static void serve_vcpu(const HostMemPcowReport *report)
{
    uint16_t *busy = &process.busy[report->cpu->cpu_index %
                                   HOST_MEM_PCOW_MAX_CPUS];

    switch (hostmem_pcow_machine_check(report->cpu, report->pcow,
                                       report->offset)) {
    case HOST_MEM_PCOW_MCE_BUSY:
        /* If it is not that handler which comes back here, it goes on. */
        if (++*busy <= MAX_BUSY) {
            return;
        }
        /* fall through */
    case HOST_MEM_PCOW_MCE_DEAF:
        tell(report, "the VM is stopped, as the guest does not take machine "
                     "checks");
        vm_stop(RUN_STATE_IO_ERROR);
        break;
    case HOST_MEM_PCOW_MCE_SENT:
        tell(report, "the guest got a machine check");
        break;
    }
    *busy = 0;
}

static void serve_report(const HostMemPcowReport *report)
{
    HostMemPcow *pcow = report->pcow;

    if (report->met) {
        /* The guest hears of it when it comes there itself. */
        hostmem_pcow_foreach(lose_at, report->unused, NULL);
        return;
    }
    if (report->unused) {
        serve_unused(report->unused);
        return;
    }
    if (!pcow->map) {
        return;
    }
    if (report->error == -EHWPOISON) {
        hostmem_pcow_lose(pcow, report->offset);
    }
    if (!report->cpu) {
        return;
    }
    serve_vcpu(report);
    hostmem_pcow_told(report->cpu);
}

static void serve_reports(void)
{
    HostMemPcowReport report;

    while (hostmem_pcow_pop_report(&report)) {
        serve_report(&report);
    }
    if (hostmem_pcow_reports_lost()) {
        stop_vm("more memory has been lost at once than can be noted, perhaps "
                "of a pcow image");
    }
    hostmem_pcow_serve_covers();
}

/* A machine check for what the guest has done would come to another state. */
static void forget_vcpus(void *opaque)
{
    hostmem_pcow_forget_vcpus();
    memset(process.busy, 0, sizeof(process.busy));
}

/* ---- in the thread that has the error ------------------------------------ */

static uintptr_t program_counter(const ucontext_t *context)
{
    return context->uc_mcontext.gregs[REG_RIP];
}

/* Did the kernel meet the error for us, rather than we at an instruction? */
static bool is_after_system_call(const ucontext_t *context)
{
    const uint8_t *pc = (const uint8_t *)program_counter(context);

    return pc[-2] == 0x0f && pc[-1] == 0x05;
}

/* The address of a failed access, or NULL if the signal tells of none. */
static void *failed_address(const siginfo_t *info)
{
    if (info->si_code == SI_QUEUE) {
        /* by libpcow, from its handler of SIGSEGV, to this thread */
        return info->si_pid == getpid() ? info->si_value.sival_ptr : NULL;
    }
    return info->si_code > 0 ? info->si_addr : NULL;
}

static int reason(const siginfo_t *info)
{
    /* libpcow gives that of what it could not serve */
    if (info->si_code == SI_QUEUE && info->si_errno) {
        return -info->si_errno;
    }
    return info->si_code == BUS_MCEERR_AR ? -EHWPOISON : -EIO;
}

/*
 * Memory that nobody has accessed.  It comes at any instruction, and is none of
 * what that does.  Whoever accesses the page will hear of it, also if there is
 * no room for this one.
 */
static bool note_unused(const siginfo_t *info)
{
    HostMemPcowReport report = { .unused = info->si_addr };

    if (info->si_code != BUS_MCEERR_AO) {
        return false;
    }
    hostmem_pcow_push_report(&report);
    return true;
}

/* In memory that it has of a file, perhaps for the guest that accessed it. */
static bool met_by_library(const siginfo_t *info, void *context)
{
    HostMemPcowReport report = { .unused = info->si_addr, .met = true };

    if (!pcow_serve_sigbus(info, context)) {
        return false;
    }
    if (info->si_code == BUS_MCEERR_AR) {
        hostmem_pcow_push_report(&report);
    }
    return true;
}

static bool serve_sigbus(siginfo_t *info, void *address, ucontext_t *context)
{
    HostMemPcow *pcow;
    uint64_t offset;

    if (!hostmem_pcow_may_cover(address)) {
        return false;
    }
    if (hostmem_pcow_skip_trial(context)) {
        return true;
    }
    pcow = hostmem_pcow_find(address, &offset);
    if (!pcow) {
        return false;
    }
    if (kvm_enabled() && current_cpu && info->si_code == BUS_MCEERR_AR &&
        is_after_system_call(context)) {
        /* KVM_RUN: the guest has accessed it, and will again. */
        hostmem_pcow_memory_error(current_cpu, address, reason(info));
        return true;
    }
#ifdef CONFIG_TCG
    if (tcg_enabled() && current_cpu && current_cpu->running) {
        uintptr_t pc = program_counter(context);

        if (in_code_gen_buffer((void *)(pc - tcg_splitwx_diff))) {
            hostmem_pcow_memory_error(current_cpu, address, reason(info));
            if (cpu_restore_state(current_cpu, pc + GETPC_ADJ)) {
                cpu_loop_exit(current_cpu);
            }
        }
        hostmem_pcow_tcg_leave_store(address, reason(info), context);
    }
#endif
    return hostmem_pcow_cover_page(pcow, offset, address, reason(info));
}

/* A trap like those of SIGSEGV.  What is not a vCPU's is libpcow's to serve. */
static bool is_trap_of_vcpu(const siginfo_t *info, void *context)
{
#ifdef CONFIG_TCG
    return tcg_enabled() && pcow_is_trap(info) &&
           hostmem_pcow_tcg_serve(info, context);
#else
    return false;
#endif
}

static void handle_sigbus(int signum, siginfo_t *info, void *opaque)
{
    int saved_errno = errno;
    void *address = failed_address(info);
    /* first the memory that libpcow was copying for somebody */
    bool served = is_trap_of_vcpu(info, opaque) || note_unused(info) ||
                  met_by_library(info, opaque) ||
                  (address && serve_sigbus(info, address, opaque));

    errno = saved_errno;
    if (!served) {
        process.previous.sa_sigaction(signum, info, opaque);
    }
}

bool hostmem_pcow_error_init(Error **errp)
{
    struct sigaction action = {
        .sa_sigaction = handle_sigbus,
        .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER,
    };
    sigset_t set;

    if (process.installed) {
        return true;
    }
    if (!hostmem_pcow_report_init(serve_reports, errp)) {
        return false;
    }
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &process.previous);
    process.installed = true;
    /* also before a VM snapshot is loaded */
    qemu_register_reset(forget_vcpus, NULL);
    /*
     * Blocked, it would end QEMU.  Other threads than this, the main one, get
     * only what they have caused themselves.
     */
    sigemptyset(&set);
    sigaddset(&set, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    return true;
}
