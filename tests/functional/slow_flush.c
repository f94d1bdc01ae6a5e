// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: a disk that is slow to flush pcow images, for every thread but the main one (that
 * too with $SLOW_MAIN), and tells of it by the file $SLOW_FLUSH; and an end of the process that
 * takes longer still, so that whoever is left behind in a flush goes on with it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SECONDS 2

static void be_slow(void)
{
    if (gettid() == getpid() && !getenv("SLOW_MAIN"))
        return;
    close(open(getenv("SLOW_FLUSH"), O_CREAT | O_WRONLY, 0600));
    sleep(SECONDS);
}

int fdatasync(int fd)
{
    static const char suffix[] = ".pcow";
    char link[64], path[4096];
    ssize_t length;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof(path));
    if (length > (ssize_t)strlen(suffix)
        && !memcmp(path + length - strlen(suffix), suffix, strlen(suffix)))
        be_slow();
    return (int)syscall(SYS_fdatasync, fd);
}

int msync(void *address, size_t length, int flags)
{
    be_slow();
    return (int)syscall(SYS_msync, address, length, flags);
}

static void __attribute__((destructor)) end_slowly(void)
{
    sleep(SECONDS + 1);
}
