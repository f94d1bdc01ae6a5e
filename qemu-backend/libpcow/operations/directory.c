/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The directory that an image lies in, whatever name it was opened by: there are its base, and
 * those that stand on it.
 */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "operations/operations.h"
#include "util/error.h"

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/*
 * A file may be a mount point of its own (a bind mount): then it has this name here, and another
 * where it lies.
 */
static bool is_mount_point(int fd, int directory)
{
#ifdef STATX_MNT_ID
    struct statx of_file, of_directory;

    return statx(fd, "", AT_EMPTY_PATH, STATX_MNT_ID, &of_file) == 0
           && statx(directory, "", AT_EMPTY_PATH, STATX_MNT_ID, &of_directory) == 0
           && of_file.stx_mask & of_directory.stx_mask & STATX_MNT_ID
           && of_file.stx_mnt_id != of_directory.stx_mnt_id;
#else
    (void)fd;
    (void)directory;
    return false;
#endif
}

/* The path with all links resolved; NULL if there is none, as for a file without a name. */
static char *real_path(int fd)
{
    char link[64], path[PATH_MAX];
    ssize_t length;

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path);
    return length > 0 && (size_t)length < sizeof path && path[0] == '/'
               ? strndup(path, (size_t)length)
               : NULL;
}

static int open_directory(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;

    free(copy);
    return fd;
}

/* The directory of path, if the file has that name in it. */
static int open_verified(int fd, const char *path)
{
    int directory = open_directory(path);
    struct stat named, opened;

    if (directory < 0)
        return -1;
    if (fstat(fd, &opened) == 0
        && fstatat(directory, strrchr(path, '/') + 1, &named, AT_SYMLINK_NOFOLLOW) == 0
        && is_same(&named, &opened) && !is_mount_point(fd, directory))
        return directory;
    close(directory);
    return -1;
}

int image_open_directory(struct pcow_image *image, struct pcow_error *error)
{
    int as_given = open_directory(image->file.path), reason = -errno, fd = image->file.fd, real;
    char *path = real_path(fd);
    struct stat a, b;

    real = path ? open_verified(fd, path) : -1;
    image->elsewhere = real < 0;
    image->directory = real >= 0 ? real : as_given;
    if (real >= 0 && as_given >= 0 && fstat(real, &a) == 0 && fstat(as_given, &b) == 0
        && !is_same(&a, &b)) {
        /* The path of its base, too, is made from this one. */
        free(image->file.path);
        image->file.path = path;
        path = NULL;
    }
    if (real >= 0 && as_given >= 0)
        close(as_given);
    free(path);
    return image->directory >= 0 ? 0
                                 : error_set_errno(error, reason, "cannot open the directory of %s",
                                                   image->file.path);
}
