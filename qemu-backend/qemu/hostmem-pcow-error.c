/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Memory of a pcow image that cannot be accessed: a media error, a base that
 * was cut short, or a full pool whose policy is to fail.  The guest gets what
 * it would get from bad memory, a machine check; QEMU goes on.
 *
 * The host kernel tells by SIGBUS.  What happens depends on who accessed:
 *
 *   generated code          the instruction is left, a machine check comes
 *   a helper of TCG         finds it out by hostmem_pcow_can_load(), the same
 *   address_space_rw()      finds it out by hostmem_pcow_can_load(), MEMTX_ERROR
 *   a system call           EFAULT: the guest's request fails
 *   KVM                     KVM's own SIGBUS (hardware errors), or EFAULT
 *   any other code of QEMU  reads zeros, or has its store dropped if the pool is
 *                           full, and the VM is stopped
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include <ucontext.h>
#include "cpu.h"
#include "exec/exec-all.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "hw/core/cpu.h"
#include "qapi/error.h"
#include "qapi/qapi-events-pcow.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/runstate.h"
#include "system/tcg.h"
#ifdef CONFIG_TCG
#include "accel/tcg/tb-internal.h"
#include "tcg/tcg.h"
#endif

#define PAGE ((uintptr_t)PCOW_PAGE_SIZE)
/* Between two tries of a vCPU for which a machine check is under way */
#define RETRY_INTERVAL_NS (1000 * 1000)
/* An error that goes on is told again after this time. */
#define REPEAT_NS (10 * NANOSECONDS_PER_SECOND)

/* ---- from the thread that has the error to the main loop ----------------- */

#define MAX_REPORTS 64
#define MAX_CPUS 4096

typedef struct Report {
    HostMemPcow *pcow;
    uint64_t offset;
    int error;                  /* negative errno */
    CPUState *cpu;              /* to get a machine check, or NULL */
    bool covered;               /* zeros were put over the page */
} Report;

/*
 * The SIGBUS handler belongs to the process.  It may be anywhere in QEMU but in
 * this file, so a spin lock over a few stores is safe.
 */
static struct {
    struct sigaction previous;
    bool installed;
    QemuSpin lock;
    Report report[MAX_REPORTS];
    unsigned count;
    EventNotifier notifier;
    /* a hardware error in memory that is no image, for the main thread */
    bool have_foreign;
    siginfo_t foreign;
    /* A machine check is under way, by index of vCPU */
    bool being_told[MAX_CPUS];
} process;

static bool push_report(const Report *report)
{
    bool pushed;

    qemu_spin_lock(&process.lock);
    pushed = process.count < MAX_REPORTS;
    if (pushed) {
        process.report[process.count++] = *report;
    }
    qemu_spin_unlock(&process.lock);
    if (pushed) {
        event_notifier_set(&process.notifier);
    }
    return pushed;
}

static bool pop_report(Report *report)
{
    bool popped;

    qemu_spin_lock(&process.lock);
    popped = process.count > 0;
    if (popped) {
        *report = process.report[0];
        process.count--;
        memmove(process.report, process.report + 1,
                process.count * sizeof(*report));
    }
    qemu_spin_unlock(&process.lock);
    return popped;
}

static bool *being_told(const CPUState *cpu)
{
    return &process.being_told[cpu->cpu_index % MAX_CPUS];
}

void hostmem_pcow_forget_errors(HostMemPcow *pcow)
{
    unsigned kept = 0;

    qemu_spin_lock(&process.lock);
    for (unsigned i = 0; i < process.count; i++) {
        if (process.report[i].pcow != pcow) {
            process.report[kept++] = process.report[i];
        } else if (process.report[i].cpu) {
            qatomic_set(being_told(process.report[i].cpu), false);
        }
    }
    process.count = kept;
    qemu_spin_unlock(&process.lock);
}

/* ---- in the main loop ---------------------------------------------------- */

void hostmem_pcow_tell_error(HostMemPcow *pcow, uint64_t offset, int error,
                             const char *consequence)
{
    struct pcow_extent extent;
    int64_t now = get_clock();
    const char *path = pcow_path(pcow->image);

    if (offset / PAGE == pcow->told_error / PAGE && pcow->told_error_at &&
        now - pcow->told_error_at < REPEAT_NS) {
        return;
    }
    pcow->told_error = offset;
    pcow->told_error_at = now;
    if (error == -ENOSPC) {
        qapi_event_send_pcow_pool_full(pcow->id, offset,
                                       HOST_MEM_PCOW_FULL_FAIL);
        error_report("pcow image '%s': the pool is full, and a store of the "
                     "guest at offset %" PRIu64 " failed (pcow-full=fail); %s",
                     path, offset, consequence);
        return;
    }
    if (pcow_get_extent(pcow->image, offset & -PAGE, PAGE, &extent,
                        NULL) == 0 && extent.present) {
        path = extent.path;
    }
    qapi_event_send_pcow_error(pcow->id, offset, strerror(-error));
    error_report("pcow image '%s': offset %" PRIu64 " of the guest cannot be "
                 "accessed (%s); it lies in '%s': look for media errors, and "
                 "for who cut it short; %s", pcow_path(pcow->image), offset,
                 strerror(-error), path, consequence);
}

static void tell(const Report *report, const char *consequence)
{
    hostmem_pcow_tell_error(report->pcow, report->offset, report->error,
                            consequence);
}

static void serve_report(const Report *report)
{
    HostMemPcow *pcow = report->pcow;
    Error *err = NULL;

    if (!pcow->map) {
        return;
    }
    if (report->covered) {
        struct pcow_error error;

        tell(report, report->error == -ENOSPC ?
             "the VM is stopped, as the store of a device is lost" :
             "the VM is stopped, as a device saw zeros instead");
        vm_stop(RUN_STATE_IO_ERROR);
        if (pcow_map_restore(pcow->map, report->offset & -PAGE, PAGE,
                             &error) < 0) {
            error_setg(&err, "%s", error.message);
            error_report_err(err);
        }
        return;
    }
    if (!report->cpu) {
        tell(report, "nobody has accessed it yet");
        return;
    }
    if (hostmem_pcow_machine_check(report->cpu, pcow, report->offset)) {
        tell(report, "the guest got a machine check");
    } else {
        tell(report, "the VM is stopped, as the guest does not take machine "
                     "checks");
        vm_stop(RUN_STATE_IO_ERROR);
    }
    qatomic_set(being_told(report->cpu), false);
}

static void serve_reports(EventNotifier *notifier)
{
    Report report;

    event_notifier_test_and_clear(notifier);
    if (qatomic_read(&process.have_foreign)) {
        siginfo_t info = process.foreign;

        qatomic_set(&process.have_foreign, false);
        process.previous.sa_sigaction(SIGBUS, &info, NULL);
    }
    while (pop_report(&report)) {
        serve_report(&report);
    }
}

/* ---- in the thread that has the error ------------------------------------ */

static HostMemPcow *find_image(const void *host, uint64_t *offset)
{
    ram_addr_t at;
    RAMBlock *block = qemu_ram_block_from_host((void *)host, false, &at);

    *offset = at;
    return block ? block->pcow : NULL;
}

void hostmem_pcow_memory_error(CPUState *cpu, const void *host, int error)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };
    Report report = { .error = error, .cpu = cpu };

    report.pcow = find_image(host, &report.offset);
    if (report.pcow && !qatomic_xchg(being_told(cpu), true) &&
        !push_report(&report)) {
        qatomic_set(being_told(cpu), false);
    }
    nanosleep(&interval, NULL);
}

#ifdef __x86_64__

/*
 * One load that may fail.  If it gets SIGBUS, the handler lets it continue at
 * the second label.
 */
extern const char hostmem_pcow_trial_load[], hostmem_pcow_trial_failed[];

bool __attribute__((noinline, noclone)) hostmem_pcow_can_load(const void *host)
{
    bool ok;

    asm volatile(".globl hostmem_pcow_trial_load\n"
                 ".globl hostmem_pcow_trial_failed\n"
                 "    movb $1, %0\n"
                 "hostmem_pcow_trial_load:\n"
                 "    testb $0, (%1)\n"
                 "    jmp 1f\n"
                 "hostmem_pcow_trial_failed:\n"
                 "    movb $0, %0\n"
                 "1:\n"
                 : "=&q"(ok) : "r"(host) : "memory", "cc");
    return ok;
}

static bool skip_trial(ucontext_t *context)
{
    greg_t *pc = &context->uc_mcontext.gregs[REG_RIP];

    if (*pc != (greg_t)hostmem_pcow_trial_load) {
        return false;
    }
    *pc = (greg_t)hostmem_pcow_trial_failed;
    return true;
}

static uintptr_t program_counter(const ucontext_t *context)
{
    return context->uc_mcontext.gregs[REG_RIP];
}

#else
#error "libpcow is for x86-64"
#endif

bool hostmem_pcow_readable(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                           bool report)
{
    uint8_t *host = pcow_map_address(pcow->map);

    for (uint64_t at = offset & -PAGE; at < offset + length; at += PAGE) {
        if (!hostmem_pcow_can_load(host + at)) {
            if (report) {
                qapi_event_send_pcow_error(pcow->id, at, strerror(EIO));
            }
            return false;
        }
    }
    return true;
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

/*
 * Somebody accesses memory by a pointer, and there is no way back for him.  A
 * page that only could not be copied goes on to read what it holds.
 */
static bool cover(void *address, Report *report)
{
    void *page = (void *)((uintptr_t)address & -PAGE);
    void *instead = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (instead == MAP_FAILED) {
        return false;
    }
    if (report->error == -ENOSPC && hostmem_pcow_can_load(page)) {
        memcpy(instead, page, PAGE);
    }
    if (mremap(instead, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) ==
        MAP_FAILED) {
        munmap(instead, PAGE);
        return false;
    }
    report->covered = true;
    return push_report(report);
}

static bool serve_sigbus(siginfo_t *info, void *address, ucontext_t *context)
{
    /* libpcow gives the reason of what it could not serve */
    bool queued = info->si_code == SI_QUEUE;
    Report report = { .error = queued && info->si_errno ? -info->si_errno
                                                        : -EIO };

    if (!hostmem_pcow_may_cover(address)) {
        return false;
    }
    if (skip_trial(context)) {
        return true;
    }
    report.pcow = find_image(address, &report.offset);
    if (!report.pcow) {
        return false;
    }
    if (info->si_code == BUS_MCEERR_AO && tcg_enabled()) {
        /* Whoever accesses it will hear of it. */
        push_report(&report);
        return true;
    }
    if (kvm_enabled() && (info->si_code == BUS_MCEERR_AO ||
                          info->si_code == BUS_MCEERR_AR)) {
        return false;           /* KVM's handler knows what to do */
    }
#ifdef CONFIG_TCG
    if (tcg_enabled() && current_cpu && current_cpu->running) {
        uintptr_t pc = program_counter(context);

        if (in_code_gen_buffer((void *)(pc - tcg_splitwx_diff))) {
            hostmem_pcow_memory_error(current_cpu, address, report.error);
            if (cpu_restore_state(current_cpu, pc + GETPC_ADJ)) {
                cpu_loop_exit(current_cpu);
            }
        }
    }
#endif
    return cover(address, &report);
}

static void handle_sigbus(int signum, siginfo_t *info, void *opaque)
{
    int saved_errno = errno;
    void *address = failed_address(info);
    /* first the memory that libpcow was copying for somebody */
    bool served = pcow_serve_sigbus(info, opaque) ||
                  (address && serve_sigbus(info, address, opaque));

    if (!served && !current_cpu && info->si_code == BUS_MCEERR_AO &&
        !process.have_foreign) {
        process.foreign = *info;
        qatomic_set(&process.have_foreign, true);
        event_notifier_set(&process.notifier);
        served = true;
    }
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
    int ret;

    if (process.installed) {
        return true;
    }
    ret = event_notifier_init(&process.notifier, false);
    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot watch pcow images for errors");
        return false;
    }
    event_notifier_set_handler(&process.notifier, serve_reports);
    qemu_spin_init(&process.lock);
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &process.previous);
    process.installed = true;
    /*
     * Blocked, it would end QEMU.  Other threads than this, the main one, get
     * only what they have caused themselves.
     */
    sigemptyset(&set);
    sigaddset(&set, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    return true;
}
