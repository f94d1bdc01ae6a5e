/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Every thread writes its pages again and again in a known order, write number n in thread t with a
 * content that follows from n and t, the words of a page in ascending order. Whatever is frozen at
 * one moment shows, for each thread, all writes up to some n, a first part of write n + 1, and
 * nothing of later ones.
 */
#include "guest.h"

#include <pthread.h>
#include <string.h>

#define WORDS (PAGE / 8)
#define STRIDE 7919                             /* a prime, so that the order visits all pages */

static struct {
    pthread_t thread[MAX_THREADS];
    volatile uint64_t written[MAX_THREADS];     /* number of the last complete write */
    volatile bool stop;
    bool running;
} load;

static size_t pages_of(const struct memory *memory)
{
    size_t pages = memory->load.length / PAGE / memory->threads;

    return pages % STRIDE == 0 ? pages - 1 : pages;
}

/* Writes are numbered from 1. */
static uint8_t *page_of(const struct memory *memory, uint8_t *in, unsigned thread, uint64_t number)
{
    size_t index = (number * STRIDE) % pages_of(memory);

    return in + memory->load.begin + (index * memory->threads + thread) * PAGE;
}

static uint64_t load_word(unsigned thread, uint64_t number, size_t index)
{
    return index == 0 ? number << 8 | thread : mix(number << 24 | (uint64_t)thread << 16 | index);
}

struct start {
    struct memory *memory;
    unsigned index;
};

static struct start starts[MAX_THREADS];

static void *load_thread(void *opaque)
{
    const struct start *start = opaque;
    struct memory *memory = start->memory;

    while (!load.stop) {
        uint64_t number = load.written[start->index] + 1;
        volatile uint64_t *to =
            (volatile uint64_t *)page_of(memory, memory->data, start->index, number);

        for (size_t i = 0; i < WORDS; i++) {
            to[i] = load_word(start->index, number, i);
        }
        load.written[start->index] = number;
    }
    return NULL;
}

void load_start(struct memory *memory)
{
    load.stop = false;
    load.running = true;
    for (unsigned i = 0; i < memory->threads; i++) {
        starts[i] = (struct start){ memory, i };
        pthread_create(&load.thread[i], NULL, load_thread, &starts[i]);
    }
}

void load_stop(struct memory *memory)
{
    load.stop = true;
    for (unsigned i = 0; load.running && i < memory->threads; i++) {
        pthread_join(load.thread[i], NULL);
    }
    load.running = false;
}

/* Number of the last write that began, as the memory shows it. */
static uint64_t newest(const struct memory *memory, unsigned thread)
{
    uint64_t found = 0;

    for (size_t n = 1; n <= pages_of(memory); n++) {
        const uint64_t *words = (const uint64_t *)page_of(memory, memory->data, thread, n);
        uint64_t number = words[0] >> 8;

        /* the limit tells it from what the image began with */
        if (words[0] == load_word(thread, number, 0) && number > found && number < 1ull << 40 &&
            page_of(memory, memory->data, thread, number) == (const uint8_t *)words) {
            found = number;
        }
    }
    return found;
}

static void make_page(const struct memory *memory, unsigned thread, uint64_t number,
                      const uint8_t *at, uint64_t *words)
{
    if (number == 0) {                          /* never written: what the image began with */
        memcpy(words, memory->model + (at - memory->data), PAGE);
    }
    for (size_t i = 0; number && i < WORDS; i++) {
        words[i] = load_word(thread, number, i);
    }
}

static bool check_page(const struct memory *memory, unsigned thread, uint64_t number,
                       bool may_be_partial, FILE *out)
{
    size_t pages = pages_of(memory);
    const uint8_t *at = page_of(memory, memory->data, thread, number);
    const uint64_t *words = (const uint64_t *)at;
    uint64_t wanted[WORDS];
    size_t i = 0;

    make_page(memory, thread, number, at, wanted);
    while (i < WORDS && words[i] == wanted[i]) {
        i++;
    }
    if (i < WORDS && may_be_partial) {
        make_page(memory, thread, number > pages ? number - pages : 0, at, wanted);
        while (i < WORDS && words[i] == wanted[i]) {
            i++;
        }
    }
    if (i < WORDS) {
        fprintf(out,
                "load: thread %u, write %llu, image offset %#zx: torn at word %zu: %#llx, not "
                "%#llx (is write %llu of thread %u?)\n",
                thread, (unsigned long long)number, (size_t)(at - memory->data) + DATA_OFFSET, i,
                (unsigned long long)words[i], (unsigned long long)wanted[i],
                (unsigned long long)words[0] >> 8, (unsigned)(words[0] & 255));
    }
    return i == WORDS;
}

/*
 * Prints the number of the newest write of every thread. Stopped: the memory must hold exactly what
 * the threads have written. Otherwise it belongs to a moment that only the memory knows.
 */
bool load_check(struct memory *memory, bool stopped, FILE *out)
{
    uint64_t numbers[MAX_THREADS];
    size_t pages = pages_of(memory);

    for (unsigned thread = 0; thread < memory->threads; thread++) {
        uint64_t last = stopped ? load.written[thread] : newest(memory, thread);

        numbers[thread] = last;
        for (uint64_t back = 0; back < pages && back < last; back++) {
            if (!check_page(memory, thread, last - back, !stopped && back == 0, out)) {
                return false;
            }
        }
        /* pages that no write has reached */
        for (uint64_t n = last + 1; n <= pages; n++) {
            const uint8_t *at = page_of(memory, memory->data, thread, n);

            if (!compare(memory, (size_t)(at - memory->data), PAGE, "load: page not written yet",
                         out)) {
                return false;
            }
        }
    }
    for (unsigned thread = 0; thread < memory->threads; thread++) {
        fprintf(out, "%llu ", (unsigned long long)numbers[thread]);
        if (!stopped && numbers[thread]) {
            /* load_start() goes on there, and completes the page */
            load.written[thread] = numbers[thread] - 1;
        }
    }
    return true;
}

void load_adopt(struct memory *memory)
{
    memcpy(memory->model + memory->load.begin, memory->data + memory->load.begin,
           memory->load.length);
}
