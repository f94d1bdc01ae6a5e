/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Errors of memory on their way from the thread that has met them, perhaps in
 * its handler of SIGBUS, to the main loop.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "exec/cpu-common.h"
#include "hw/core/cpu.h"
#include "qemu/event_notifier.h"
#include "qemu/main-loop.h"
#include "qemu/thread.h"
#include "system/hostmem-pcow.h"
#include "report.h"

/* Between two tries of a vCPU for which a machine check is under way */
#define RETRY_INTERVAL_NS (1000 * 1000)
#define MAX_REPORTS 64

/* One queue, as one handler of SIGBUS, for the process */
static struct {
    QemuSpin lock;
    HostMemPcowReport report[MAX_REPORTS];
    unsigned count;
    bool lost;                  /* one for which there was no room */
    EventNotifier notifier;
    void (*serve)(void);
    /* A machine check is under way, by index of vCPU */
    bool being_told[HOST_MEM_PCOW_MAX_CPUS];
} reports;

/* The handler may come anywhere else, and must not wait for its own thread. */
void hostmem_pcow_lock_reports(sigset_t *before)
{
    sigset_t bus;

    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &bus, before);
    qemu_spin_lock(&reports.lock);
}

void hostmem_pcow_unlock_reports(const sigset_t *before)
{
    qemu_spin_unlock(&reports.lock);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

void hostmem_pcow_wake(void)
{
    event_notifier_set(&reports.notifier);
}

bool hostmem_pcow_push_report(const HostMemPcowReport *report)
{
    sigset_t before;
    bool pushed;

    hostmem_pcow_lock_reports(&before);
    pushed = reports.count < MAX_REPORTS;
    if (pushed) {
        reports.report[reports.count++] = *report;
    } else if (!report->cpu) {
        reports.lost = true;    /* a vCPU tries again */
    }
    hostmem_pcow_unlock_reports(&before);
    hostmem_pcow_wake();
    return pushed;
}

bool hostmem_pcow_reports_lost(void)
{
    return qatomic_xchg(&reports.lost, false);
}

bool hostmem_pcow_pop_report(HostMemPcowReport *report)
{
    sigset_t before;
    bool popped;

    hostmem_pcow_lock_reports(&before);
    popped = reports.count > 0;
    if (popped) {
        *report = reports.report[0];
        reports.count--;
        memmove(reports.report, reports.report + 1,
                reports.count * sizeof(*report));
    }
    hostmem_pcow_unlock_reports(&before);
    return popped;
}

static bool *being_told(const CPUState *cpu)
{
    return &reports.being_told[cpu->cpu_index % HOST_MEM_PCOW_MAX_CPUS];
}

/* Those of an image, of a vCPU, or, without either, of all vCPUs */
static void forget_reports(const HostMemPcow *pcow, const CPUState *cpu)
{
    unsigned kept = 0;
    sigset_t before;

    hostmem_pcow_lock_reports(&before);
    for (unsigned i = 0; i < reports.count; i++) {
        HostMemPcowReport *report = &reports.report[i];
        bool stays = pcow ? report->pcow != pcow :
                     cpu ? report->cpu != cpu : !report->cpu;

        if (!stays && report->cpu) {
            qatomic_set(being_told(report->cpu), false);
            report->cpu = NULL;
        }
        /* Of a page that is lost the image must know, if nobody is told. */
        if (stays || (!pcow && report->error == -EHWPOISON)) {
            reports.report[kept++] = *report;
        }
    }
    reports.count = kept;
    hostmem_pcow_unlock_reports(&before);
}

void hostmem_pcow_forget_errors(HostMemPcow *pcow)
{
    forget_reports(pcow, NULL);
    hostmem_pcow_forget_covers(pcow);
}

void hostmem_pcow_forget_vcpus(void)
{
    forget_reports(NULL, NULL);
}

void hostmem_pcow_forget_cpu(CPUState *cpu)
{
    forget_reports(NULL, cpu);
    qatomic_set(being_told(cpu), false);
}

void hostmem_pcow_told(const CPUState *cpu)
{
    qatomic_set(being_told(cpu), false);
}

bool hostmem_pcow_is_being_told(const CPUState *cpu)
{
    return qatomic_read(being_told(cpu));
}

void hostmem_pcow_memory_error(CPUState *cpu, const void *host, int error)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };
    HostMemPcowReport report = { .error = error, .cpu = cpu };

    report.pcow = hostmem_pcow_find(host, &report.offset);
    if (report.pcow && !qatomic_xchg(being_told(cpu), true) &&
        !hostmem_pcow_push_report(&report)) {
        qatomic_set(being_told(cpu), false);
    }
    nanosleep(&interval, NULL);
}

static void serve(EventNotifier *notifier)
{
    event_notifier_test_and_clear(notifier);
    reports.serve();
}

bool hostmem_pcow_report_init(void (*serve_all)(void), Error **errp)
{
    int ret = event_notifier_init(&reports.notifier, false);

    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot watch pcow images for errors");
        return false;
    }
    reports.serve = serve_all;
    event_notifier_set_handler(&reports.notifier, serve);
    qemu_spin_init(&reports.lock);
    return true;
}
