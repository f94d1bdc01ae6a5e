/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Disk I/O to and from the memory without a copy in the guest's kernel: the device model, or the
 * host's kernel for it, reads and writes the image. /dev/vda has known content, /dev/vdb takes what
 * is written.
 */
#define _GNU_SOURCE
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <linux/fs.h>
#include <unistd.h>

#define SECTOR 512ul
#define LONGEST (64 * SECTOR)

struct job {
    uint64_t seed;
    unsigned count;
    int source, target;
    size_t source_size, target_size;
};

static bool told(FILE *out, const char *what, size_t offset, size_t length, ssize_t result)
{
    fprintf(out, "transfers: %s at image offset %#zx, %zu bytes: %s\n", what, DATA_OFFSET + offset,
            length, result < 0 ? strerror(errno) : "short");
    return false;
}

/* From the disk into two places of the memory with one request. */
static bool read_into(struct memory *memory, const struct job *job, size_t at, size_t length,
                      size_t from, FILE *out)
{
    size_t half = length / 2 / SECTOR * SECTOR;
    struct iovec vectors[2] = {
        { memory->data + at + length - half, half },            /* the second half first */
        { memory->data + at, length - half },
    };
    ssize_t done = preadv(job->source, half ? vectors : vectors + 1, half ? 2 : 1, (off_t)from);

    if (done != (ssize_t)length) {
        return told(out, "read from the disk into it", at, length, done);
    }
    layout_disk(memory->model + at + length - half, from, half);
    layout_disk(memory->model + at, from + half, length - half);
    return true;
}

static bool write_out(struct memory *memory, const struct job *job, size_t at, size_t length,
                      size_t to, uint8_t *buffer, FILE *out)
{
    ssize_t done = pwrite(job->target, memory->data + at, length, (off_t)to);

    if (done != (ssize_t)length) {
        return told(out, "write from it to the disk", at, length, done);
    }
    done = pread(job->target, buffer, length, (off_t)to);
    if (done != (ssize_t)length) {
        return told(out, "read back what was written", at, length, done);
    }
    if (memcmp(buffer, memory->model + at, length) != 0) {
        fprintf(out, "transfers: what the disk got from image offset %#zx, %zu bytes, is wrong\n",
                DATA_OFFSET + at, length);
        return false;
    }
    return true;
}

static bool transfer(struct memory *memory, unsigned index, void *opaque, FILE *out)
{
    const struct job *job = opaque;
    size_t share = memory->transfers.length / memory->threads / SECTOR * SECTOR;
    size_t begin = memory->transfers.begin + index * share;
    uint8_t *buffer = aligned_alloc(PAGE, LONGEST);
    bool ok = buffer != NULL;

    for (unsigned i = 0; ok && i < job->count; i++) {
        uint64_t random = mix(job->seed + mix(index * 1000003ul + i));
        size_t length = (1 + random % (LONGEST / SECTOR)) * SECTOR;
        size_t at = begin + mix(random) % ((share - length) / SECTOR) * SECTOR;
        size_t from = mix(random + 1) % ((job->source_size - length) / SECTOR) * SECTOR;
        size_t to = DATA_OFFSET + index * LONGEST;

        ok = random & 1ul << 40 ? read_into(memory, job, at, length, from, out)
                                : write_out(memory, job, at, length, to, buffer, out);
        ok = ok && compare(memory, at, length, "transfers", out);
    }
    free(buffer);
    return ok;
}

static int open_disk(const char *path, int flags, size_t *size, FILE *out)
{
    uint64_t bytes;
    int fd = open(path, flags | O_CLOEXEC);

    if (fd < 0 || ioctl(fd, BLKGETSIZE64, &bytes) < 0) {
        fprintf(out, "%s: %s\n", path, strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    *size = bytes;
    return fd;
}

bool transfers_run(struct memory *memory, uint64_t seed, unsigned count, FILE *out)
{
    struct job job = { .seed = seed, .count = count };
    bool ok = false;

    job.source = open_disk("/dev/vda", O_RDONLY | O_DIRECT, &job.source_size, out);
    job.target = open_disk("/dev/vdb", O_RDWR | O_DIRECT, &job.target_size, out);
    if (job.source >= 0 && job.target >= 0) {
        ok = run_threads(memory, transfer, &job, out)
             && compare(memory, memory->transfers.begin, memory->transfers.length,
                        "transfers, all of it afterwards", out);
    }
    if (job.source >= 0) {
        close(job.source);
    }
    if (job.target >= 0) {
        close(job.target);
    }
    return ok;
}

/* The model to a disk, so that somebody outside can compare it with the image. */
bool transfers_save(const struct memory *memory, const char *disk, FILE *out)
{
    size_t size, done = 0;
    int fd = open_disk(disk, O_RDWR, &size, out);

    if (fd < 0) {
        return false;
    }
    while (done < memory->size) {
        ssize_t written = pwrite(fd, memory->model + done,
                                 memory->size - done < SLAB ? memory->size - done : SLAB,
                                 (off_t)(DATA_OFFSET + done));

        if (written <= 0) {
            fprintf(out, "%s: %s\n", disk, written ? strerror(errno) : "full");
            close(fd);
            return false;
        }
        done += (size_t)written;
    }
    if (fsync(fd) < 0 || close(fd) < 0) {
        fprintf(out, "%s: %s\n", disk, strerror(errno));
        return false;
    }
    return true;
}
