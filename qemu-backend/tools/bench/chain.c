/* SPDX-License-Identifier: BSD-3-Clause */
#include "chain.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "report.h"

#define OVERWRITTEN_PART 8u                    /* each layer overwrites an eighth of the units */
#define SEED UINT64_C(0x63686169)
#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))

static const char *const raw_files[CHAIN_RAW] = {"raw-chain", "raw-control", "raw-clusters"};
static const char *const files[3] = {"chain-1.pcow", "chain-2.pcow", "chain-3.pcow"};

/* Layers from the bottom: which file, and the snapshot that is made of it when it is written. */
static const struct {
    unsigned file;
    const char *snapshot;
} layers[] = {{0, "one"}, {0, NULL}, {1, "two"}, {1, NULL}, {2, "three"}, {2, "four"}, {2, NULL}};

#define LAYERS (sizeof(layers) / sizeof(layers[0]))

static int write_unit(struct chain_sides *sides, pcow_image *image, uint64_t unit, uint64_t at,
                      unsigned writer, uint64_t *buffer, struct pcow_error *error)
{
    uint64_t first = at / PCOW_PAGE_SIZE, pages = unit / PCOW_PAGE_SIZE;

    for (uint64_t i = 0; i < pages; i++) {
        buffer[i * WORDS_PER_PAGE] = chain_word(first + i, writer);
        sides->writer[first + i] = (uint8_t)writer;
    }
    return pcow_write(image, at, buffer, unit, error);
}

static int write_layer(struct chain_sides *sides, pcow_image *image, uint64_t unit, unsigned layer,
                       uint64_t *buffer, uint64_t *seed, struct pcow_error *error)
{
    uint64_t size = sides->bench->size;
    int r = 0;

    for (uint64_t at = 0; at < size && !r; at += unit) {
        if (layer == 0 || random_next(seed) % OVERWRITTEN_PART == 0) {
            r = write_unit(sides, image, unit, at, layer, buffer, error);
        }
    }
    r = r ? r : pcow_flush(image, error);
    return r || !layers[layer].snapshot
               ? r
               : pcow_snapshot_create(image, layers[layer].snapshot, error);
}

static int build(struct chain_sides *sides, uint64_t unit, uint64_t *buffer,
                 struct pcow_error *error)
{
    const struct bench *bench = sides->bench;
    char path[4096], base[4096];
    uint64_t seed = SEED;
    int r = 0;

    for (unsigned layer = 0; layer < LAYERS && !r; layer++) {
        unsigned file = layers[layer].file;
        struct pcow_create_options options = {
            .virtual_size = bench->size,
            .no_mirror = bench->no_mirror,
            .base = file ? bench_path(bench, files[file - 1], base) : NULL};

        bench_path(bench, files[file], path);
        if (layer == 0 || layers[layer - 1].file != file) {
            r = pcow_create(path, &options, error);
            r = r ? r : pcow_open(path, PCOW_OPEN_WRITE, NULL, &sides->image, error);
        }
        r = r ? r : write_layer(sides, sides->image, unit, layer, buffer, &seed, error);
        if (!r && layer + 1 < LAYERS && layers[layer + 1].file != file) {
            r = pcow_seal(sides->image, error);
            pcow_close(sides->image);
            sides->image = NULL;
        }
    }
    return r;
}

static int create_raw(const struct bench *bench, struct pcow_error *error)
{
    int r = 0;

    for (unsigned which = 0; which < CHAIN_RAW && !r; which++) {
        r = raw_create(bench, raw_files[which], bench->size, error);
    }
    return r;
}

/*
 * A hint that says nothing about memory, given for every other cluster: so the kernel makes no
 * mappings of neighbours one.
 */
static int map_by_clusters(const struct raw *raw, struct pcow_error *error)
{
    for (uint64_t at = 0; at < raw->size; at += 2 * PCOW_DEFAULT_CLUSTER_SIZE) {
        if (madvise(raw->memory + at, PCOW_DEFAULT_CLUSTER_SIZE, MADV_RANDOM)) {
            return fail(error, -errno, "cannot map a file cluster by cluster: %s", strerror(errno));
        }
    }
    return 0;
}

static int open_raw(struct chain_sides *sides, unsigned which, struct pcow_error *error)
{
    int r = raw_map(sides->bench, raw_files[which], &sides->raw[which], error);

    if (!r && which == CHAIN_PAPER) {
        r = map_by_clusters(&sides->raw[which], error);
    }
    for (uint64_t page = 0; page < sides->pages && !r; page++) {
        uint64_t *words = (uint64_t *)(sides->raw[which].memory + page * PCOW_PAGE_SIZE);

        memset(words, 0, PCOW_PAGE_SIZE);
        words[0] = chain_word(page, sides->writer[page]);
    }
    return r;
}

int chain_open(const struct bench *bench, uint64_t unit, bool raw_first, bool copy_on_read,
               struct chain_sides *sides, struct pcow_error *error)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL, .full_policy = PCOW_FULL_FAIL};
    uint64_t *buffer = slab_buffer();
    int r;

    *sides = (struct chain_sides){.bench = bench,
                                  .raw = {{.fd = -1}, {.fd = -1}, {.fd = -1}},
                                  .pages = bench->size / PCOW_PAGE_SIZE};
    sides->writer = calloc(sides->pages, 1);
    r = buffer && sides->writer ? 0 : fail(error, -ENOMEM, "out of memory");
    r = r || !raw_first ? r : create_raw(bench, error);
    if (!r) {
        memset(buffer, 0, PCOW_SLAB_SIZE);
        r = build(sides, unit, buffer, error);
    }
    free(buffer);
    r = r || raw_first ? r : create_raw(bench, error);
    for (unsigned which = 0; which < CHAIN_RAW && !r; which++) {
        r = open_raw(sides, which, error);
    }
    r = r || !copy_on_read ? r : pcow_set_copy_on_read(sides->image, true, error);
    r = r ? r : pcow_map_create(sides->image, &options, &sides->map, error);
    if (!r) {
        sides->pcow = pcow_map_address(sides->map);
        r = chain_verify(sides, error);        /* also the first read of every page */
    }
    if (r) {
        chain_close(sides);
    }
    return r;
}

void chain_write_all(struct chain_sides *sides)
{
    uint8_t *const memory[] = {sides->raw[CHAIN_PLAIN].memory, sides->raw[CHAIN_CONTROL].memory,
                               sides->raw[CHAIN_PAPER].memory, sides->pcow};

    for (unsigned side = 0; side < CHAIN_RAW + 1; side++) {
        for (uint64_t page = 0; page < sides->pages; page++) {
            *(volatile uint64_t *)(memory[side] + page * PCOW_PAGE_SIZE) =
                chain_word(page, CHAIN_WRITTEN);
        }
    }
    memset(sides->writer, CHAIN_WRITTEN, sides->pages);
}

int chain_verify(const struct chain_sides *sides, struct pcow_error *error)
{
    const uint8_t *const memory[] = {sides->raw[CHAIN_PLAIN].memory,
                                     sides->raw[CHAIN_CONTROL].memory,
                                     sides->raw[CHAIN_PAPER].memory, sides->pcow};

    for (unsigned side = 0; side < CHAIN_RAW + 1; side++) {
        for (uint64_t page = 0; page < sides->pages; page++) {
            const uint64_t *words = (const uint64_t *)(memory[side] + page * PCOW_PAGE_SIZE);
            bool stored = sides->writer[page] == CHAIN_WRITTEN;
            uint64_t wrong = stored ? chain_word_page(words[0]) ^ page
                                    : words[0] ^ chain_word(page, sides->writer[page]);

            for (size_t i = 1; i < WORDS_PER_PAGE; i++) {
                wrong |=
                    stored && i % 8 == 0 && words[i] ? chain_word_page(words[i]) ^ page : words[i];
            }
            if (wrong) {
                return fail(error, -EILSEQ, "%s: wrong data at offset %llu of the chain",
                            side == CHAIN_RAW ? "pcow" : "raw",
                            (unsigned long long)(page * PCOW_PAGE_SIZE));
            }
        }
    }
    return 0;
}

void chain_close(struct chain_sides *sides)
{
    pcow_map_destroy(sides->map);
    pcow_close(sides->image);
    for (unsigned which = 0; which < CHAIN_RAW; which++) {
        raw_unmap(&sides->raw[which]);
        bench_remove(sides->bench, raw_files[which]);
    }
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        bench_remove(sides->bench, files[i]);
    }
    free(sides->writer);
    *sides = (struct chain_sides){.raw = {{.fd = -1}, {.fd = -1}, {.fd = -1}}};
}
