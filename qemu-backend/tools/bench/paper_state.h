/* SPDX-License-Identifier: BSD-3-Clause */
/* Between paper.c (the file) and paper_faults.c (the two handlers). */
#ifndef BENCH_PAPER_STATE_H
#define BENCH_PAPER_STATE_H

#include <pthread.h>

#include "paper.h"

#define MAX_SEGMENTS 1024

struct paper {
    const struct bench *bench;
    struct paper_options options;
    uint8_t *memory;
    void *reservation;
    uint64_t clusters;                         /* of the guest */
    int fd, base_fd;
    uint64_t end;                              /* of what is allocated in the file */
    uint8_t *super;                            /* the super cluster, mapped */
    uint8_t *segment[MAX_SEGMENTS];            /* meta clusters, mapped */
    uint32_t segment_count;
    uint32_t counter;                          /* data clusters in the last segment */
    bool allocating;                           /* a lock that a signal handler may take */
    /* By guest cluster; what the paper caches in DRAM. */
    uint64_t *offset;                          /* in the file; 0: not in the writable part */
    uint64_t **entry;                          /* its data entry */
    uint32_t *bitmap;                          /* copied pages; all ones: the whole cluster */
    uint8_t *claim;
    uint64_t *frozen;                          /* offsets at the last snapshot */
    uint64_t frozen_end;
    int uffd;
    pthread_t thread;
    uint8_t *stop_page;
    bool handler;                              /* SIGSEGV is ours */
    int failure;                               /* first negative errno of a handler */
};

/* Algorithm 1.  Returns 0 or a negative errno.  Async-signal-safe. */
int paper_new_cluster(struct paper *paper, uint64_t cluster, uint64_t *offset);
void *paper_map_file(const struct paper *paper, void *address, uint64_t length, uint64_t offset,
                     bool write);
/* The data entry of a cluster takes its new bitmap, durably. */
void paper_store_bitmap(struct paper *paper, uint64_t cluster, uint32_t bitmap);

int paper_start_handlers(struct paper *paper, struct pcow_error *error);
void paper_stop_handlers(struct paper *paper);

#endif
