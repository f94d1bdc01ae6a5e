/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores to a file with DAX, step by step, so that somebody can look at the counters of the file system between the steps.
 *
 *   dax_stores image FILE SLABS PREPARED   a new pcow image, mapped, with so many slabs prepared (0: none are waited for)
 *   dax_stores raw FILE SLABS              a file with blocks that were never written, mapped with MAP_SYNC
 *
 * Takes a line each from stdin and answers with one: "store FIRST COUNT VALUE" stores to every page of so many slabs, "wait" waits until
 * slabs are prepared and nothing goes on behind the stores, "snapshot NAME" freezes what is there.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "pcow.h"

#define PATIENCE 120.0                          /* seconds for the thread that prepares */

static struct pcow_error error;

struct side {
    pcow_image *image;                          /* NULL: raw */
    pcow_map *map;
    volatile uint8_t *memory;
    unsigned slabs, prepared;
};

static void __attribute__((noreturn, format(printf, 1, 2))) give_up(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void open_raw(struct side *side, const char *path)
{
    size_t size = side->slabs * PCOW_SLAB_SIZE;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    void *memory;

    if (fd < 0 || posix_fallocate(fd, 0, (off_t)size) || fsync(fd))
        give_up("%s: no file with %zu bytes", path, size);
    /* One page off, as clusters lie anywhere: no mapping of 2 MiB at a time. */
    memory = mmap(NULL, size + 2 * PCOW_SLAB_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        give_up("no room for a mapping");
    memory = (uint8_t *)memory + (-(uintptr_t)memory & (PCOW_SLAB_SIZE - 1)) + PCOW_PAGE_SIZE;
    memory = mmap(memory, size, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC | MAP_FIXED, fd, 0);
    if (memory == MAP_FAILED)
        give_up("%s: no mapping with MAP_SYNC", path);
    side->memory = memory;
    close(fd);
}

static void open_image(struct side *side, const char *path)
{
    struct pcow_create_options create = {.virtual_size = side->slabs * PCOW_SLAB_SIZE};
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL, .full_policy = PCOW_FULL_FAIL, .prepared_slabs = side->prepared};

    if (pcow_create(path, &create, &error) || pcow_open(path, PCOW_OPEN_WRITE, NULL, &side->image, &error)
        || pcow_map_create(side->image, &options, &side->map, &error))
        give_up("%s", error.message);
    side->memory = pcow_map_address(side->map);
}

/* Until the thread has nothing to do any more, by what it says and by what it did last. */
static void wait_idle(struct side *side)
{
    struct pcow_map_stats before, stats;
    double begun = now();

    if (!side->map)
        return;
    do {
        pcow_map_get_stats(side->map, &before);
        usleep(300000);
        pcow_map_get_stats(side->map, &stats);
        if (now() - begun > PATIENCE)
            give_up("%u slabs are prepared, not %u", stats.slabs_ready, side->prepared);
    } while (stats.slabs_ready < side->prepared || stats.slabs_queued > 0 || stats.slabs_prepared != before.slabs_prepared);
}

static void store(struct side *side, unsigned first, unsigned count, unsigned value)
{
    double begun = now();

    if (first > side->slabs || count > side->slabs - first)
        give_up("there are %u slabs", side->slabs);
    for (uint64_t offset = first * PCOW_SLAB_SIZE; offset < (first + count) * PCOW_SLAB_SIZE; offset += PCOW_PAGE_SIZE)
        side->memory[offset + offset / PCOW_PAGE_SIZE % PCOW_PAGE_SIZE] = (uint8_t)value;
    printf("stored %.3f s\n", now() - begun);
}

int main(int argc, char **argv)
{
    struct side side = {.slabs = argc > 3 ? (unsigned)atoi(argv[3]) : 0, .prepared = argc > 4 ? (unsigned)atoi(argv[4]) : 0};
    char line[256], name[64];
    unsigned first, count, value;

    if (side.slabs == 0 || (strcmp(argv[1], "raw") && strcmp(argv[1], "image")))
        give_up("usage: dax_stores image|raw FILE SLABS [PREPARED]");
    if (strcmp(argv[1], "raw") == 0)
        open_raw(&side, argv[2]);
    else
        open_image(&side, argv[2]);
    setlinebuf(stdout);
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "store %u %u %u", &first, &count, &value) == 3) {
            store(&side, first, count, value);
        } else if (strcmp(line, "wait\n") == 0) {
            wait_idle(&side);
            printf("idle\n");
        } else if (sscanf(line, "snapshot %63s", name) == 1 && side.image) {
            if (pcow_snapshot_create(side.image, name, &error))
                give_up("%s", error.message);
            printf("frozen\n");
        } else {
            give_up("no command: %s", line);
        }
    }
    if (side.map)
        pcow_map_destroy(side.map);
    pcow_close(side.image);
    return 0;
}
