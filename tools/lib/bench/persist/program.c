/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs in the guest of tools/bench persist, and, to see what a flush costs, on the host.
 *
 *   fill MIB              store to every page of so much new memory, and end
 *   serve                 answer each line on the console, until the line is "end"
 *   stores MIB SECONDS    8 bytes here and there in so much memory, as fast as it goes. Prints
 *                         "rate MIB-PER-SECOND longest MS": each store counts as its line, and the
 *                         longest time between two of some hundred of them
 *   flush MIB             ns per MiB for clwb of lines that were just stored to, and are in the
 *                         cache; one thread
 */
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    LINE = 64,
    BATCH = 256,
    MIB = 1 << 20,
    CACHED = 256 << 10, /* bytes that the cache of one core holds, all of them changed */
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static unsigned char *memory(size_t size)
{
    unsigned char *found =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (found == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    for (size_t at = 0; at < size; at += 4096)
        memset(found + at, (int)(at >> 12) | 1, 4096);
    return found;
}

static void serve(void)
{
    char line[64];

    setvbuf(stdout, NULL, _IONBF, 0);
    puts("serves");
    while (fgets(line, sizeof line, stdin) && strncmp(line, "end", 3))
        printf("answer %s", line);
}

static void stores(size_t size, double seconds)
{
    unsigned char *at = memory(size);
    uint64_t x = UINT64_C(88172645463325252), done = 0, lines = size / LINE;
    double begun = now(), last = begun, longest = 0, time;

    do {
        for (int i = 0; i < BATCH; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            *(volatile uint64_t *)(at + x % lines * LINE) = x;
        }
        done += BATCH;
        time = now();
        if (time - last > longest)
            longest = time - last;
        last = time;
    } while (time < begun + seconds);
    printf("rate %.1f longest %.2f\n", (double)done * LINE / MIB / (time - begun), longest * 1e3);
}

__attribute__((target("clwb"))) static void flush(size_t size)
{
    unsigned eax, ebx = 0, ecx, edx;
    unsigned char *at = memory(size);
    double took = 0;

    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & 1u << 24)) {
        puts("flush none");
        return;
    }
    for (size_t step = 0; step < size; step += CACHED) {
        double begun;

        for (size_t line = 0; line < CACHED; line += LINE)
            at[step + line]++;
        begun = now();
        for (size_t line = 0; line < CACHED; line += LINE)
            _mm_clwb(at + step + line);
        _mm_sfence();
        took += now() - begun;
    }
    printf("flush %.0f\n", took * 1e9 / ((double)size / MIB));
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    size_t size = (argc > 2 ? strtoul(argv[2], NULL, 10) : 0) * MIB;

    if (!strcmp(mode, "serve"))
        serve();
    else if (!strcmp(mode, "fill") && size)
        memory(size);
    else if (!strcmp(mode, "flush") && size)
        flush(size);
    else if (!strcmp(mode, "stores") && argc == 4 && size)
        stores(size, atof(argv[3]));
    else
        return 2;
    return 0;
}
