/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef BACKENDS_PCOW_REPORT_H
#define BACKENDS_PCOW_REPORT_H

#include "system/hostmem-pcow.h"

/* That are told apart; no machine has more. */
#define HOST_MEM_PCOW_MAX_CPUS 4096

typedef struct HostMemPcowReport {
    HostMemPcow *pcow;
    uint64_t offset;
    int error;                  /* negative errno */
    CPUState *cpu;              /* to get a machine check, or NULL */
    void *unused;               /* nobody has accessed this, perhaps no image */
    bool met;                   /* ... but libpcow, which goes on without it */
} HostMemPcowReport;

/* Once.  @serve_all: called by the main loop when there are reports. */
bool hostmem_pcow_report_init(void (*serve_all)(void), Error **errp);
/*
 * Any thread, also in a signal handler.  False: there is no room, which is
 * noted unless a vCPU is to be told, which comes again.
 */
bool hostmem_pcow_push_report(const HostMemPcowReport *report);
/* Main loop: was there no room for one since this was asked? */
bool hostmem_pcow_reports_lost(void);
/* Have serve_all() called.  Any thread, also in a signal handler. */
void hostmem_pcow_wake(void);
/* Of the reports, and of what else a handler of SIGBUS and others change */
void hostmem_pcow_lock_reports(sigset_t *before);
void hostmem_pcow_unlock_reports(const sigset_t *before);
/* Main loop.  False: there is none. */
bool hostmem_pcow_pop_report(HostMemPcowReport *report);
/* The vCPU has been told, or need not be, and may go on. */
void hostmem_pcow_told(const CPUState *cpu);
/* No vCPU gets a machine check for what has been reported so far. */
void hostmem_pcow_forget_vcpus(void);

/* ---- backends/pcow/cover.c ---- */

/*
 * In the handler: the access can go on, to memory that stands in for the page
 * until the VM is stopped.  False: there is no memory for that.
 */
bool hostmem_pcow_cover_page(HostMemPcow *pcow, uint64_t offset, void *address,
                             int error);
/* Main loop: tell, stop the VM, and give the pages back. */
void hostmem_pcow_serve_covers(void);
/* The image goes away. */
void hostmem_pcow_forget_covers(const HostMemPcow *pcow);

#endif
