/* SPDX-License-Identifier: BSD-3-Clause */
#include "sides.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "report.h"

#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))
#define PREPARE_TRIES 100u                     /* without a change: there is not going to be more */
#define PREPARE_WAIT_US 1000u

uint64_t random_next(uint64_t *seed)           /* xorshift64 */
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

void shuffle(uint64_t *values, size_t count, uint64_t *seed)
{
    for (size_t i = count; i > 1; i--) {
        size_t j = random_next(seed) % i;
        uint64_t swap = values[i - 1];

        values[i - 1] = values[j];
        values[j] = swap;
    }
}

uint64_t *slab_buffer(void)
{
    return aligned_alloc(PCOW_PAGE_SIZE, PCOW_SLAB_SIZE);
}

void fill_slab(uint64_t *buffer, uint64_t first_page)
{
    for (size_t i = 0; i < PCOW_SLAB_SIZE / sizeof(*buffer); i++) {
        buffer[i] = page_pattern(first_page + i / WORDS_PER_PAGE);
    }
}

static int write_fully(int fd, const void *data, size_t length)
{
    const char *at = data;

    while (length > 0) {
        ssize_t put = write(fd, at, length);

        if (put < 0 && errno != EINTR) {
            return -errno;
        }
        at += put > 0 ? put : 0;
        length -= put > 0 ? (size_t)put : 0;
    }
    return 0;
}

int raw_create(const struct bench *bench, const char *name, uint64_t size, struct pcow_error *error)
{
    char path[4096];
    uint64_t *buffer = slab_buffer();
    int fd = open(bench_path(bench, name, path), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int r = fd < 0 ? -errno : buffer ? 0 : -ENOMEM;

    /* Blocks in one piece where the file system can give them, before they are written. */
    if (!r && fallocate(fd, 0, 0, (off_t)size)) {
        r = -errno;
    }
    for (uint64_t offset = 0; offset < size && !r; offset += PCOW_SLAB_SIZE) {
        fill_slab(buffer, offset / PCOW_PAGE_SIZE);
        r = write_fully(fd, buffer, PCOW_SLAB_SIZE);
    }
    if (fd >= 0) {
        if (!r && bench->persistence != PCOW_PERSISTENCE_VOLATILE && fsync(fd)) {
            r = -errno;
        }
        close(fd);
    }
    free(buffer);
    return r ? fail(error, r, "cannot make %s: %s", path, strerror(-r)) : 0;
}

uint8_t *reserve_aligned(uint64_t size, void **reservation)
{
    void *memory = mmap(NULL, size + PCOW_SLAB_SIZE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    *reservation = memory == MAP_FAILED ? NULL : memory;
    return *reservation ? (uint8_t *)(((uintptr_t)memory + PCOW_SLAB_SIZE - 1)
                                      & ~(uintptr_t)(PCOW_SLAB_SIZE - 1))
                        : NULL;
}

void release_aligned(void *reservation, uint64_t size)
{
    if (reservation) {
        munmap(reservation, size + PCOW_SLAB_SIZE);
    }
}

int raw_map(const struct bench *bench, const char *name, struct raw *raw, struct pcow_error *error)
{
    int flags = MAP_FIXED
                | (bench->persistence == PCOW_PERSISTENCE_PMEM ? MAP_SHARED_VALIDATE | MAP_SYNC
                                                               : MAP_SHARED);
    char path[4096];
    off_t size;

    *raw = (struct raw){.fd = open(bench_path(bench, name, path), O_RDWR | O_CLOEXEC)};
    size = raw->fd < 0 ? -1 : lseek(raw->fd, 0, SEEK_END);
    if (size >= 0) {
        raw->size = (uint64_t)size;
        raw->memory = reserve_aligned(raw->size, &raw->reservation);
    }
    if (!raw->memory
        || mmap(raw->memory, raw->size, PROT_READ | PROT_WRITE, flags, raw->fd, 0) == MAP_FAILED) {
        int r = fail(error, -errno, "cannot map %s: %s", path, strerror(errno));

        raw_unmap(raw);
        return r;
    }
    return 0;
}

void raw_restore(struct raw *raw)
{
    for (uint64_t page = 0; page < raw->size / PCOW_PAGE_SIZE; page++) {
        uint64_t *words = (uint64_t *)(raw->memory + page * PCOW_PAGE_SIZE);

        if (words[MARK_WORD] != page_pattern(page)) {
            words[MARK_WORD] = page_pattern(page);
        }
    }
}

void raw_unmap(struct raw *raw)
{
    release_aligned(raw->reservation, raw->size);
    if (raw->fd >= 0) {
        close(raw->fd);
    }
    *raw = (struct raw){.fd = -1};
}

int side_create_base(const struct bench *bench, const char *name, uint64_t size,
                     struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = size, .no_mirror = bench->no_mirror};
    uint64_t *buffer = slab_buffer();
    pcow_image *image = NULL;
    char path[4096];
    int r = buffer ? 0 : fail(error, -ENOMEM, "out of memory");

    bench_path(bench, name, path);
    r = r ? r : pcow_create(path, &options, error);
    r = r ? r : pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, error);
    for (uint64_t offset = 0; offset < size && !r; offset += PCOW_SLAB_SIZE) {
        fill_slab(buffer, offset / PCOW_PAGE_SIZE);
        r = pcow_write(image, offset, buffer, PCOW_SLAB_SIZE, error);
    }
    r = r ? r : pcow_flush(image, error);
    r = r ? r : pcow_seal(image, error);
    pcow_close(image);
    free(buffer);
    return r;
}

int side_open(const struct bench *bench, struct side *side, const char *base, uint64_t size,
              uint64_t cluster_size, enum pcow_engine engine, struct pcow_error *error)
{
    return side_open_prepared(bench, side, base, size, cluster_size, engine, 0, error);
}

int side_open_prepared(const struct bench *bench, struct side *side, const char *base,
                       uint64_t size, uint64_t cluster_size, enum pcow_engine engine,
                       unsigned prepared_slabs, struct pcow_error *error)
{
    char path[4096], base_path[4096];
    struct pcow_create_options create = {.virtual_size = size, .cluster_size = cluster_size,
                                         .no_mirror = bench->no_mirror,
                                         .base = base ? bench_path(bench, base, base_path) : NULL};
    /* Waiting would be for ever: what fills the pool is not going to be undone by us. */
    struct pcow_map_options options = {
        .engine = engine, .full_policy = PCOW_FULL_FAIL, .prepared_slabs = prepared_slabs};
    int r;

    *side = (struct side){.size = size, .name = TOP_IMAGE};
    r = pcow_create(bench_path(bench, side->name, path), &create, error);
    r = r ? r : pcow_open(path, PCOW_OPEN_WRITE, NULL, &side->image, error);
    r = r ? r : pcow_map_create(side->image, &options, &side->map, error);
    if (r) {
        side_close(bench, side);
        return r;
    }
    side->memory = pcow_map_address(side->map);
    side_settle(side, prepared_slabs);
    return 0;
}

void side_settle(const struct side *side, unsigned prepared_slabs)
{
    struct pcow_map_stats stats = {.slabs_queued = 1}, before = {0};

    for (unsigned tries = 0;
         tries < PREPARE_TRIES && (stats.slabs_ready < prepared_slabs || stats.slabs_queued > 0);
         tries++) {
        usleep(PREPARE_WAIT_US);
        before = stats;
        pcow_map_get_stats(side->map, &stats);
        tries = stats.slabs_ready == before.slabs_ready && stats.slabs_queued == before.slabs_queued
                    ? tries
                    : 0;
    }
}

void side_close(const struct bench *bench, struct side *side)
{
    pcow_map_destroy(side->map);
    pcow_close(side->image);
    if (side->name) {
        bench_remove(bench, side->name);
    }
    *side = (struct side){0};
}

const char *engine_name(enum pcow_engine engine)
{
    return engine == PCOW_ENGINE_MINOR ? "minor" : "signal";
}
