/* SPDX-License-Identifier: BSD-3-Clause */
/* A raw image to write: a regular file, kept sparse, or a block device. */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "format/in_use.h"
#include "format/raw.h"
#include "format/target.h"
#include "report.h"

struct raw_target {
    struct target target;
    int fd;
};

static int write_raw(struct target *target, uint64_t offset, const void *buffer, size_t length,
                     struct pcow_error *error)
{
    struct raw_target *raw = (struct raw_target *)target;
    const char *next = buffer;

    while (length) {
        ssize_t n = pwrite(raw->fd, next, length, (off_t)offset);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            int code = n ? errno : ENOSPC;

            return fail(error, -code, "%s: cannot write at offset %llu: %s", target->path,
                        (unsigned long long)offset, strerror(code));
        }
        next += n;
        offset += (uint64_t)n;
        length -= (size_t)n;
    }
    return 0;
}

static int zero_raw(struct target *target, uint64_t offset, uint64_t length,
                    struct pcow_error *error)
{
    static const char zeros[65536];
    struct raw_target *raw = (struct raw_target *)target;
    uint64_t range[2] = {offset, length};

    if (!fallocate(raw->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                   (off_t)length)
        || !ioctl(raw->fd, BLKZEROOUT, range)) {
        return 0;
    }
    while (length) {
        size_t n = length < sizeof(zeros) ? (size_t)length : sizeof(zeros);
        int r = write_raw(target, offset, zeros, n, error);

        if (r) {
            return r;
        }
        offset += n;
        length -= n;
    }
    return 0;
}

static int finish_raw(struct target *target, struct pcow_error *error)
{
    struct raw_target *raw = (struct raw_target *)target;

    return fsync(raw->fd)
               ? fail(error, -errno, "%s: cannot flush it: %s", target->path, strerror(errno))
               : 0;
}

static void close_raw(struct target *target)
{
    struct raw_target *raw = (struct raw_target *)target;

    if (raw->fd >= 0) {
        close(raw->fd);
    }
    free(raw);
}

static int open_file(struct raw_target *raw, const struct target_options *options,
                     struct pcow_error *error)
{
    int flags = O_RDWR | O_CLOEXEC | O_NONBLOCK | (options->existing ? 0 : O_CREAT | O_EXCL);

    /* what a guest has in memory is nobody else's to read */
    raw->fd = open(options->path, flags, 0640);
    if (raw->fd < 0) {
        return fail(error, -errno, "%s: cannot open it for writing: %s", options->shown_path,
                    strerror(errno));
    }
    if (options->existing) {
        int r = check_not_in_use(raw->fd, options->shown_path, error);

        return r ? r : raw_size(raw->fd, options->shown_path, &raw->target.size, error);
    }
    if (ftruncate(raw->fd, (off_t)options->size)) {
        return fail(error, -errno, "%s: cannot make it %llu bytes long: %s", options->shown_path,
                    (unsigned long long)options->size, strerror(errno));
    }
    raw->target.size = options->size;
    return 0;
}

int raw_target_open(const struct target_options *options, struct target **target,
                    struct pcow_error *error)
{
    static const struct target_operations operations = {write_raw, zero_raw, finish_raw, close_raw};
    struct raw_target *raw = calloc(1, sizeof(*raw));
    int r;

    if (!raw) {
        return fail(error, -ENOMEM, "out of memory");
    }
    r = open_file(raw, options, error);
    if (r) {
        close_raw(&raw->target);
        return r;
    }
    raw->target.operations = &operations;
    *target = &raw->target;
    return 0;
}
