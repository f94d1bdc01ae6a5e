// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: the kernel's word that memory is lost (BUS_MCEERR_AO), for as many pages at once as
 * the test asks for. Only the process itself may send that, so a thread in it does: a line
 * "ADDRESS TIMES" of the FIFO that POISON names is a burst, of the pages of 2 MiB in turn. When it
 * is over there is a file with the name of the FIFO and ".end".
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 512

static void burst(uintptr_t address, unsigned times)
{
    for (unsigned i = 0; i < times; i++) {
        siginfo_t info;

        memset(&info, 0, sizeof(info));
        info.si_signo = SIGBUS;
        info.si_code = BUS_MCEERR_AO;
        info.si_addr = (void *)(address + (uintptr_t)(i % PAGES) * PAGE);
        info.si_addr_lsb = 12;
        syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS, &info);
    }
}

static void *serve(void *opaque)
{
    FILE *fifo = fopen(opaque, "r+");
    uintptr_t address;
    unsigned times;
    char end[4096];

    snprintf(end, sizeof(end), "%s.end", (const char *)opaque);
    while (fifo && fscanf(fifo, "%lx %u", &address, &times) == 2) {
        burst(address, times);
        fclose(fopen(end, "w"));
    }
    return NULL;
}

static void __attribute__((constructor)) begin(void)
{
    char *path = getenv("POISON");
    pthread_t thread;

    if (path)
        pthread_create(&thread, NULL, serve, path);
}
