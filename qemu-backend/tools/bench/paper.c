/* SPDX-License-Identifier: BSD-3-Clause */
#include "paper.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "paper_state.h"
#include "report.h"
#include "sample.h"
#include "sides.h"

#define PAPER_FILE "paper"
#define META_HEADER 64u                        /* cluster_counter and padding (table II) */
#define ENTRY_SIZE 8u                          /* cow_bitmap, data_cluster_num */
/* offset of cur_segment_num in the super cluster (table I) */
#define SEGMENT_NUMBER 8u
/* super, meta and snapshot clusters of a preallocated file */
#define SLACK_CLUSTERS 64u

void *paper_map_file(const struct paper *paper, void *address, uint64_t length, uint64_t offset,
                     bool write)
{
    int flags = (address ? MAP_FIXED : 0)
                | (paper->bench->persistence == PCOW_PERSISTENCE_PMEM && write
                       ? MAP_SHARED_VALIDATE | MAP_SYNC
                       : MAP_SHARED);

    return mmap(address, length, PROT_READ | (write ? PROT_WRITE : 0), flags, paper->fd,
                (off_t)offset);
}

static int allocate(struct paper *paper, uint64_t *offset)
{
    if (!paper->options.preallocated
        && fallocate(paper->fd, 0, (off_t)paper->end, (off_t)paper->options.cluster_size)) {
        return -errno;
    }
    *offset = paper->end;
    paper->end += paper->options.cluster_size;
    return 0;
}

static void store32(struct paper *paper, void *where, uint32_t value)
{
    __atomic_store_n((uint32_t *)where, value, __ATOMIC_RELEASE);
    bench_persist(paper->bench, where, sizeof(value));
}

static int new_segment(struct paper *paper)
{
    uint64_t offset;
    int r = paper->segment_count == MAX_SEGMENTS ? -EFBIG : allocate(paper, &offset);
    void *meta;

    if (r) {
        return r;
    }
    meta = paper_map_file(paper, NULL, paper->options.cluster_size, offset, true);
    if (meta == MAP_FAILED) {
        return -errno;
    }
    paper->segment[paper->segment_count++] = meta;
    paper->counter = 0;
    store32(paper, meta, 0);
    store32(paper, paper->super + SEGMENT_NUMBER, paper->segment_count);
    return 0;
}

static int new_cluster_locked(struct paper *paper, uint64_t cluster, uint64_t *offset)
{
    uint64_t *entry;
    int r = 0;

    if (paper->segment_count == 0
        || paper->counter >= (paper->options.cluster_size - META_HEADER) / ENTRY_SIZE) {
        r = new_segment(paper);
    }
    r = r ? r : allocate(paper, offset);
    if (r) {
        return r;
    }
    entry = (uint64_t *)(paper->segment[paper->segment_count - 1] + META_HEADER) + paper->counter;
    __atomic_store_n(entry, cluster, __ATOMIC_RELEASE);
    bench_persist(paper->bench, entry, sizeof(*entry));
    store32(paper, paper->segment[paper->segment_count - 1], ++paper->counter);
    paper->entry[cluster] = entry;
    paper->offset[cluster] = *offset;
    return 0;
}

int paper_new_cluster(struct paper *paper, uint64_t cluster, uint64_t *offset)
{
    int r;

    while (__atomic_exchange_n(&paper->allocating, true, __ATOMIC_ACQUIRE)) {
        __builtin_ia32_pause();
    }
    r = new_cluster_locked(paper, cluster, offset);
    __atomic_store_n(&paper->allocating, false, __ATOMIC_RELEASE);
    return r;
}

void paper_store_bitmap(struct paper *paper, uint64_t cluster, uint32_t bitmap)
{
    uint64_t *entry = paper->entry[cluster];

    paper->bitmap[cluster] = bitmap;
    __atomic_store_n(entry, cluster | (uint64_t)bitmap << 32, __ATOMIC_RELEASE);
    bench_persist(paper->bench, entry, sizeof(*entry));
}

static int map_start(struct paper *paper)
{
    const struct paper_options *options = &paper->options;
    uint64_t offset;
    int r = 0;

    if (options->preallocated
        && fallocate(paper->fd, 0, 0,
                     (off_t)(options->size + SLACK_CLUSTERS * options->cluster_size))) {
        return -errno;
    }
    r = allocate(paper, &offset);
    if (r) {
        return r;
    }
    paper->super = paper_map_file(paper, NULL, options->cluster_size, offset, true);
    if (paper->super == MAP_FAILED) {
        paper->super = NULL;
        return -errno;
    }
    if (options->base) {
        /*
         * The base is linear, so it costs one mapping; the paper's own tool would need one for each
         * cluster.
         */
        return mmap(paper->memory, options->size, PROT_READ, MAP_SHARED | MAP_FIXED, paper->base_fd,
                    0) == MAP_FAILED
                   ? -errno
                   : 0;
    }
    return mmap(paper->memory, options->size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                0) == MAP_FAILED
               ? -errno
               : 0;
}

int paper_open(const struct bench *bench, const struct paper_options *options,
               struct paper **result, struct pcow_error *error)
{
    char path[4096], base[4096];
    struct paper *paper = calloc(1, sizeof(*paper));
    int r = 0;

    *result = NULL;
    if (!paper) {
        return fail(error, -ENOMEM, "out of memory");
    }
    *paper = (struct paper){.bench = bench,
                            .options = *options,
                            .clusters = options->size / options->cluster_size,
                            .fd = -1,
                            .base_fd = -1,
                            .uffd = -1};
    paper->offset = calloc(paper->clusters, sizeof(*paper->offset));
    paper->frozen = calloc(paper->clusters, sizeof(*paper->frozen));
    paper->entry = calloc(paper->clusters, sizeof(uint64_t *));
    paper->bitmap = calloc(paper->clusters, sizeof(*paper->bitmap));
    paper->claim = calloc(paper->clusters, 1);
    paper->memory = reserve_aligned(options->size, &paper->reservation);
    if (!paper->offset || !paper->frozen || !paper->entry || !paper->bitmap || !paper->claim
        || !paper->memory) {
        r = -ENOMEM;
    }
    if (!r) {
        paper->fd =
            open(bench_path(bench, PAPER_FILE, path), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        paper->base_fd =
            options->base ? open(bench_path(bench, options->base, base), O_RDONLY | O_CLOEXEC) : -1;
        r = paper->fd < 0 || (options->base && paper->base_fd < 0) ? -errno : map_start(paper);
    }
    if (r) {
        fail(error, r, "cannot set up the paper's method: %s", strerror(-r));
    } else {
        r = paper_start_handlers(paper, error);
    }
    if (r) {
        paper_close(paper);
        return r;
    }
    *result = paper;
    return 0;
}

uint8_t *paper_memory(const struct paper *paper)
{
    return paper->memory;
}

int paper_check(const struct paper *paper, struct pcow_error *error)
{
    int r = __atomic_load_n(&paper->failure, __ATOMIC_ACQUIRE);

    return r ? fail(error, r, "the paper's method failed in a handler: %s", strerror(-r)) : 0;
}

int paper_snapshot(struct paper *paper, struct pcow_error *error)
{
    uint64_t offset;
    int r = allocate(paper, &offset);
    uint8_t *header = r ? MAP_FAILED : paper_map_file(paper, NULL, PCOW_PAGE_SIZE, offset, true);

    if (header == MAP_FAILED) {
        return fail(error, r ? r : -errno, "the paper's method cannot append a snapshot");
    }
    memcpy(header, paper->super, META_HEADER);
    bench_persist(paper->bench, header, META_HEADER);
    munmap(header, PCOW_PAGE_SIZE);
    if (mprotect(paper->memory, paper->options.size, PROT_READ)) {
        return fail(error, -errno, "the paper's method cannot protect its memory: %s",
                    strerror(errno));
    }
    memcpy(paper->frozen, paper->offset, paper->clusters * sizeof(*paper->offset));
    memset(paper->offset, 0, paper->clusters * sizeof(*paper->offset));
    memset(paper->bitmap, 0, paper->clusters * sizeof(*paper->bitmap));
    paper->frozen_end = paper->end;
    /* The snapshot begins a segment of its own (figure 4). */
    return new_segment(paper);
}

int paper_revert(struct paper *paper, struct pcow_error *error)
{
    /* What is behind the end of file must not be mapped. */
    if (mmap(paper->memory, paper->options.size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
            == MAP_FAILED
        || ftruncate(paper->fd, (off_t)paper->frozen_end)) {
        return fail(error, -errno, "the paper's method cannot revert: %s", strerror(errno));
    }
    paper->end = paper->frozen_end;
    for (uint64_t cluster = 0; cluster < paper->clusters; cluster++) {
        if (paper->frozen[cluster]
            && paper_map_file(paper, paper->memory + cluster * paper->options.cluster_size,
                              paper->options.cluster_size, paper->frozen[cluster], false)
                   == MAP_FAILED) {
            return fail(error, -errno, "the paper's method cannot map a cluster: %s",
                        strerror(errno));
        }
    }
    memset(paper->offset, 0, paper->clusters * sizeof(*paper->offset));
    memset(paper->bitmap, 0, paper->clusters * sizeof(*paper->bitmap));
    return new_segment(paper);
}

uint64_t paper_map_clusters(uint8_t *memory, int fd, const uint64_t *order, uint64_t count,
                            uint64_t cluster_size, uint64_t *elapsed_ns)
{
    uint64_t done = 0, start = now_ns();

    while (done < count
           && mmap(memory + order[done] * cluster_size, cluster_size, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_FIXED, fd, (off_t)(done * cluster_size))
                  != MAP_FAILED) {
        done++;
    }
    *elapsed_ns = now_ns() - start;
    return done;
}

void paper_close(struct paper *paper)
{
    if (!paper) {
        return;
    }
    paper_stop_handlers(paper);
    for (uint32_t i = 0; i < paper->segment_count; i++) {
        munmap(paper->segment[i], paper->options.cluster_size);
    }
    if (paper->super) {
        munmap(paper->super, paper->options.cluster_size);
    }
    release_aligned(paper->reservation, paper->options.size);
    if (paper->fd >= 0) {
        close(paper->fd);
        bench_remove(paper->bench, PAPER_FILE);
    }
    if (paper->base_fd >= 0) {
        close(paper->base_fd);
    }
    free(paper->offset);
    free(paper->frozen);
    free(paper->entry);
    free(paper->bitmap);
    free(paper->claim);
    free(paper);
}
