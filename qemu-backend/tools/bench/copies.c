/* SPDX-License-Identifier: BSD-3-Clause */
#include "copies.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "sample.h"
#include "stores.h"

#define TARGET_FILE "copies"
#define COPY_BYTES (UINT64_C(32) << 20)        /* for each result */
#define SEED UINT64_C(0x636f7079)

int copies_begin(struct copies *copies, const struct bench *bench, struct pcow_error *error)
{
    int r = ensure_content(bench, false, error);

    *copies = (struct copies){.source.fd = -1, .target.fd = -1, .seed = SEED};
    r = r ? r : bench_need(bench, bench->size, error);
    r = r ? r : raw_create(bench, TARGET_FILE, bench->size, error);
    r = r ? r : raw_map(bench, RAW_FILE, &copies->source, error);
    r = r ? r : raw_map(bench, TARGET_FILE, &copies->target, error);
    copies->samples = r ? NULL : calloc(COPY_BYTES / PCOW_PAGE_SIZE, sizeof(*copies->samples));
    if (!r && !copies->samples) {
        r = fail(error, -ENOMEM, "out of memory");
    }
    for (uint64_t offset = 0; offset < bench->size && !r; offset += PCOW_PAGE_SIZE) {
        *(volatile uint8_t *)(copies->target.memory + offset) =
            *(volatile uint8_t *)(copies->source.memory + offset);
    }
    return r;
}

/* Far more memory than the caches of a core have, as a copy on a trap finds it. */
double copies_time(struct copies *copies, const struct bench *bench, uint64_t piece)
{
    size_t count = COPY_BYTES / piece;

    for (size_t i = 0; i < count; i++) {
        uint64_t from = random_next(&copies->seed) % (bench->size / piece) * piece;
        uint64_t to = random_next(&copies->seed) % (bench->size / piece) * piece;
        uint64_t start = now_ns();

        memcpy(copies->target.memory + to, copies->source.memory + from, piece);
        __asm__ volatile("" ::: "memory");
        copies->samples[i] = (double)(now_ns() - start) - bench->limits.clock_ns;
    }
    return percentile(copies->samples, count, 0.5);
}

void copies_end(struct copies *copies, const struct bench *bench)
{
    raw_unmap(&copies->source);
    raw_unmap(&copies->target);
    bench_remove(bench, TARGET_FILE);
    free(copies->samples);
    copies->samples = NULL;
}
