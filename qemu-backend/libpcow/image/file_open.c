/* SPDX-License-Identifier: BSD-3-Clause */
/* Opening an image file and taking its lock, and closing it. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "image/datasum.h"
#include "image/file.h"
#include "image/mirror.h"
#include "util/error.h"

#define MAX_LINKS 8u                   /* as many as any path needs, and no loop */

static int take_lock(const struct file *file, struct pcow_error *error)
{
    struct flock lock = {
        .l_type = file->writable ? F_WRLCK : F_RDLCK,
        .l_whence = SEEK_SET,
        .l_start = LOCK_OFFSET,
        .l_len = 1,
    };

    if (fcntl(file->fd, F_OFD_SETLK, &lock) == 0)
        return 0;
    if (errno == EAGAIN || errno == EACCES)
        return error_set(
            error, -EBUSY,
            file->writable
                ? "%s is in use (by a VM, another tool, or images based on it); stop that first"
                : "%s is open for writing elsewhere; stop the VM or tool that uses it, or look "
                  "without a lock (-U)",
            file->path);
    return error_set_errno(error, -errno, "cannot lock %s", file->path);
}

bool file_has_writer(const struct file *file)
{
    struct flock lock = {
        .l_type = F_RDLCK,
        .l_whence = SEEK_SET,
        .l_start = LOCK_OFFSET,
        .l_len = 1,
    };

    return fcntl(file->fd, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

/* The same bytes once more, by a system call, which sets the time as well. */
static bool write_again(int fd)
{
    char bytes[8];

    return pread(fd, bytes, sizeof bytes, 0) == sizeof bytes
           && pwrite(fd, bytes, sizeof bytes, 0) == sizeof bytes;
}

/*
 * Whoever remembers what the tables say (pcow_summarize()) sees by the time of the file that there
 * is a writer, also on tmpfs: there stores through a mapping change it for the first load at most.
 * Before the first change. Not who only marks a snapshot: nobody remembers that. futimens() asks
 * what the process may do now, not when it got the file.
 */
static int tell_of_writer(const struct file *file, unsigned flags, struct pcow_error *error)
{
    if (!file->writable || flags & FILE_FORCE_SHARE)
        return 0;
    if (futimens(file->fd, NULL) && !write_again(file->fd))
        return error_set_errno(error, -errno, "cannot set the time of %s, which writers have to",
                               file->path);
    return 0;
}

static int finish_open(struct file *file, unsigned flags, struct observer *observer,
                       struct pcow_error *error)
{
    struct stat st;
    int ret;

    if (fstat(file->fd, &st))
        return error_set_errno(error, -errno, "cannot stat %s", file->path);
    if (!S_ISREG(st.st_mode))
        return error_set(error, -EMEDIUMTYPE,
                         "%s is not a regular file; images are files in a pool", file->path);
    if ((uint64_t)st.st_size > MAX_FILE_SLABS << SLAB_BITS)
        return error_set(error, -EFBIG, "%s is larger than an image can be", file->path);
    if (!(flags & FILE_FORCE_SHARE) && (ret = take_lock(file, error)))
        return ret;
    ret = tell_of_writer(file, flags, error);
    if (ret)
        return ret;
    /* Again, now that no writer can be growing it. */
    if (fstat(file->fd, &st))
        return error_set_errno(error, -errno, "cannot stat %s", file->path);
    file->size = (uint64_t)st.st_size;
    persist_init(&file->persist, persist_classify(file->fd), observer);
    /*
     * A crash would bring back the old time with what was changed. What cannot be written is what
     * others have left: the first flush tells it, as it would without this.
     */
    if (file->writable && !(flags & FILE_FORCE_SHARE)
        && file->persist.persistence != PCOW_PERSISTENCE_VOLATILE && fsync(file->fd))
        failures_add(&file->persist.failures);
    if (file->writable)
        persist_find_fixed_blocks(&file->persist, file->fd);
    file->may_share = file->writable && file->persist.persistence != PCOW_PERSISTENCE_VOLATILE
                      && file_may_share(file->fd);
    /* tmpfs tells by the block size whether it was mounted for huge pages. */
    file->huge = file->persist.persistence == PCOW_PERSISTENCE_PMEM
                 || (uint64_t)st.st_blksize >= PCOW_SLAB_SIZE;
    return persist_observe(&file->persist,
                           (struct observation){.what = OBSERVED_OPEN, .path = file->path});
}

static bool is_immutable(int directory, const char *name)
{
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK), flags = 0;
    struct stat st;
    bool found = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)
                 && ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 && flags & FS_IMMUTABLE_FL;

    if (fd >= 0)
        close(fd);
    return found;
}

bool file_is_replaced(const struct file *file, int directory, const char *name, unsigned flags)
{
    struct stat open_file, named;

    return fstat(file->fd, &open_file)
           || fstatat(directory, name, &named, flags & FILE_NO_FOLLOW ? AT_SYMLINK_NOFOLLOW : 0)
           || open_file.st_dev != named.st_dev || open_file.st_ino != named.st_ino;
}

/* The path of what a link names, seen from where the link was named. NULL: there is no memory. */
static char *link_target(const char *name, const char *target)
{
    const char *slash = strrchr(name, '/');
    size_t prefix = *target == '/' || !slash ? 0 : (size_t)(slash - name) + 1;
    char *path = malloc(prefix + strlen(target) + 1);

    if (path) {
        memcpy(path, name, prefix);
        strcpy(path + prefix, target);
    }
    return path;
}

/*
 * A link in the place of the file is followed if it is the user's own, or root's. Whoever may write
 * to a directory would choose else on which file root works there. The kernel does the same where
 * everybody may write (Documentation/admin-guide/sysctl/fs.rst, protected_symlinks). Returns a
 * descriptor, or a negative errno: -ELOOP for a link that is not followed.
 */
static int open_by_own_links(int directory, const char *name, int flags, unsigned links)
{
    int fd = openat(directory, name, flags | O_NOFOLLOW), ret = -errno, link;
    char target[PATH_MAX], *path;
    struct stat st;
    ssize_t length;

    if (fd >= 0)
        return fd;
    if (ret != -ELOOP || links == 0)
        return ret;
    link = openat(directory, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (link < 0)
        return -errno;
    length = fstat(link, &st) || (st.st_uid != 0 && st.st_uid != geteuid())
                 ? -1
                 : readlinkat(link, "", target, sizeof target - 1);
    close(link);
    if (length < 0)
        return -ELOOP;
    target[length] = '\0';
    path = link_target(name, target);
    if (!path)
        return -ENOMEM;
    ret = open_by_own_links(directory, path, flags, links - 1);
    free(path);
    return ret;
}

static int open_once(struct file *file, int directory, const char *name, const char *shown_path,
                     unsigned flags, struct observer *observer, struct pcow_error *error)
{
    int ret, saved_errno;

    memset(file, 0, sizeof *file);
    file->heads = 1;
    file->fd = -1;
    file->writable = flags & FILE_WRITE;
    file->path = strdup(shown_path);
    if (!file->path)
        return error_set(error, -ENOMEM, "out of memory");
    /* O_NONBLOCK: a FIFO put in place of an image must not hang us. */
    ret = open_by_own_links(
        directory, name,
        (file->writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOCTTY | O_NONBLOCK,
        flags & FILE_NO_FOLLOW ? 0 : MAX_LINKS);
    saved_errno = ret < 0 ? -ret : 0;
    file->fd = ret < 0 ? -1 : ret;
    if (file->fd >= 0)
        ret = finish_open(file, flags, observer, error);
    else if (saved_errno == EPERM && file->writable && is_immutable(directory, name))
        ret = error_set(error, -EPERM,
                        "%s is immutable (lsattr shows i), as the templates of pools are: make an "
                        "image on it with pcow-img "
                        "create -b, or take the flag off first with chattr -i",
                        shown_path);
    else if (saved_errno == ELOOP)
        ret = error_set(error, -ELOOP,
                        "%s is a symbolic link of another user, or one of a loop, and is not "
                        "followed; name the image itself",
                        shown_path);
    else
        ret = error_set_errno(error, -saved_errno, "cannot open %s", shown_path);
    if (ret)
        file_close(file);
    return ret;
}

int file_open(struct file *file, int directory, const char *name, const char *shown_path,
              unsigned flags, struct observer *observer, struct pcow_error *error)
{
    /*
     * Who replaces a file by renaming another over it holds its lock. So once the lock is ours, the
     * name stays; but before that it may have become another file's, and what was locked is
     * nobody's any more.
     */
    for (unsigned i = 0; i < MAX_REPLACED; i++) {
        int ret = open_once(file, directory, name, shown_path, flags, observer, error);

        if (ret || flags & FILE_FORCE_SHARE || !file_is_replaced(file, directory, name, flags))
            return ret;
        file_close(file);
    }
    return error_set(error, -EBUSY, "%s is replaced again and again; try when that is over",
                     shown_path);
}

int file_adopt(struct file *file, int fd, const char *path, struct observer *observer,
               struct pcow_error *error)
{
    int ret;

    memset(file, 0, sizeof *file);
    file->heads = 1;
    file->fd = fd;
    file->writable = true;
    file->path = strdup(path);
    ret = file->path ? finish_open(file, FILE_WRITE, observer, error)
                     : error_set(error, -ENOMEM, "out of memory");
    if (ret)
        file_close(file);
    return ret;
}

void file_close(struct file *file)
{
    persist_observe(&file->persist, (struct observation){.what = OBSERVED_CLOSE});
    for (unsigned g = 0; g < MAX_GROUPS; g++) {
        if (file->window[g])
            munmap(file->window[g], GROUP_SIZE);
        if (file->settled_window[g])
            munmap(file->settled_window[g], GROUP_SIZE);
    }
    file_free_filled(file);
    mirror_detach(file);
    datasum_detach(file);
    lost_close(file);
    if (file->fd >= 0)
        close(file->fd);
    free(file->path);
    memset(file, 0, sizeof *file);
    file->fd = -1;
}
