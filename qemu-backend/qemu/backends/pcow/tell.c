/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Accesses to an image that failed, as events of QMP and in the log.
 *
 * A guest decides how often they come, and another tenant of its pool can make
 * them fail.  The monitor lets an event of an image and a kind pass once in a
 * second (monitor_qapi_event_conf), and the log has a line of an image and a
 * kind once in LOG_INTERVAL_NS.  Each says how many there were.
 *
 * That stores wait for space, and that none does any more, are a state.  The
 * monitor, which keeps back each kind by itself, might tell them in the wrong
 * order: so they are kept back here, and what is told last is what is.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/qapi-events-pcow.h"
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "system/hostmem-pcow.h"

#define LOG_INTERVAL_NS (10 * NANOSECONDS_PER_SECOND)
/* As of the monitor: between two of a kind */
#define SPACE_INTERVAL_NS NANOSECONDS_PER_SECOND

static void send_error(HostMemPcow *pcow, uint64_t offset, const char *error,
                       uint64_t count)
{
    qapi_event_send_pcow_error(pcow->id, offset, error,
                               qatomic_add_fetch(&pcow->errors, count));
}

void hostmem_pcow_send_error(HostMemPcow *pcow, uint64_t offset,
                             const char *error)
{
    send_error(pcow, offset, error, 1);
}

static void send_full(HostMemPcow *pcow, uint64_t offset, uint64_t count)
{
    pcow->stores_full += count;
    qapi_event_send_pcow_pool_full(pcow->id, offset, pcow->full,
                                   pcow->stores_full);
}

bool hostmem_pcow_has_waiting_store(const HostMemPcow *pcow)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(pcow->map, &stats);
    return stats.stores_waiting;
}

/* May it be told now?  Else it will be. */
static bool may_tell_space(HostMemPcow *pcow, bool full)
{
    int64_t now = qemu_clock_get_ns(QEMU_CLOCK_REALTIME);
    int64_t *told_at = &pcow->space_told_at[full];

    if (*told_at && now - *told_at < SPACE_INTERVAL_NS) {
        timer_mod_anticipate_ns(pcow->space_timer,
                                *told_at + SPACE_INTERVAL_NS);
        return false;
    }
    *told_at = now;
    return true;
}

static void tell_space(void *opaque)
{
    HostMemPcow *pcow = opaque;
    bool full = hostmem_pcow_has_waiting_store(pcow) ||
                qatomic_read(&pcow->waiting);

    /* Also of one that has gone on before anybody could be told */
    if (pcow->full_untold && (full || !pcow->full_told)) {
        if (!may_tell_space(pcow, true)) {
            return;
        }
        send_full(pcow, pcow->full_last, pcow->full_untold);
        pcow->full_told = true;
        pcow->full_untold = 0;
    }
    if (pcow->full_told && !full && may_tell_space(pcow, false)) {
        qapi_event_send_pcow_pool_resumed(pcow->id);
        pcow->full_told = false;
        /* Those since, which are over as well: the next event counts them */
        pcow->stores_full += pcow->full_untold;
        pcow->full_untold = 0;
    }
}

void hostmem_pcow_tell_full(HostMemPcow *pcow, uint64_t offset)
{
    pcow->full_last = offset;
    pcow->full_untold++;
    tell_space(pcow);
}

void hostmem_pcow_tell_waits(HostMemPcow *pcow, uint64_t offset)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(pcow->map, &stats);
    pcow->full_last = offset;
    pcow->full_untold += stats.pool_full_waits - pcow->waits_counted;
    pcow->waits_counted = stats.pool_full_waits;
    tell_space(pcow);
}

void hostmem_pcow_tell_resumed(HostMemPcow *pcow)
{
    tell_space(pcow);
}

static HostMemPcowLog *log_of(HostMemPcow *pcow, int error)
{
    return &pcow->log[error == -ENOSPC];
}

static void log_error(HostMemPcow *pcow, uint64_t offset, int error,
                      const char *consequence)
{
    struct pcow_extent extent;
    const char *path = pcow_path(pcow->image);

    if (error == -ENOSPC) {
        error_report("pcow image '%s': the pool is full, and a store of the "
                     "guest at offset %" PRIu64 " failed (pcow-full=fail); %s",
                     path, offset, consequence);
        return;
    }
    if (pcow_get_extent(pcow->image, offset & -PCOW_PAGE_SIZE, PCOW_PAGE_SIZE,
                        &extent, NULL) == 0 && extent.present) {
        path = extent.path;
    }
    error_report("pcow image '%s': offset %" PRIu64 " of the guest cannot be "
                 "accessed (%s); it lies in '%s': look for media errors, and "
                 "for who cut it short; %s", pcow_path(pcow->image), offset,
                 strerror(-error), path, consequence);
}

/* What the log has kept back */
static void log_rest(HostMemPcow *pcow, HostMemPcowLog *log)
{
    if (log->untold) {
        error_report("pcow image '%s': %" PRIu64 " more %s since",
                     pcow_path(pcow->image), log->untold,
                     log == log_of(pcow, -ENOSPC) ?
                     "stores failed for want of space" :
                     "accesses of the guest failed");
        log->untold = 0;
    }
}

static void end_interval(HostMemPcow *pcow, HostMemPcowLog *log, int64_t now)
{
    if (log->at && now - log->at >= LOG_INTERVAL_NS) {
        log->at = log->untold ? now : 0;
        log_rest(pcow, log);
    }
    if (log->at) {
        timer_mod_anticipate_ns(pcow->log_timer, log->at + LOG_INTERVAL_NS);
    }
}

static void end_intervals(void *opaque)
{
    HostMemPcow *pcow = opaque;
    int64_t now = qemu_clock_get_ns(QEMU_CLOCK_REALTIME);

    for (unsigned i = 0; i < ARRAY_SIZE(pcow->log); i++) {
        end_interval(pcow, &pcow->log[i], now);
    }
}

void hostmem_pcow_tell_errors(HostMemPcow *pcow, uint64_t offset, int error,
                              uint64_t count, const char *consequence)
{
    HostMemPcowLog *log = log_of(pcow, error);

    if (error == -ENOSPC) {
        send_full(pcow, offset, count);
    } else {
        send_error(pcow, offset, strerror(-error), count);
    }
    log->untold += count;
    if (log->at) {
        return;                 /* the timer is armed */
    }
    log_error(pcow, offset, error, consequence);
    log->untold--;
    log->at = qemu_clock_get_ns(QEMU_CLOCK_REALTIME);
    timer_mod_anticipate_ns(pcow->log_timer, log->at + LOG_INTERVAL_NS);
}

void hostmem_pcow_tell_error(HostMemPcow *pcow, uint64_t offset, int error,
                             const char *consequence)
{
    hostmem_pcow_tell_errors(pcow, offset, error, 1, consequence);
}

void hostmem_pcow_begin_telling(HostMemPcow *pcow)
{
    pcow->log_timer = timer_new_ns(QEMU_CLOCK_REALTIME, end_intervals, pcow);
    pcow->space_timer = timer_new_ns(QEMU_CLOCK_REALTIME, tell_space, pcow);
}

void hostmem_pcow_end_telling(HostMemPcow *pcow)
{
    for (unsigned i = 0; i < ARRAY_SIZE(pcow->log); i++) {
        log_rest(pcow, &pcow->log[i]);
    }
    timer_free(pcow->log_timer);
    pcow->log_timer = NULL;
    timer_free(pcow->space_timer);
    pcow->space_timer = NULL;
}
