/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshots of a file of persistent memory that is mapped and stored to: as a pcow image, and as a
 * raw file on a file system that can share blocks (FICLONE; the kernel copies on write). Prints
 * figures of one side, in nanoseconds, as a line of JSON.
 *
 *   snapshot_compare image FILE SLABS SNAPSHOTS     a new pcow image
 *   snapshot_compare clone FILE SLABS SNAPSHOTS     a raw file with MAP_SYNC; snapshots are FILE.1, FILE.2, ...
 *   snapshot_compare clone-async FILE SLABS SNAPSHOTS   the same without MAP_SYNC: stores are durable only after fsync()
 *
 * Everything is written once before. Then: a snapshot; the first store to every page after it, in
 * an order without runs, and the second one; as many snapshots as were asked for, with a few stores
 * between them. Every snapshot is durable before the next step.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "mapped_image.h"

#define PREPARED 16
#define STORES 8                                /* between two snapshots of many */

static struct pcow_error error;

struct side {
    struct mapped_image mapped;                 /* without an image: raw */
    const char *path;
    int fd;
    volatile uint8_t *memory;
    uint64_t pages;
    unsigned snapshots;
};

static void open_clone(struct side *side, int map_flags)
{
    size_t size = side->pages * PCOW_PAGE_SIZE;
    void *memory;

    side->fd = open(side->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (side->fd < 0 || posix_fallocate(side->fd, 0, (off_t)size) || fsync(side->fd))
        give_up("%s: no file with %zu bytes: %s", side->path, size, strerror(errno));
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | map_flags, side->fd, 0);
    if (memory == MAP_FAILED)
        give_up("%s cannot be mapped: %s", side->path, strerror(errno));
    side->memory = memory;
}

/* A bijection of the pages in which neighbours are far apart. */
static uint64_t page_of(const struct side *side, uint64_t number)
{
    return number * 1021 % side->pages;         /* pages is a power of two */
}

static void store(struct side *side, uint64_t page, unsigned value)
{
    side->memory[page * PCOW_PAGE_SIZE + page % PCOW_PAGE_SIZE] = (uint8_t)value;
}

static int compare_times(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* One store to each page; mean and median of them. */
static void store_all(struct side *side, unsigned value, const char *what)
{
    uint64_t *times = calloc(side->pages, sizeof *times), sum = 0;

    if (!times)
        give_up("out of memory");
    for (uint64_t i = 0; i < side->pages; i++) {
        uint64_t begun = now();

        store(side, page_of(side, i), value);
        times[i] = now() - begun;
        sum += times[i];
    }
    qsort(times, side->pages, sizeof *times, compare_times);
    printf("\"%s mean\": %llu, \"%s median\": %llu, ", what,
           (unsigned long long)(sum / side->pages), what,
           (unsigned long long)times[side->pages / 2]);
    free(times);
}

static void snapshot(struct side *side)
{
    char name[4096];
    int fd;

    side->snapshots++;
    if (side->mapped.image) {
        snprintf(name, sizeof name, "s%u", side->snapshots);
        if (pcow_snapshot_create(side->mapped.image, name, &error))
            give_up("%s", error.message);
        return;
    }
    snprintf(name, sizeof name, "%s.%u", side->path, side->snapshots);
    fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || ioctl(fd, FICLONE, side->fd) || fsync(fd))
        give_up("%s: no clone: %s", name, strerror(errno));
    close(fd);
}

/* Time of one snapshot of count, the stores before each not included. */
static uint64_t snapshots(struct side *side, unsigned count)
{
    uint64_t spent = 0;

    for (unsigned i = 0; i < count; i++) {
        uint64_t begun;

        for (unsigned k = 0; k < STORES; k++)
            store(side, page_of(side, (uint64_t)side->snapshots * STORES + k), side->snapshots);
        begun = now();
        snapshot(side);
        spent += now() - begun;
    }
    return spent / count;
}

int main(int argc, char **argv)
{
    unsigned slabs = argc == 5 ? (unsigned)atoi(argv[3]) : 0,
             count = argc == 5 ? (unsigned)atoi(argv[4]) : 0;
    struct side side = {.fd = -1, .pages = slabs * (PCOW_SLAB_SIZE / PCOW_PAGE_SIZE)};
    uint64_t begun, first, middle, last;

    if (slabs == 0 || slabs & (slabs - 1) || count < 30)
        give_up("usage: snapshot_compare image|clone|clone-async FILE SLABS SNAPSHOTS (SLABS a "
                "power of two, 30 SNAPSHOTS or more)");
    side.path = argv[2];
    if (strcmp(argv[1], "image") == 0)
        side.memory =
            mapped_image_make(&side.mapped, side.path, side.pages * PCOW_PAGE_SIZE, PREPARED);
    else
        open_clone(&side, strcmp(argv[1], "clone") == 0 ? MAP_SYNC : 0);
    mapped_image_wait_idle(&side.mapped);
    printf("{");
    store_all(&side, 1, "first touch");
    mapped_image_wait_idle(&side.mapped);
    if (side.fd >= 0 && fsync(side.fd))
        give_up("fsync: %s", strerror(errno));
    begun = now();
    snapshot(&side);
    printf("\"snapshot\": %llu, ", (unsigned long long)(now() - begun));
    mapped_image_wait_idle(&side.mapped);
    store_all(&side, 2, "first store after");
    store_all(&side, 3, "second store after");
    mapped_image_wait_idle(&side.mapped);
    begun = now();
    first = snapshots(&side, 10);
    middle = snapshots(&side, count - 20);
    last = snapshots(&side, 10);
    printf("\"many\": %llu, \"of many, first ten\": %llu, \"of many, last ten\": %llu, ",
           (unsigned long long)(now() - begun), (unsigned long long)first,
           (unsigned long long)last);
    printf("\"of many\": %llu, ",
           (unsigned long long)((first * 10 + middle * (count - 20) + last * 10) / count));
    mapped_image_wait_idle(&side.mapped);
    store_all(&side, 4, "first store after many");
    printf("\"snapshots\": %u}\n", side.snapshots);
    if (side.mapped.map)
        pcow_map_destroy(side.mapped.map);
    pcow_close(side.mapped.image);
    return 0;
}
