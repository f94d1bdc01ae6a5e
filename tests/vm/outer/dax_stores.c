/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores to a file with DAX, step by step, so that somebody can look at the counters of the file
 * system between the steps.
 *
 *   dax_stores image FILE SLABS PREPARED   a new pcow image, mapped, with so many slabs prepared (0: none are waited for)
 *   dax_stores raw FILE SLABS              a file with blocks that were never written, mapped with MAP_SYNC
 *
 * Takes a line each from stdin and answers with one: "store FIRST COUNT VALUE" stores to every page
 * of so many slabs, "wait" waits until slabs are prepared and nothing goes on behind the stores,
 * "snapshot NAME" freezes what is there.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mapped_image.h"

static struct pcow_error error;

struct side {
    struct mapped_image mapped;                 /* without an image: raw */
    volatile uint8_t *memory;
    unsigned slabs;
};

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
    memory = mmap(memory, size, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC | MAP_FIXED,
                  fd, 0);
    if (memory == MAP_FAILED)
        give_up("%s: no mapping with MAP_SYNC", path);
    side->memory = memory;
    close(fd);
}

static void store(struct side *side, unsigned first, unsigned count, unsigned value)
{
    uint64_t begun = now();

    if (first > side->slabs || count > side->slabs - first)
        give_up("there are %u slabs", side->slabs);
    for (uint64_t offset = first * PCOW_SLAB_SIZE; offset < (first + count) * PCOW_SLAB_SIZE;
         offset += PCOW_PAGE_SIZE)
        side->memory[offset + offset / PCOW_PAGE_SIZE % PCOW_PAGE_SIZE] = (uint8_t)value;
    printf("stored %.3f s\n", (double)(now() - begun) / 1e9);
}

int main(int argc, char **argv)
{
    struct side side = {.slabs = argc > 3 ? (unsigned)atoi(argv[3]) : 0};
    char line[256], name[64];
    unsigned first, count, value;

    if (side.slabs == 0 || (strcmp(argv[1], "raw") && strcmp(argv[1], "image")))
        give_up("usage: dax_stores image|raw FILE SLABS [PREPARED]");
    if (strcmp(argv[1], "raw") == 0)
        open_raw(&side, argv[2]);
    else
        side.memory = mapped_image_make(&side.mapped, argv[2], side.slabs * PCOW_SLAB_SIZE,
                                        argc > 4 ? (unsigned)atoi(argv[4]) : 0);
    setlinebuf(stdout);
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "store %u %u %u", &first, &count, &value) == 3) {
            store(&side, first, count, value);
        } else if (strcmp(line, "wait\n") == 0) {
            mapped_image_wait_idle(&side.mapped);
            printf("idle\n");
        } else if (sscanf(line, "snapshot %63s", name) == 1 && side.mapped.image) {
            if (pcow_snapshot_create(side.mapped.image, name, &error))
                give_up("%s", error.message);
            printf("frozen\n");
        } else {
            give_up("no command: %s", line);
        }
    }
    if (side.mapped.map)
        pcow_map_destroy(side.mapped.map);
    pcow_close(side.mapped.image);
    return 0;
}
