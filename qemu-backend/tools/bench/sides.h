/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The two sides that every row compares, as ranges of memory: raw, a linear shared mapping of a
 * file that was written before, and pcow. The third, the paper's method, is in paper.h.
 *
 * Content: a page that was written before holds page_pattern() in every word; a timed store puts
 * page_mark() into its second word and nothing else, so that both the store and what it must not
 * touch can be checked.
 */
#ifndef BENCH_SIDES_H
#define BENCH_SIDES_H

#include "bench.h"

#define RAW_FILE "raw"
#define BASE_IMAGE "base.pcow"
#define TOP_IMAGE "top.pcow"
/* index of the 8-byte word that a timed store changes */
#define MARK_WORD 1

static inline uint64_t page_pattern(uint64_t page)
{
    return (page + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

static inline uint64_t page_mark(uint64_t page)
{
    return ~page_pattern(page);
}

uint64_t random_next(uint64_t *seed);          /* never with seed 0 */
void shuffle(uint64_t *values, size_t count, uint64_t *seed);

/* A file of the pool filled with page_pattern(). */
int raw_create(const struct bench *bench, const char *name, uint64_t size,
               struct pcow_error *error);

struct raw {
    int fd;
    uint8_t *memory;                           /* 2 MiB aligned, as pcow's */
    uint64_t size;
    void *reservation;
};

int raw_map(const struct bench *bench, const char *name, struct raw *raw, struct pcow_error *error);
/* Give the pages that were stored to their pattern back, so that the file can be used again. */
void raw_restore(struct raw *raw);
void raw_unmap(struct raw *raw);

/* Address space of size bytes at a 2 MiB boundary, no access; NULL when there is none. */
uint8_t *reserve_aligned(uint64_t size, void **reservation);
void release_aligned(void *reservation, uint64_t size);

struct side {
    pcow_image *image;
    pcow_map *map;
    uint8_t *memory;
    uint64_t size;
    const char *name;                          /* of the image file, removed by side_close() */
};

/* A sealed image full of page_pattern(). */
int side_create_base(const struct bench *bench, const char *name, uint64_t size,
                     struct pcow_error *error);
/* A new image, on base if that is not NULL, opened and mapped. */
int side_open(const struct bench *bench, struct side *side, const char *base, uint64_t size,
              uint64_t cluster_size, enum pcow_engine engine, struct pcow_error *error);
/*
 * The same, with so many slabs prepared before it returns (0: as many as the monitor finds right,
 * and without waiting).
 */
int side_open_prepared(const struct bench *bench, struct side *side, const char *base,
                       uint64_t size, uint64_t cluster_size, enum pcow_engine engine,
                       unsigned prepared_slabs, struct pcow_error *error);
/*
 * Let the thread that works ahead get its lead, as in a VM that has been running for a while; a
 * pool short of space gives less.
 */
void side_settle(const struct side *side, unsigned prepared_slabs);
void side_close(const struct bench *bench, struct side *side);

/* 2 MiB for one slab of content, aligned to a page; free with free(); NULL when out of memory. */
uint64_t *slab_buffer(void);
void fill_slab(uint64_t *buffer, uint64_t first_page);

/* Memory mappings of this process that lie in [memory, memory + size). */
unsigned count_mappings(const void *memory, uint64_t size);
/* Share of the range that is mapped with huge pages, 0 to 1. */
double huge_share(const void *memory, uint64_t size);

const char *engine_name(enum pcow_engine engine);

#endif
