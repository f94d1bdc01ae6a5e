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

#include "format/in_use.h"
#include "image.h"
#include "report.h"

/* A file that is there will be replaced: not while somebody uses it, and not if it is a template. */
static int check_replaceable(const char *path, struct pcow_error *error)
{
    struct stat status;
    struct pcow_info info = {0};
    pcow_image *image;
    int fd, r;

    if (stat(path, &status)) {
        return errno == ENOENT ? 0 : fail(error, -errno, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        return fail(error, -EEXIST, "%s is not a regular file and cannot be replaced; write into it with -n", path);
    }
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return fail(error, -errno, "%s exists and cannot be opened for writing: %s%s", path, strerror(errno), errno == EPERM
                    ? "; it may be immutable (lsattr shows i), as the templates of pools are: choose another name" : "");
    }
    r = check_not_in_use(fd, path, error);
    close(fd);
    if (!r && !pcow_open(path, PCOW_OPEN_NO_BASE, NULL, &image, NULL)) {
        pcow_get_info(image, &info);
        pcow_close(image);
    }
    if (info.sealed) {
        return fail(error, -EROFS, "%s is a sealed image, others may stand on it; unseal or remove it first, or choose "
                    "another destination", path);
    }
    return r;
}

int staging_begin(struct staging *staging, const char *path, struct pcow_error *error)
{
    const char *name;
    char hidden[NAME_MAX + 1];
    uint64_t random;
    int r;

    if (!realpath(path, staging->final_path)) {
        struct stat status;

        if (errno != ENOENT || !lstat(path, &status)) {
            return fail(error, -errno, "%s: %s", path, errno ? strerror(errno) : "a link to nothing");
        }
        if (snprintf(staging->final_path, PATH_MAX, "%s", path) >= PATH_MAX) {
            return fail(error, -ENAMETOOLONG, "%s: the path is too long", path);
        }
    }
    r = check_replaceable(staging->final_path, error);
    if (r) {
        return r;
    }
    if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
        return fail(error, -EIO, "no random numbers for a temporary name");
    }
    name = strrchr(staging->final_path, '/');
    name = name ? name + 1 : staging->final_path;
    /* a name of its own even if the file's name is as long as a name may be */
    snprintf(hidden, sizeof(hidden), ".%.200s.%016" PRIx64 ".partial", name, random);
    return sibling_path(staging->final_path, hidden, staging->path, error);
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

int staging_commit(struct staging *staging, struct pcow_error *error)
{
    int fd = open(staging->path, O_RDWR | O_CLOEXEC), code = 0;

    if (fd < 0) {
        code = errno;
    } else {
        copy_attributes(staging->final_path, fd);
        if (fsync(fd) || rename(staging->path, staging->final_path)) {
            code = errno;
        }
        close(fd);
    }
    if (code) {
        staging_abort(staging);
        return fail(error, -code, "%s: cannot put the finished image there: %s", staging->final_path, strerror(code));
    }
    sync_directory(staging->final_path);
    return 0;
}

void staging_abort(struct staging *staging)
{
    unlink(staging->path);
}
