// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: notes in the file $SYNCS when each sync of a pcow image begins, in microseconds since
 * 1970, by which thread, and what it is.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void note(const char *what)
{
    char thread[16] = "main", line[128];
    struct timespec now;
    int length, fd;

    clock_gettime(CLOCK_REALTIME, &now);
    if (gettid() != getpid())
        prctl(PR_GET_NAME, thread);
    length = snprintf(line, sizeof(line), "%lld %s %s\n",
                      now.tv_sec * 1000000LL + now.tv_nsec / 1000, thread, what);
    fd = open(getenv("SYNCS"), O_CREAT | O_WRONLY | O_APPEND, 0600);
    if (fd < 0 || write(fd, line, (size_t)length) != length)
        abort();
    close(fd);
}

static int is_image(int fd)
{
    static const char suffix[] = ".pcow";
    char link[64], path[4096];
    ssize_t length;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof(path));
    return length > (ssize_t)strlen(suffix)
           && !memcmp(path + length - strlen(suffix), suffix, strlen(suffix));
}

int fsync(int fd)
{
    if (is_image(fd))
        note("fsync");
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    if (is_image(fd))
        note("fdatasync");
    return (int)syscall(SYS_fdatasync, fd);
}

int msync(void *address, size_t length, int flags)
{
    note("msync");
    return (int)syscall(SYS_msync, address, length, flags);
}
