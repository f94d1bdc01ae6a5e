/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/source_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "report.h"

#define MAX_LINKS 40                           /* as the kernel */

/*
 * The length of what a link names, or a negative errno: refused, if it is none. 0: it is one of
 * /proc, which stands for a file itself.
 */
static ssize_t read_link(int at, const char *part, int refused, char target[PATH_MAX])
{
    int link = openat(at, part, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    struct statfs system;
    struct stat status;
    ssize_t length = 0;

    if (link < 0) {
        return -errno;
    }
    if (fstat(link, &status) || fstatfs(link, &system)) {
        length = -errno;
    } else if (!S_ISLNK(status.st_mode)) {
        length = refused;
    } else if (status.st_uid != 0 && status.st_uid != geteuid()) {
        length = -ELOOP;
    } else if (system.f_type != PROC_SUPER_MAGIC) {
        length = readlinkat(link, "", target, PATH_MAX - 1);
        length = length < 0 ? -errno : length ? length : -ENOENT;
        target[length < 0 ? 0 : length] = '\0';
    }
    close(link);
    return length;
}

/* A descriptor, or a negative errno. next: what is behind part; both are replaced by a link. */
static int open_part(int at, const char *part, char next[PATH_MAX], int flags, unsigned *links)
{
    char target[PATH_MAX], behind[PATH_MAX];
    int fd = openat(at, part, flags | O_NOFOLLOW | O_CLOEXEC);
    ssize_t length;

    if (fd >= 0 || (errno != ELOOP && errno != ENOTDIR)) {
        return fd >= 0 ? fd : -errno;
    }
    length = read_link(at, part, -errno, target);
    if (length < 0 || ++*links > MAX_LINKS) {
        return length < 0 ? (int)length : -ELOOP;
    }
    if (length == 0) {
        fd = openat(at, part, flags | O_CLOEXEC);
        return fd >= 0 ? fd : -errno;
    }
    strcpy(behind, next);
    if ((size_t)length + strlen(behind) + 2 > PATH_MAX) {
        return -ENAMETOOLONG;
    }
    memcpy(next, target, (size_t)length);
    next[length] = '/';
    strcpy(next + length + 1, behind);
    fd = openat(at, *target == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return fd >= 0 ? fd : -errno;
}

static int open_by_own_links(const char *path, int flags)
{
    char part[PATH_MAX], left[PATH_MAX];
    int at = open(*path == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC), fd = at;
    unsigned links = 0;
    const char *begin;
    size_t length;

    if (at < 0 || strlen(path) >= PATH_MAX) {
        fd = at < 0 ? -errno : -ENAMETOOLONG;
    } else {
        strcpy(left, path);
    }
    while (fd >= 0) {
        begin = left + strspn(left, "/");
        length = strcspn(begin, "/");
        memcpy(part, begin, length);
        part[length] = '\0';
        begin += length;
        begin += strspn(begin, "/");
        memmove(left, begin, strlen(begin) + 1);
        fd = open_part(at, length ? part : ".", left, *left ? O_PATH | O_DIRECTORY : flags, &links);
        if (fd >= 0 && !*left) {
            break;
        }
        if (fd >= 0) {
            close(at);
            at = fd;
        }
    }
    if (at >= 0) {
        close(at);
    }
    return fd;
}

int source_file_open(const char *path, struct pcow_error *error)
{
    int fd = open_by_own_links(path, O_RDONLY | O_NONBLOCK);

    if (fd == -ELOOP) {
        return fail(error, fd,
                    "%s is, or lies behind, a symbolic link of another user, or one of a loop, and "
                    "is not followed; name the file itself",
                    path);
    }
    return fd >= 0 ? fd : fail(error, fd, "%s: cannot open it: %s", path, strerror(-fd));
}
