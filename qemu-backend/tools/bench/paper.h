/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The published method ("pcow", MSST 2019, algorithms 1 to 4), re-implemented to be measured beside
 * this one: clusters are appended to a file and mapped one by one.
 *   expansion      anonymous memory under userfaultfd; a thread allocates a cluster and maps it over the place
 *   copy-on-write  SIGSEGV; a cluster is allocated, mapped elsewhere, filled with a copy, and moved over the place with
 *                  mremap(); fine-grained: only the page that was stored to
 * Its metadata updates are made as published; cache lines are flushed, as on the other side, only
 * where the pool is persistent memory. Not thread-safe against itself: one struct paper at a time
 * in a process.
 */
#ifndef BENCH_PAPER_H
#define BENCH_PAPER_H

#include "bench.h"

struct paper;

struct paper_options {
    uint64_t size, cluster_size;
    /* a raw file to copy from; NULL: the memory is absent */
    const char *base;
    bool fine_grained;
    /* the file's blocks are there before: the allocation thread at its best */
    bool preallocated;
};

int paper_open(const struct bench *bench, const struct paper_options *options, struct paper **paper,
               struct pcow_error *error);
uint8_t *paper_memory(const struct paper *paper);
/* A failure inside a handler, where it could not be told: a negative errno and where. */
int paper_check(const struct paper *paper, struct pcow_error *error);
/* Append a snapshot cluster and write-protect what is mapped. */
int paper_snapshot(struct paper *paper, struct pcow_error *error);
/* Cut the file behind the last snapshot and map its clusters anew. */
int paper_revert(struct paper *paper, struct pcow_error *error);
void paper_close(struct paper *paper);

/*
 * Map size bytes of a file whose clusters are in random order, one by one. Returns the number of
 * mappings made: fewer than size / cluster_size if the kernel refused more. memory is inaccessible
 * again afterwards.
 */
uint64_t paper_map_clusters(uint8_t *memory, int fd, const uint64_t *order, uint64_t count,
                            uint64_t cluster_size, uint64_t *elapsed_ns);

#endif
