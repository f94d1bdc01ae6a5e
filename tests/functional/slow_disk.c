// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: a disk whose file is named *.slow takes its time to read. And fdatasync() of a pcow
 * image takes as long as its dirty pages would on a slow disk, also in the main thread.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define READ_NS 1500000000L
#define PAGE_NS 60000L                 /* 1 s for 64 MiB */
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

struct range { uint64_t offset, length; };
struct pages { uint64_t cached, dirty, writeback, evicted, recently_evicted; };

static int has_suffix(int fd, const char *suffix)
{
    char link[64], path[4096];
    ssize_t length;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof(path));
    return length > (ssize_t)strlen(suffix)
           && !memcmp(path + length - strlen(suffix), suffix, strlen(suffix));
}

static void wait_ns(uint64_t ns)
{
    struct timespec left = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};

    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

static void be_slow(int fd)
{
    if (has_suffix(fd, ".slow"))
        wait_ns(READ_NS);
}

ssize_t pread64(int fd, void *buffer, size_t length, off64_t offset)
{
    be_slow(fd);
    return syscall(SYS_pread64, fd, buffer, length, offset);
}

ssize_t preadv64(int fd, const struct iovec *iov, int count, off64_t offset)
{
    be_slow(fd);
    return syscall(SYS_preadv, fd, iov, (long)count, offset, 0L);
}

int fdatasync(int fd)
{
    struct range all = {0, 0};
    struct pages pages;

    if (has_suffix(fd, ".pcow") && syscall(SYS_cachestat, fd, &all, &pages, 0) == 0)
        wait_ns(pages.dirty * PAGE_NS);
    return (int)syscall(SYS_fdatasync, fd);
}
