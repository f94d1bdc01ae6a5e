/* SPDX-License-Identifier: BSD-3-Clause */
#include "list_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Others, as NFS, keep what they were told of a file for a while; and its time is another's. */
bool list_file_can_be_kept(int directory)
{
    struct statfs file_system;

    if (fstatfs(directory, &file_system)) {
        return false;
    }
    switch (file_system.f_type) {
    case EXT4_SUPER_MAGIC:
    case XFS_SUPER_MAGIC:
    case TMPFS_MAGIC: return true;
    default: return false;
    }
}

int list_file_place(const char *path, const char **name)
{
    const char *slash = strrchr(path, '/');
    char *directory = slash ? strndup(path, (size_t)(slash - path) + (slash == path)) : strdup(".");
    int place = directory ? open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW) : -1;

    *name = slash ? slash + 1 : path;
    free(directory);
    return place;
}

/* What somebody else says of images is not believed, whoever may write to the directory. */
bool list_file_is_ours(int fd, struct stat *st)
{
    return fstat(fd, st) == 0 && S_ISREG(st->st_mode) && st->st_uid == geteuid()
           && !(st->st_mode & (S_IWGRP | S_IWOTH));
}

int list_file_new(int place, const char *name)
{
    struct stat st, named;
    int fd;

    /* Somebody else's, who may have it open still. */
    if (!fstatat(place, name, &named, AT_SYMLINK_NOFOLLOW)
        && (named.st_uid != geteuid() || !S_ISREG(named.st_mode))
        && unlinkat(place, name, S_ISDIR(named.st_mode) ? AT_REMOVEDIR : 0)) {
        return -1;
    }
    fd = openat(place, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW,
                0600);
    if (fd < 0) {
        return -1;
    }
    /* It may have been renamed before the lock was ours. One that was killed left what is cut. */
    if (flock(fd, LOCK_EX | LOCK_NB) || fstat(fd, &st)
        || fstatat(place, name, &named, AT_SYMLINK_NOFOLLOW)
        || st.st_dev != named.st_dev || st.st_ino != named.st_ino || !S_ISREG(st.st_mode)
        || st.st_nlink != 1 || st.st_uid != geteuid() || fchmod(fd, 0600)
        || ftruncate(fd, 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool read_whole(int fd, void *buffer, size_t length)
{
    for (char *at = buffer; length;) {
        ssize_t got = read(fd, at, length);

        if (got <= 0) {
            if (got < 0 && errno == EINTR) {
                continue;
            }
            return false;
        }
        at += got;
        length -= (size_t)got;
    }
    return true;
}

bool write_whole(int fd, const void *buffer, size_t length)
{
    for (const char *at = buffer; length;) {
        ssize_t put = write(fd, at, length);

        if (put < 0) {
            if (errno == EINTR) {
                continue;
            }
            return false;
        }
        at += put;
        length -= (size_t)put;
    }
    return true;
}
