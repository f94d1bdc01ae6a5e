/* SPDX-License-Identifier: BSD-3-Clause */
#include "staging.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "image.h"
#include "report.h"

static void release(struct staging *staging)
{
    if (staging->replaced >= 0) {
        close(staging->replaced);
        staging->replaced = -1;
    }
}

/*
 * Nobody else may have it from now on: all of its bytes, so that whatever format it has, whoever
 * opens it finds his lock taken.
 */
static int lock_whole(int fd, const char *path, struct pcow_error *error)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

    if (fcntl(fd, F_OFD_SETLK, &lock) && (errno == EAGAIN || errno == EACCES)) {
        return fail(error, -EBUSY,
                    "%s is in use by another process; stop it first, or choose another destination",
                    path);
    }
    return 0;
}

static bool is_sealed(const char *path)
{
    struct pcow_info info = {0};
    pcow_image *image;

    if (!pcow_open(path, PCOW_OPEN_NO_BASE | PCOW_OPEN_FORCE_SHARE, NULL, &image, NULL)) {
        pcow_get_info(image, &info);
        pcow_close(image);
    }
    return info.sealed;
}

/*
 * A file that is there will be replaced: not while somebody uses it, and not if it is a template.
 * Keeps it locked.
 */
static int hold_replaced(struct staging *staging, struct pcow_error *error)
{
    const char *path = staging->final_path;
    struct stat status, locked;
    int r;

    for (;;) {
        if (stat(path, &status)) {
            return errno == ENOENT ? 0 : fail(error, -errno, "%s: %s", path, strerror(errno));
        }
        if (!S_ISREG(status.st_mode)) {
            return fail(error, -EEXIST,
                        "%s is not a regular file and cannot be replaced; write into it with -n",
                        path);
        }
        staging->replaced = open(path, O_RDWR | O_CLOEXEC);
        if (staging->replaced < 0) {
            return fail(
                error, -errno, "%s exists and cannot be opened for writing: %s%s", path,
                strerror(errno),
                errno == EPERM
                    ? "; it may be immutable (lsattr shows i), as the templates of pools are: "
                      "choose another name"
                    : "");
        }
        r = lock_whole(staging->replaced, path, error);
        if (!r && is_sealed(path)) {
            r = fail(error, -EROFS,
                     "%s is a sealed image, others may stand on it; unseal or remove it first, or "
                     "choose "
                     "another destination",
                     path);
        }
        if (r) {
            release(staging);
            return r;
        }
        /* the one that was locked may have been replaced before */
        if (!fstat(staging->replaced, &locked) && !stat(path, &status)
            && locked.st_dev == status.st_dev && locked.st_ino == status.st_ino) {
            return 0;
        }
        release(staging);
    }
}

int staging_begin(struct staging *staging, const char *path, struct pcow_error *error)
{
    const char *name;
    char hidden[NAME_MAX + 1];
    uint64_t random;
    int r;

    staging->replaced = -1;
    if (!realpath(path, staging->final_path)) {
        struct stat status;

        if (errno != ENOENT || !lstat(path, &status)) {
            return fail(error, -errno, "%s: %s", path,
                        errno ? strerror(errno) : "a link to nothing");
        }
        if (snprintf(staging->final_path, PATH_MAX, "%s", path) >= PATH_MAX) {
            return fail(error, -ENAMETOOLONG, "%s: the path is too long", path);
        }
    }
    if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
        return fail(error, -EIO, "no random numbers for a temporary name");
    }
    name = strrchr(staging->final_path, '/');
    name = name ? name + 1 : staging->final_path;
    /* a name of its own even if the file's name is as long as a name may be */
    snprintf(hidden, sizeof(hidden), ".%.200s.%016" PRIx64 ".partial", name, random);
    r = sibling_path(staging->final_path, hidden, staging->path, error);
    return r ? r : hold_replaced(staging, error);
}

/* Like the old file, as if it had been overwritten; what the user may not set stays as it is. */
static void copy_attributes(const char *from, int to)
{
    struct stat status;

    if (!stat(from, &status) && !fchown(to, status.st_uid, status.st_gid)) {
        (void)!fchmod(to, status.st_mode & 07777);
    }
}

static void sync_directory(const char *path)
{
    char directory[PATH_MAX];
    int fd;

    if (!sibling_path(path, ".", directory, NULL)) {
        fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0) {
            fsync(fd);
            close(fd);
        }
    }
}

/* Is the file that is held still the one of that name? */
static bool is_held(const struct staging *staging)
{
    struct stat held, named;

    return staging->replaced >= 0 && !fstat(staging->replaced, &held)
           && !stat(staging->final_path, &named) && held.st_dev == named.st_dev
           && held.st_ino == named.st_ino;
}

/*
 * Over the file that is held, or to a name that is still free: what has appeared there meanwhile
 * may be in use.
 */
static int give_name(const struct staging *staging)
{
    int r;

    if (is_held(staging)) {
        return rename(staging->path, staging->final_path);
    }
    r = renameat2(AT_FDCWD, staging->path, AT_FDCWD, staging->final_path, RENAME_NOREPLACE);
    if (r && errno == EINVAL) {                 /* the file system does not know of it */
        if (!access(staging->final_path, F_OK)) {
            errno = EEXIST;
            return -1;
        }
        r = rename(staging->path, staging->final_path);
    }
    return r;
}

int staging_commit(struct staging *staging, struct pcow_error *error)
{
    int fd = open(staging->path, O_RDWR | O_CLOEXEC), code = 0;

    if (fd < 0) {
        code = errno;
    } else {
        copy_attributes(staging->final_path, fd);
        if (fsync(fd) || give_name(staging)) {
            code = errno;
        }
        close(fd);
    }
    if (code) {
        staging_abort(staging);
        return fail(error, -code, "%s: cannot put the finished image there: %s",
                    staging->final_path,
                    code == EEXIST ? "another file has appeared under that name meanwhile; remove "
                                     "it or choose another name"
                                   : strerror(code));
    }
    sync_directory(staging->final_path);
    release(staging);
    return 0;
}

void staging_abort(struct staging *staging)
{
    unlink(staging->path);
    release(staging);
}
