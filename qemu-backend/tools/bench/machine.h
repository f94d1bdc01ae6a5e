/* SPDX-License-Identifier: BSD-3-Clause */
/* The machine that the numbers belong to. */
#ifndef BENCH_MACHINE_H
#define BENCH_MACHINE_H

#include "bench.h"

struct machine {
    char cpu[128], kernel[256];
    unsigned cores;                            /* that this process may run on */
    unsigned max_map_count;
    uint64_t memory;                           /* bytes */
    /* the kernel's setting, with the choices; "" if it has none */
    char shmem_huge[128];
    char pool_file_system[32];
};

/* Bytes that can be had without swapping; very much if the kernel does not say. */
uint64_t memory_available(void);

void machine_describe(const struct bench *bench, struct machine *machine);

#endif
