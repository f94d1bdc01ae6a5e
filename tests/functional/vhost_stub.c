// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: a /dev/vhost-net that agrees to everything and does nothing, so that QEMU comes to
 * where it would start it. The numbers of the requests are appended to the file $VHOST_REQUESTS,
 * one a line. With $VHOST_ASKS it is one that asks where memory is; what it is told is noted there
 * as well, "update" or "invalidate".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/vhost.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define FEATURES ((uint64_t)1 << 32 | (uint64_t)1 << VHOST_F_LOG_ALL)    /* VIRTIO_F_VERSION_1 */
#define ACCESS_PLATFORM ((uint64_t)1 << 33)
#define FEATURES_ARRAY 0x83                    /* VHOST_GET_FEATURES_ARRAY, and _SET_ */

static int vhost = -1;                         /* one that asks */

static void note(const char *what)
{
    FILE *file = fopen(getenv("VHOST_REQUESTS"), "a");

    fprintf(file, "%s\n", what);
    fclose(file);
}

static int open_real(const char *name, const char *path, int flags, mode_t mode)
{
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    int ends[2];

    if (strcmp(path, "/dev/vhost-net"))
        return real(path, flags, mode);
    if (!getenv("VHOST_ASKS")
        || socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends))
        return real("/dev/null", flags, mode);
    /* from which nothing can be read, as the other end says nothing */
    return vhost = ends[0];
}

ssize_t write(int fd, const void *data, size_t length)
{
    ssize_t (*real)(int, const void *, size_t) =
        (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    const struct vhost_msg *message = data;

    if (fd != vhost || vhost < 0)
        return real(fd, data, length);
    note(message->iotlb.type == VHOST_IOTLB_UPDATE ? "update" : "invalidate");
    return (ssize_t)length;
}

static mode_t mode_of(int flags, va_list arguments)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

int open(const char *path, int flags, ...)
{
    va_list arguments;
    mode_t mode;

    va_start(arguments, flags);
    mode = mode_of(flags, arguments);
    va_end(arguments);
    return open_real("open", path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list arguments;
    mode_t mode;

    va_start(arguments, flags);
    mode = mode_of(flags, arguments);
    va_end(arguments);
    return open_real("open64", path, flags, mode);
}

int ioctl(int fd, unsigned long request, ...)
{
    int (*real)(int, unsigned long, ...) =
        (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    va_list arguments;
    void *argument;
    char number[32];

    va_start(arguments, request);
    argument = va_arg(arguments, void *);
    va_end(arguments);
    if (_IOC_TYPE(request) != VHOST_VIRTIO)
        return real(fd, request, argument);
    if (_IOC_NR(request) == FEATURES_ARRAY) {
        errno = ENOTTY;                        /* as kernels that do not know it */
        return -1;
    }
    snprintf(number, sizeof number, "%#lx", _IOC_NR(request));
    note(number);
    if (request == VHOST_GET_FEATURES)
        *(uint64_t *)argument = FEATURES | (getenv("VHOST_ASKS") ? ACCESS_PLATFORM : 0);
    if (request == VHOST_GET_BACKEND_FEATURES)
        *(uint64_t *)argument = 0;             /* the older kind of messages */
    return 0;
}
