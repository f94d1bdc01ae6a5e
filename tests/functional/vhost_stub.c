// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: a /dev/vhost-net that agrees to everything and does nothing, so that QEMU comes to where it would start it.
 * The numbers of the requests are appended to the file $VHOST_REQUESTS, one a line.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/vhost.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#define FEATURES ((uint64_t)1 << 32 | (uint64_t)1 << VHOST_F_LOG_ALL)    /* VIRTIO_F_VERSION_1 */

static int open_real(const char *name, const char *path, int flags, mode_t mode)
{
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);

    return real(strcmp(path, "/dev/vhost-net") ? path : "/dev/null", flags, mode);
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
    int (*real)(int, unsigned long, ...) = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    va_list arguments;
    void *argument;
    FILE *file;

    va_start(arguments, request);
    argument = va_arg(arguments, void *);
    va_end(arguments);
    if (_IOC_TYPE(request) != VHOST_VIRTIO)
        return real(fd, request, argument);
    file = fopen(getenv("VHOST_REQUESTS"), "a");
    fprintf(file, "%#lx\n", _IOC_NR(request));
    fclose(file);
    if (request == VHOST_GET_FEATURES)
        *(uint64_t *)argument = FEATURES;
    return 0;
}
