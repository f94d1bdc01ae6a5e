/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef HOSTMEM_PCOW_REPORT_H
#define HOSTMEM_PCOW_REPORT_H

#include "system/hostmem-pcow.h"

/* That are told apart; no machine has more. */
#define HOST_MEM_PCOW_MAX_CPUS 4096

typedef struct HostMemPcowReport {
    HostMemPcow *pcow;
    uint64_t offset;
    int error;                  /* negative errno */
    CPUState *cpu;              /* to get a machine check, or NULL */
    bool covered;               /* zeros were put over the page */
    void *unused;               /* nobody has accessed this, perhaps no image */
    bool met;                   /* ... but libpcow, which goes on without it */
} HostMemPcowReport;

/* Once.  @serve_all: called by the main loop when there are reports. */
bool hostmem_pcow_report_init(void (*serve_all)(void), Error **errp);
/* Any thread, also in a signal handler.  False: there is no room. */
bool hostmem_pcow_push_report(const HostMemPcowReport *report);
/* Main loop.  False: there is none. */
bool hostmem_pcow_pop_report(HostMemPcowReport *report);
/* The vCPU has been told, or need not be, and may go on. */
void hostmem_pcow_told(const CPUState *cpu);
/* No vCPU gets a machine check for what has been reported so far. */
void hostmem_pcow_forget_vcpus(void);
/* The image at a host address, or NULL, and where in it. */
HostMemPcow *hostmem_pcow_find(const void *host, uint64_t *offset);

#endif
