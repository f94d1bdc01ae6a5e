/* SPDX-License-Identifier: BSD-3-Clause */
/* A raw image: a regular file, whose holes are zeros, or a block device. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/raw.h"
#include "format/source.h"
#include "format/source_file.h"
#include "report.h"

struct raw_source {
    struct source source;
    int fd;
};

int raw_size(int fd, const char *path, uint64_t *size, struct pcow_error *error)
{
    struct stat status;
    off_t end;

    if (fstat(fd, &status)) {
        return fail(error, -errno, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
        return fail(error, -EINVAL, "%s is neither a regular file nor a block device", path);
    }
    end = lseek(fd, 0, SEEK_END);
    if (end < 0) {
        return fail(error, -errno, "%s: cannot find its size: %s", path, strerror(errno));
    }
    *size = (uint64_t)end;
    return 0;
}

static int raw_read(struct source *source, uint64_t offset, void *buffer, size_t length,
                    struct pcow_error *error)
{
    struct raw_source *raw = (struct raw_source *)source;
    char *next = buffer;

    while (length) {
        ssize_t n = pread(raw->fd, next, length, (off_t)offset);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return fail(error, n ? -errno : -EIO, "%s: cannot read at offset %llu: %s",
                        source->path, (unsigned long long)offset,
                        n ? strerror(errno) : "the file became shorter");
        }
        next += n;
        offset += (uint64_t)n;
        length -= (size_t)n;
    }
    return 0;
}

static int raw_get_extent(struct source *source, uint64_t offset, uint64_t length,
                          struct source_extent *extent, struct pcow_error *error)
{
    struct raw_source *raw = (struct raw_source *)source;
    off_t data = lseek(raw->fd, (off_t)offset, SEEK_DATA), end;

    (void)error;
    extent->zero = false;
    extent->length = length;
    if (data < 0) {
        /* a hole up to the end; else the file system knows no holes */
        extent->zero = errno == ENXIO;
    } else if ((uint64_t)data > offset) {
        extent->zero = true;
        extent->length = (uint64_t)data - offset;
    } else {
        end = lseek(raw->fd, (off_t)offset, SEEK_HOLE);
        if (end > (off_t)offset) {
            extent->length = (uint64_t)end - offset;
        }
    }
    return 0;
}

static void raw_close(struct source *source)
{
    struct raw_source *raw = (struct raw_source *)source;

    close(raw->fd);
    free(raw);
}

int raw_source_open(const struct source_options *options, struct source **source,
                    struct pcow_error *error)
{
    static const struct source_operations operations = {raw_read, raw_get_extent, raw_close};
    struct raw_source *raw;
    int r;

    if (options->snapshot) {
        return fail(error, -EINVAL, "%s: a raw image has no snapshots", options->path);
    }
    raw = calloc(1, sizeof(*raw));
    if (!raw) {
        return fail(error, -ENOMEM, "out of memory");
    }
    raw->source.operations = &operations;
    raw->fd = source_file_open(options->path, error);
    if (raw->fd < 0) {
        r = raw->fd;
        free(raw);
        return r;
    }
    r = raw_size(raw->fd, options->path, &raw->source.size, error);
    if (r) {
        raw_close(&raw->source);
        return r;
    }
    *source = &raw->source;
    return 0;
}
