/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Threads that meet on the same pages at the same time.
 */
#include "guest.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define LINE 64

struct run {
    struct memory *memory;
    thread_fn *function;
    void *opaque;
    FILE *out;
    pthread_barrier_t *barrier;
    unsigned index;
    bool ok;
};

static void *run_thread(void *opaque)
{
    struct run *run = opaque;

    pthread_barrier_wait(run->barrier);
    run->ok = run->function(run->memory, run->index, run->opaque, run->out);
    return NULL;
}

bool run_threads(struct memory *memory, thread_fn *function, void *opaque, FILE *out)
{
    pthread_barrier_t barrier;
    pthread_t threads[MAX_THREADS];
    struct run runs[MAX_THREADS];
    bool ok = true;

    pthread_barrier_init(&barrier, NULL, memory->threads);
    for (unsigned i = 0; i < memory->threads; i++) {
        runs[i] = (struct run){ memory, function, opaque, out, &barrier, i, false };
        pthread_create(&threads[i], NULL, run_thread, &runs[i]);
    }
    for (unsigned i = 0; i < memory->threads; i++) {
        pthread_join(threads[i], NULL);
        ok = ok && runs[i].ok;
    }
    pthread_barrier_destroy(&barrier);
    return ok;
}

/*
 * All threads go through the pages in one order and write, in each, the cache lines that are
 * theirs, then look at them again.
 */
static bool write_lines(struct memory *memory, unsigned index, void *opaque, FILE *out)
{
    uint64_t seed = *(const uint64_t *)opaque;
    size_t pages = memory->stores.length / PAGE;

    for (size_t i = 0; i < pages; i++) {
        size_t page = memory->stores.begin + (mix(seed + i) % pages) * PAGE;

        for (size_t line = index; line < PAGE / LINE; line += memory->threads) {
            size_t at = page + line * LINE;
            uint64_t value = mix(seed ^ at);

            if (mix(value) % 4 == 0) {
                continue;                                       /* this line stays as it is */
            }
            for (size_t word = 0; word < LINE; word += 8) {
                *(volatile uint64_t *)(memory->data + at + word) = value + word;
                *(volatile uint64_t *)(memory->model + at + word) = value + word;
            }
        }
        for (size_t line = index; line < PAGE / LINE; line += memory->threads) {
            if (!compare(memory, page + line * LINE, LINE,
                         "lines of one page, written by several CPUs", out)) {
                return false;
            }
        }
    }
    return true;
}

bool shared_lines(struct memory *memory, uint64_t seed, FILE *out)
{
    return run_threads(memory, write_lines, &seed, out);
}

/* A counter in every eighth page, incremented by every thread with another locked instruction. */
#define COUNTER_STEP (8 * PAGE)

static bool count_up(struct memory *memory, unsigned index, void *opaque, FILE *out)
{
    (void)opaque;
    (void)out;
    for (size_t at = memory->stores.begin + 8; at < memory->stores.begin + memory->stores.length;
         at += COUNTER_STEP) {
        _Atomic uint64_t *counter = (_Atomic uint64_t *)(memory->data + at);
        uint64_t seen;

        switch (index % 3) {
        case 0:
            atomic_fetch_add(counter, 1);
            break;
        case 1:
            seen = atomic_load(counter);
            while (!atomic_compare_exchange_weak(counter, &seen, seen + 1)) {
            }
            break;
        default:
            __asm__ volatile("lock incq %0" : "+m"(*counter));
        }
    }
    return true;
}

bool shared_counters(struct memory *memory, FILE *out)
{
    if (!run_threads(memory, count_up, NULL, out)) {
        return false;
    }
    for (size_t at = memory->stores.begin + 8; at < memory->stores.begin + memory->stores.length;
         at += COUNTER_STEP) {
        *(uint64_t *)(memory->model + at) += memory->threads;
        if (!compare(memory, at, 8, "a counter that every CPU incremented", out)) {
            return false;
        }
    }
    return true;
}

/* Every thread reads everything, but begins elsewhere. */
static bool read_all(struct memory *memory, unsigned index, void *opaque, FILE *out)
{
    size_t slabs = memory->size / SLAB;

    (void)opaque;
    for (size_t i = 0; i < slabs; i++) {
        size_t slab = (i + index * slabs / memory->threads) % slabs;

        if (!compare(memory, slab * SLAB, SLAB, "read", out)) {
            return false;
        }
    }
    return true;
}

bool shared_read(struct memory *memory, FILE *out)
{
    return run_threads(memory, read_all, NULL, out);
}

static bool fill(struct memory *memory, unsigned index, void *opaque, FILE *out)
{
    uint64_t seed = *(const uint64_t *)opaque;

    (void)out;
    for (size_t page = index; page < memory->size / PAGE; page += memory->threads) {
        for (size_t word = 0; word < PAGE; word += 8) {
            size_t at = page * PAGE + word;

            *(volatile uint64_t *)(memory->model + at) = mix(seed ^ at);
            *(volatile uint64_t *)(memory->data + at) = mix(seed ^ at);
        }
    }
    return true;
}

bool shared_fill(struct memory *memory, uint64_t seed, FILE *out)
{
    return run_threads(memory, fill, &seed, out);
}
