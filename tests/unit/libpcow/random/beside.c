/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What goes on beside the guests: calls that any thread may make at any time, signals, and others
 * who use the pool and read the file.
 */
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* without progress, in a pool that can grow, until it does */
#define STUCK_MS 300u
/* without progress at all: a sync beside other writers of the disk has taken 20 s */
#define HANG_MS 60000u
#define MEBIBYTE (UINT64_C(1) << 20)
#define GROWTH 8u                      /* MiB at a time */
#define MAX_POOL 1024u                 /* MiB */
#define BALLAST "ballast"
/* rounds of the ticker until a guest that stands still is signalled */
#define IDLE_ROUNDS 16u

static void filler_path(const struct world *world, const char *name, char *path, size_t size)
{
    snprintf(path, size, "%s/%s", world->place->directory, name);
}

void pool_remove(const char *directory, const char *name)
{
    char path[600];

    snprintf(path, sizeof path, "%s/%s", directory, name);
    unlink(path);
}

void pool_fill_but(const struct world *world, const char *name, unsigned pages)
{
    struct statvfs fs;
    char path[600];
    uint64_t available, wanted = pages * PAGE;
    int fd;

    filler_path(world, name, path, sizeof path);
    fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    for (unsigned tries = 0; tries < 4 && fstatvfs(fd, &fs) == 0; tries++) {
        available = fs.f_bavail * fs.f_frsize;
        if (available <= wanted
            || fallocate(fd, 0, lseek(fd, 0, SEEK_END), (off_t)(available - wanted)))
            break;
    }
    close(fd);
}

void pool_empty(const struct world *world, const char *name)
{
    char path[600];

    filler_path(world, name, path, sizeof path);
    if (truncate(path, 0) && errno != ENOENT && errno != ENOSPC)
        wrong(world, "cannot empty %s: %d", path, errno);
}

static void sleep_ms(uint64_t ms)
{
    struct timespec interval = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};

    nanosleep(&interval, NULL);
}

/* A backup. */
static void read_file(const struct world *world)
{
    static char buffer[1 << 20];
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);
    off_t at = 0;

    while (fd >= 0 && (at = lseek(fd, at, SEEK_DATA)) >= 0) {
        ssize_t got = pread(fd, buffer, sizeof buffer, at);

        if (got <= 0)
            break;
        at += got;
    }
    if (fd >= 0)
        close(fd);
}

/* Who makes checksums of a snapshot; it may be deleted, or the pool be full. */
static void make_checksums(const struct world *world, uint64_t *seed)
{
    struct pcow_snapshot *list;
    pcow_image *image;
    size_t count;
    int ret;

    if (pcow_open(world->path, PCOW_OPEN_FORCE_SHARE | PCOW_OPEN_NO_BASE, NULL, &image, NULL))
        return;
    ret = pcow_snapshot_list(image, &list, &count, NULL);
    pcow_close(image);
    if (ret)
        return;
    if (count
        && !pcow_open(world->path, PCOW_OPEN_NO_BASE, list[below(seed, count)].name, &image,
                      NULL)) {
        pcow_checksum_beside_writer(image, 0, NULL, NULL, NULL, NULL);
        pcow_close(image);
    }
    free(list);
}

static _Noreturn void be_neighbour(struct world *world)
{
    uint64_t seed = world->first_seed ^ UINT64_C(0x9e3779b97f4a7c15);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        sleep_ms(below(&seed, 30));
        switch (below(&seed, 5)) {
        case 0:
            pool_fill_but(world, "neighbour", (unsigned)below(&seed, 600));
            break;
        case 1:
            read_file(world);
            break;
        case 2:
            make_checksums(world, &seed);
            break;
        default:
            pool_empty(world, "neighbour");
            if (below(&seed, 12) == 0)
                pool_empty(world, "filler");
        }
    }
}

static void check(struct world *world, int ret, int allowed, const char *what)
{
    if (ret && ret != allowed)
        wrong(world, "%s returns %d", what, ret);
}

/* Room for the last snapshot is asked for, taken, lent and given back at any moment. */
static void call_for_spare(struct world *world, uint64_t *seed)
{
    switch (below(seed, 4)) {
    case 0:
        check(world, pcow_map_keep_spare(world->map, below(seed, 3), below(seed, 5) << 20, NULL), 0,
              "pcow_map_keep_spare()");
        break;
    case 1:
        pcow_map_use_spare(world->map, below(seed, 2));
        break;
    default:
        pcow_map_lend_spare(world->map);
    }
}

static void find(const struct world *world, uint64_t offset)
{
    uint64_t found;

    if (!pcow_map_find(world->map, world->memory + offset, &found) || found != offset)
        wrong(world, "pcow_map_find() does not know guest offset %llu", (unsigned long long)offset);
}

static void call_something(struct world *world, uint64_t *seed)
{
    uint64_t offset = below(seed, world->size / PAGE) * PAGE,
             length = (1 + below(seed, below(seed, 8) ? 4 : 600)) * PAGE;
    struct pcow_map_stats stats;
    struct pcow_event event;

    if (length > world->size - offset)
        length = world->size - offset;
    atomic_fetch_add(&figures.called, 1);
    switch (world->asks ? below(seed, 15) : 2 + below(seed, 11) + 2 * below(seed, 2)) {
    case 0:
        check(world, pcow_map_resolve(world->map, offset, length, false, NULL), 0,
              "pcow_map_resolve() for loads");
        break;
    case 1:
        check(
            world,
            pcow_map_resolve(world->map, offset, length < 8 * PAGE ? length : 8 * PAGE, true, NULL),
            -ENOSPC, "pcow_map_resolve() for stores");
        break;
    case 2:
        check(world, pcow_map_prepare(world->map, offset, length, false, NULL), 0,
              "pcow_map_prepare() for loads");
        break;
    case 3:
        check(
            world,
            pcow_map_prepare(world->map, offset, length < 8 * PAGE ? length : 8 * PAGE, true, NULL),
            -ENOSPC, "pcow_map_prepare() for stores");
        break;
    case 4:
        pcow_map_settle(world->map, offset, length);
        break;
    case 5:
        check(world, pcow_map_flush(world->map, offset, length, NULL), 0, "pcow_map_flush()");
        break;
    case 6:
        if (below(seed, 2))
            check(world, pcow_map_trap(world->map, offset, false), 0, "pcow_map_trap() for a load");
        else
            check(world, pcow_map_trap(world->map, offset, true), -ENOSPC,
                  "pcow_map_trap() for a store");
        break;
    case 7:
        if (world->asks && below(seed, 40) == 0) {
            int ret = pcow_map_watch(world->map, NULL);

            if (ret && ret != -EPERM && ret != -EACCES && ret != -ENOMEM)
                wrong(world, "pcow_map_watch() returns %d", ret);
        }
        break;
    case 8:
        pcow_map_get_stats(world->map, &stats);
        break;
    case 9:
        call_for_spare(world, seed);
        break;
    case 10:
        find(world, offset);
        pcow_map_can_store(world->map, offset);
        break;
    case 11:
        pcow_map_is_accessible(world->map, offset, below(seed, 2));
        pcow_map_watch_found(world->map, &offset);
        break;
    default:
        while (pcow_map_next_event(world->map, &event))
            if (event.kind == PCOW_EVENT_ERROR)
                wrong(world, "an event tells of error %d at %llu", event.error,
                      (unsigned long long)event.offset);
    }
}

static void *call(void *opaque)
{
    struct world *world = opaque;
    uint64_t seed = world->first_seed ^ UINT64_C(0xc2b2ae3d27d4eb4f);

    while (!atomic_load(&world->stop)) {
        const struct timespec moment = {0, (long)below(&seed, 400000)};

        call_something(world, &seed);
        nanosleep(&moment, NULL);
    }
    return NULL;
}

/*
 * A pool of so many MiB: tmpfs has the size that is asked for, elsewhere a file has the rest of
 * what was free at the beginning of a round.
 */
static void grow_pool(const struct world *world, unsigned mebibytes)
{
    char options[64], path[600];
    unsigned more = mebibytes - world->place->mebibytes;

    if (world->place->is_tmpfs) {
        snprintf(options, sizeof options, "size=%um", mebibytes);
        mount("pcow-test", world->place->directory, "tmpfs", MS_REMOUNT, options);
    } else if (more == 0) {
        pool_empty(world, BALLAST);
        pool_fill_but(world, BALLAST, mebibytes * (unsigned)(MEBIBYTE / PAGE));
    } else {
        struct stat status;

        filler_path(world, BALLAST, path, sizeof path);
        if (stat(path, &status) == 0
            && truncate(path, status.st_size > (off_t)(GROWTH * MEBIBYTE)
                                  ? status.st_size - (off_t)(GROWTH * MEBIBYTE)
                                  : 0))
            wrong(world, "cannot shrink %s: %d", path, errno);
    }
}

/*
 * On a full pool a store may take longer than there is time between two signals: a guest that has
 * come to nothing since the last one has to wait for the next, or it would only handle signals.
 */
static void signal_guests(struct world *world, unsigned reached[GUESTS], bool all)
{
    for (unsigned i = 0; i < GUESTS; i++) {
        unsigned now = atomic_load(&world->guest[i].reached);

        if (atomic_load(&world->hold_ticker) || (now == reached[i] && !all))
            continue;
        reached[i] = now;
        pthread_kill(world->guest[i].thread, SIGUSR1);
    }
}

/* Signals to the guests; and who waits for space shall find some in the end. */
static void *tick(void *opaque)
{
    struct world *world = opaque;
    uint64_t seed = world->first_seed ^ UINT64_C(0x165667b19e3779f9), seen = 0, idle_ms = 0;
    unsigned mebibytes = world->place->mebibytes, reached[GUESTS] = {0};
    /* Where DAX is, an emulator may be: it would do nothing but handle signals. */
    unsigned pace = world->place->is_given ? 10 : 1;

    for (unsigned round = 0; !atomic_load(&world->stop); round++) {
        uint64_t progress = atomic_load(&world->progress), ms = pace * (1 + below(&seed, 3));

        sleep_ms(ms);
        idle_ms = progress == seen ? idle_ms + ms : 0;
        seen = progress;
        if (idle_ms > STUCK_MS && mebibytes < MAX_POOL && round % 32 == 0)
            grow_pool(world, mebibytes += GROWTH);
        if (idle_ms > pace * HANG_MS)
            wrong(world, "nothing goes on");
        signal_guests(world, reached, round % IDLE_ROUNDS == 0);
    }
    return NULL;
}

void beside_start(struct world *world)
{
    sigset_t tick_signal;

    atomic_store(&world->hold_ticker, false);
    grow_pool(world, world->place->mebibytes);
    world->neighbour = fork();
    if (world->neighbour == 0)
        be_neighbour(world);
    sigemptyset(&tick_signal);
    sigaddset(&tick_signal, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &tick_signal, NULL);
    if (pthread_create(&world->caller, NULL, call, world)
        || pthread_create(&world->ticker, NULL, tick, world))
        wrong(world, "no thread");
    pthread_sigmask(SIG_UNBLOCK, &tick_signal, NULL);
}

void beside_stop(struct world *world)
{
    atomic_store(&world->stop, true);
    pthread_join(world->caller, NULL);
    pthread_join(world->ticker, NULL);
    if (world->neighbour > 0) {
        kill(world->neighbour, SIGKILL);
        waitpid(world->neighbour, NULL, 0);
        world->neighbour = 0;
    }
}
