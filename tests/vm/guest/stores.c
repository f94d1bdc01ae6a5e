/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE
#include "guest.h"
#include "stores.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LONGEST (3 * PAGE)                      /* of a string instruction */
#define CLUSTER (16 * PAGE)
#define AROUND 64                               /* bytes on both sides that must not have changed */

static unsigned kinds(void)
{
    return (unsigned)(scalar_kinds_count + vector_kinds_count + string_kinds_count);
}

static const struct store_kind *kind_at(size_t index)
{
    if (index < scalar_kinds_count) {
        return &scalar_kinds[index];
    }
    index -= scalar_kinds_count;
    return index < vector_kinds_count ? &vector_kinds[index]
                                      : &string_kinds[index - vector_kinds_count];
}

static bool available(const struct store_kind *kind)
{
    return !kind->available || kind->available();
}

unsigned stores_kinds(void)
{
    unsigned count = 0;

    for (size_t i = 0; i < kinds(); i++) {
        count += available(kind_at(i));
    }
    return count;
}

static bool prepare(struct operands *operands, FILE *out)
{
    operands->buffer = malloc(BUFFER_SIZE);
    operands->file = memfd_create("content", MFD_CLOEXEC);
    if (!operands->buffer || operands->file < 0) {
        fprintf(out, "no memory for the operands\n");
        return false;
    }
    for (size_t i = 0; i < BUFFER_SIZE; i += 8) {
        uint64_t value = mix(0xb0ff + i);

        memcpy(operands->buffer + i, &value, 8);
    }
    return write(operands->file, operands->buffer, BUFFER_SIZE) == BUFFER_SIZE;
}

static void release(struct operands *operands)
{
    close(operands->file);
    free(operands->buffer);
}

/* To the image and to the model; what lies between BEGIN and END belongs to the caller. */
static bool store(struct memory *memory, const struct store_kind *kind, size_t at, size_t from,
                  const struct operands *operands, size_t begin, size_t end, FILE *out)
{
    size_t span = kind->span ? kind->span : operands->length;
    size_t low = at - begin < AROUND ? begin : at - AROUND;
    size_t high = end - at - span < AROUND ? end : at + span + AROUND;

    kind->run(memory->data + at, memory->data + from, operands);
    kind->run(memory->model + at, memory->model + from, operands);
    return compare(memory, low, high - low, kind->name, out);
}

/* A place for SPAN bytes in [BEGIN, END): anywhere, or over the border of a page. */
static size_t place(size_t begin, size_t end, size_t span, size_t align, uint64_t random)
{
    size_t at = begin + random % (end - begin - span + 1);

    if (random >> 60 < 8) {                     /* half of them */
        size_t border = (at + PAGE - 1) / PAGE * PAGE, before = (random >> 40) % (span + 8);

        if (border >= begin + before && border - before + span <= end) {
            at = border - before;
        }
    }
    at = at / align * align;
    return at < begin ? at + align : at;
}

bool stores_run(const struct store_job *job, FILE *out)
{
    struct memory *memory = job->memory;
    struct operands operands;
    size_t granules = memory->stores.length / job->granule;
    bool ok = prepare(&operands, out);

    for (unsigned long i = 0; ok && i < job->count; i++) {
        uint64_t random = mix(job->seed ^ mix((uint64_t)job->index << 48 | i));
        const struct store_kind *kind = kind_at(random % kinds());
        size_t longest = job->granule < 4 * LONGEST ? job->granule / 4 : LONGEST;
        size_t granule = mix(random) % (granules / memory->threads) * memory->threads + job->index;
        size_t begin = memory->stores.begin + granule * job->granule, end = begin + job->granule,
               span;

        if (!available(kind)) {
            continue;
        }
        operands.a = mix(random + 1);
        operands.b = mix(random + 2);
        operands.c = mix(random + 3);
        /* most of them short, some over several pages */
        operands.length = 8 + mix(random + 4) % (operands.c % 4 ? 256 : longest - 8) / 8 * 8;
        span = kind->span ? kind->span : operands.length;
        ok = store(
            memory, kind, place(begin, end - kind->align, span, kind->align, mix(random + 5)),
            begin
                + mix(random + 6) % (job->granule - (operands.length > 64 ? operands.length : 64)),
            &operands, begin, end, out);
    }
    release(&operands);
    return ok;
}

/* The page in a cluster that LEVEL shows in, if there is one. */
static size_t page_of_level(size_t cluster, enum level level)
{
    for (size_t page = 1; page < CLUSTER / PAGE - 4; page++) {
        if (layout_level(cluster / PAGE + page) == level) {
            return cluster + page * PAGE;
        }
    }
    return cluster + 5 * PAGE;
}

/*
 * Every kind of store as the first one to a cluster of its own, over a page border where the
 * instruction can do that, once for every level that the page may come from.
 */
bool stores_run_each(struct memory *memory, FILE *out)
{
    size_t clusters = memory->stores.length / CLUSTER, next = 0;
    struct operands operands;
    bool ok = prepare(&operands, out);

    for (size_t i = 0; ok && i < kinds(); i++) {
        const struct store_kind *kind = kind_at(i);

        for (enum level level = LEVEL_ABSENT; ok && available(kind) && level <= LEVEL_ACTIVE;
             level++) {
            /* clusters far from each other, so that the slabs fill slowly */
            size_t cluster = memory->stores.begin + next++ * 37 % clusters * CLUSTER;
            size_t page = page_of_level(cluster, level), span;

            operands.a = mix(next);
            operands.b = mix(next + 1);
            operands.c = mix(next + 2);
            operands.length = level % 2 ? LONGEST - PAGE + 8 : 1000;
            span = kind->span ? kind->span : operands.length;
            ok = store(memory, kind,
                       span == 1 ? page : (page - (span + 1) / 2) / kind->align * kind->align,
                       cluster + 7 * PAGE, &operands, cluster, cluster + CLUSTER, out);
        }
    }
    release(&operands);
    return ok;
}
