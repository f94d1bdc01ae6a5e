/* SPDX-License-Identifier: BSD-3-Clause */
#include "stores.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report.h"
#include "sample.h"
#include "threads.h"

#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))

int stores_begin(struct stores *stores, const struct bench *bench, enum visit visit,
                 uint64_t cluster_size, unsigned threads, uint64_t seed, struct pcow_error *error)
{
    int r;

    *stores = (struct stores){.threads = threads,
                              .pages = bench->size / PCOW_PAGE_SIZE,
                              .clock_ns = bench->limits.clock_ns};
    r = visits_make(&stores->visits, visit, bench->size, cluster_size, seed);
    stores->samples = calloc(stores->visits.count + 1, sizeof(*stores->samples));
    stores->stored = calloc(stores->pages + 1, 1);
    if (r || !stores->samples || !stores->stored) {
        stores_end(stores);
        return fail(error, -ENOMEM, "out of memory");
    }
    for (size_t i = 0; i < stores->visits.count; i++) {
        stores->stored[stores->visits.page[i]] = 1;
    }
    for (size_t i = 0; i < stores->visits.warm_count && stores->visits.warm_stores; i++) {
        stores->stored[stores->visits.warm[i]] = 1;
    }
    return 0;
}

void stores_end(struct stores *stores)
{
    visits_free(&stores->visits);
    free(stores->samples);
    free(stores->stored);
    *stores = (struct stores){0};
}

static volatile uint64_t *mark_address(uint8_t *memory, uint64_t page)
{
    return (volatile uint64_t *)(memory + page * PCOW_PAGE_SIZE) + MARK_WORD;
}

void stores_warm(const struct stores *stores, uint8_t *memory)
{
    for (size_t i = 0; i < stores->visits.warm_count; i++) {
        volatile uint64_t *address = mark_address(memory, stores->visits.warm[i]);

        if (stores->visits.warm_stores) {
            *address = page_mark(stores->visits.warm[i]);
        } else {
            (void)*address;
        }
    }
}

static void store_share(void *opaque, unsigned thread)
{
    struct stores *stores = opaque;
    size_t first = stores->visits.count * thread / stores->threads,
           end = stores->visits.count * (thread + 1) / stores->threads;

    for (size_t i = first; i < end; i++) {
        uint64_t page = stores->visits.page[i], mark = page_mark(page);
        volatile uint64_t *address = mark_address(stores->memory, page);
        uint64_t start = now_ns(), taken;

        *address = mark;
        taken = now_ns() - start;
        stores->samples[i] =
            (double)taken > stores->clock_ns ? (double)taken - stores->clock_ns : 0;
    }
}

int stores_run(struct stores *stores, uint8_t *memory, struct pcow_error *error)
{
    /* Its pages must be there before the clock runs. */
    memset(stores->samples, 0, stores->visits.count * sizeof(*stores->samples));
    stores->memory = memory;
    return run_threads(stores->threads, store_share, stores, error);
}

static bool page_is(const uint64_t *words, uint64_t other, uint64_t mark)
{
    uint64_t wrong = words[MARK_WORD] ^ mark;

    for (size_t i = 0; i < WORDS_PER_PAGE; i++) {
        wrong |= i == MARK_WORD ? 0 : words[i] ^ other;
    }
    return !wrong;
}

int stores_verify(const struct stores *stores, const char *what, const uint8_t *memory,
                  bool patterned, bool every_page, struct pcow_error *error)
{
    for (uint64_t page = 0; page < stores->pages; page++) {
        uint64_t other = patterned ? page_pattern(page) : 0;

        if ((every_page || stores->stored[page])
            && !page_is((const uint64_t *)(memory + page * PCOW_PAGE_SIZE), other,
                        stores->stored[page] ? page_mark(page) : other)) {
            return fail(error, -EILSEQ,
                        "%s holds wrong data at offset %llu; its times mean nothing", what,
                        (unsigned long long)(page * PCOW_PAGE_SIZE));
        }
    }
    return 0;
}

int ensure_content(const struct bench *bench, bool base, struct pcow_error *error)
{
    char path[4096];
    int r = 0;

    if (access(bench_path(bench, RAW_FILE, path), F_OK)) {
        r = bench_need(bench, bench->size, error);
        r = r ? r : raw_create(bench, RAW_FILE, bench->size, error);
    }
    if (!r && base && access(bench_path(bench, BASE_IMAGE, path), F_OK)) {
        r = bench_need(bench, bench->size, error);
        r = r ? r : side_create_base(bench, BASE_IMAGE, bench->size, error);
    }
    return r;
}

int verify_base(const struct bench *bench, const char *row, struct pcow_error *error)
{
    uint64_t *buffer = slab_buffer(), *expected = slab_buffer();
    pcow_image *image = NULL;
    char path[4096];
    int r = buffer && expected ? 0 : fail(error, -ENOMEM, "out of memory");

    r = r ? r : pcow_open(bench_path(bench, BASE_IMAGE, path), 0, NULL, &image, error);
    for (uint64_t offset = 0; offset < bench->size && !r; offset += PCOW_SLAB_SIZE) {
        r = pcow_read(image, offset, buffer, PCOW_SLAB_SIZE, error);
        if (!r) {
            fill_slab(expected, offset / PCOW_PAGE_SIZE);
            r = memcmp(buffer, expected, PCOW_SLAB_SIZE) == 0
                    ? 0
                    : fail(error, -EILSEQ, "%s changed the base image near offset %llu", row,
                           (unsigned long long)offset);
        }
    }
    pcow_close(image);
    free(buffer);
    free(expected);
    return r;
}
