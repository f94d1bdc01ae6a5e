/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Random work on maps against a model of what they must hold, in pools that are often full.
 * Environment:
 *
 *   PCOW_RANDOM_SECONDS   how long, over all places
 *   PCOW_RANDOM_PLACES    which, by name, separated by commas
 *   PCOW_RANDOM_POOL      instead of those places: a directory, as on a file system with DAX; what
 *                         is free there is used
 *   PCOW_TEST_SEED        of the first round
 *   PCOW_RANDOM_ROUNDS    end after so many in each place
 *
 * What goes on beside the guests is not repeated to the instant by a seed; of what it has found it
 * comes to most again within a few rounds.
 */
#include "world.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SECONDS 20u
#else
#define SECONDS 80u
#endif
#define STEPS 300u                     /* of a round at most */

struct figures figures;

static const struct place places[] = {
    {.name = "tmpfs", .is_tmpfs = true, .mebibytes = 40},
    {.name = "ext4-4k", .mebibytes = 56},
    {.name = "ext4-1k", .mebibytes = 56},
    {.name = "xfs", .mebibytes = 56},
    {.name = "xfs-1k", .mebibytes = 56},
};

#define PLACES (sizeof places / sizeof *places)

/* xorshift64*, see support.c. */
uint64_t random_next(uint64_t *seed)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return *seed * UINT64_C(2685821657736338717);
}

void wrong(const struct world *world, const char *format, ...)
{
    char text[1400];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr,
            "WRONG: %s\n  in %s: round %u, engine %d, policy %d, %u slabs, %u mappings, base %d, "
            "copy-on-read %d, %u snapshots\n"
            "  again: PCOW_RANDOM_%s=%s PCOW_TEST_SEED=0x%llx\n",
            text, world->doing, world->round, (int)world->engine, (int)world->policy, world->slabs,
            world->budget, world->has_base, world->copy_on_read, world->snapshots,
            world->place->is_given ? "POOL" : "PLACES", world->place->name,
            (unsigned long long)world->first_seed);
    fflush(stderr);
    if (getenv("PCOW_RANDOM_CORE"))
        abort();
    _exit(1);
}

static uint64_t number_of(const char *name, uint64_t standard)
{
    const char *text = getenv(name);

    return text ? strtoull(text, NULL, 0) : standard;
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* In a process of its own. */
static int run_place(struct place place, const char *directory, double seconds, uint64_t seed)
{
    double end = now() + seconds;
    uint64_t rounds = number_of("PCOW_RANDOM_ROUNDS", UINT64_MAX);
    /* An emulator shall come to several images in a minute. */
    unsigned steps = place.is_given ? STEPS / 5 : STEPS;
    static struct world world;

    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
        fprintf(stderr, "a namespace of mounts is needed, as root: %s\n", strerror(errno));
        return 1;
    }
    if (!place_make(&place, directory)) {
        fprintf(stderr, "no file system for %s\n", place.name);
        return 1;
    }
    guests_install_handlers();
    for (unsigned round = 0; round < rounds && (round == 0 || now() < end); round++) {
        world_begin(&world, &place, round, seed);
        for (unsigned i = 0; i < steps && now() < end + 5; i++)
            step(&world);
        world_end(&world);
        random_next(&seed);
    }
    printf("%s (%s): %llu rounds, %llu steps, %llu stores, %llu by system calls, %llu that found "
           "no space and %llu that waited for it, %llu loads, %llu in handlers, %llu calls beside "
           "them, checksums of %llu MiB\n",
           place.name, pcow_persistence_name(figures.persistence),
           (unsigned long long)figures.rounds, (unsigned long long)figures.steps,
           (unsigned long long)figures.stores, (unsigned long long)figures.by_calls,
           (unsigned long long)figures.refused, (unsigned long long)figures.waited,
           (unsigned long long)figures.loads,
           (unsigned long long)figures.handled, (unsigned long long)figures.called,
           (unsigned long long)figures.verified >> 20);
    fflush(stdout);
    return 0;
}

/* Of who calls; another directory in it is used. */
static int run_pool(const char *pool, double seconds, uint64_t seed)
{
    char directory[512];
    int length = snprintf(directory, sizeof directory, "%s/pcow-random-XXXXXX", pool), ret;

    if (length < 0 || (size_t)length >= sizeof directory || !mkdtemp(directory)) {
        fprintf(stderr, "PCOW_RANDOM_POOL=%s: no directory can be made there\n", pool);
        return 1;
    }
    ret = run_place((struct place){.name = pool, .is_given = true, .mebibytes = 56}, directory,
                    seconds, seed);
    pool_remove(directory, "filler");
    pool_remove(directory, "neighbour");
    pool_remove(directory, "ballast");
    rmdir(directory);
    return ret;
}

/* Where no disk is waited for there are many rounds in a minute, and all engines. */
static unsigned share_of(const struct place *place)
{
    return place->is_tmpfs ? 4 : 1;
}

static bool is_wanted(const char *name)
{
    const char *wanted = getenv("PCOW_RANDOM_PLACES");

    return !wanted || strstr(wanted, name);
}

int main(void)
{
    double seconds = (double)number_of("PCOW_RANDOM_SECONDS", SECONDS);
    uint64_t seed = number_of("PCOW_TEST_SEED", 0), given = seed;
    const char *pool = getenv("PCOW_RANDOM_POOL");
    unsigned wanted = 0, failed = 0;
    char directory[64] = "/dev/shm/pcow-random-XXXXXX";

    /* Another one each time, as the same rounds find the same things. */
    if (!seed && getrandom(&seed, sizeof seed, 0) != sizeof seed)
        return 1;
    /* It must not be 0, and one that was given is what it was. */
    seed += !seed;
    printf("PCOW_TEST_SEED=0x%llx\n", (unsigned long long)seed);
    fflush(stdout);
    if (pool)
        return run_pool(pool, seconds, seed);
    if (!mkdtemp(directory))
        return 1;
    for (unsigned i = 0; i < PLACES; i++)
        wanted += is_wanted(places[i].name) ? share_of(&places[i]) : 0;
    for (unsigned i = 0; i < PLACES && !failed; i++) {
        /* Of each place another one, or what one misses all do. */
        uint64_t its = given ? given : random_next(&seed) | 1;
        int status = 0;
        pid_t child;

        if (!is_wanted(places[i].name))
            continue;
        child = fork();
        if (child == 0)
            exit(run_place(places[i], directory, seconds * share_of(&places[i]) / wanted, its));
        failed = waitpid(child, &status, 0) != child || status != 0;
        if (failed)
            fprintf(stderr, "%s: status %#x, PCOW_TEST_SEED=0x%llx\n", places[i].name, status,
                    (unsigned long long)its);
    }
    rmdir(directory);
    return failed != 0;
}
