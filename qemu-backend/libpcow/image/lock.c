/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>

#include "util/error.h"

#define INTERVAL_NS 200000L            /* between two tries */
/*
 * A change of the tree may have to hold up a VM: it waits for readers that are loading tables,
 * which takes milliseconds.
 */
#define CHANGE_WAIT_MS 2000u
/* A reader waits for a deletion that merges a large layer. */
#define READ_WAIT_MS 60000u

static int set_lock(const struct file *file, short type, off_t start, off_t length)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};

    if (fcntl(file->fd, F_OFD_SETLK, &lock) == 0)
        return 0;
    return errno == EAGAIN || errno == EACCES ? -EBUSY : -errno;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int wait_lock(const struct file *file, short type, off_t start, uint64_t deadline)
{
    const struct timespec interval = {0, INTERVAL_NS};
    int ret;

    while ((ret = set_lock(file, type, start, 1)) == -EBUSY && now_ms() < deadline)
        nanosleep(&interval, NULL);
    return ret;
}

int lock_tree(const struct file *file, bool exclusive, struct pcow_error *error)
{
    uint64_t deadline = now_ms() + (exclusive ? CHANGE_WAIT_MS : READ_WAIT_MS);
    short type = exclusive ? F_WRLCK : F_RDLCK;
    /*
     * Through the gate one at a time if it is for a change: readers that follow each other closely
     * cannot keep it out.
     */
    int ret = wait_lock(file, type, LOCK_GATE_OFFSET, deadline);

    if (!ret)
        ret = wait_lock(file, type, LOCK_TREE_OFFSET, deadline);
    if (ret || !exclusive)
        set_lock(file, F_UNLCK, LOCK_GATE_OFFSET, 1);
    if (ret == -EBUSY)
        return error_set(
            error, ret,
            exclusive ? "%s: others are opening its snapshots just now; try again"
                      : "%s: its tree of snapshots is being changed; try again when that is done",
            file->path);
    return ret ? error_set_errno(error, ret, "cannot lock the snapshots of %s", file->path) : 0;
}

void unlock_tree(const struct file *file)
{
    set_lock(file, F_UNLCK, LOCK_TREE_OFFSET, 1);
    set_lock(file, F_UNLCK, LOCK_GATE_OFFSET, 1);
}

int lock_snapshot(const struct file *file, uint32_t layer, bool exclusive)
{
    return set_lock(file, exclusive ? F_WRLCK : F_RDLCK, LOCK_SNAPSHOTS_OFFSET + (off_t)layer, 1);
}

void unlock_snapshot(const struct file *file, uint32_t layer)
{
    set_lock(file, F_UNLCK, LOCK_SNAPSHOTS_OFFSET + (off_t)layer, 1);
}

int lock_checksums(const struct file *file, struct pcow_error *error)
{
    int ret = set_lock(file, F_WRLCK, LOCK_CHECKSUMS_OFFSET, 1);

    if (ret == -EBUSY)
        return error_set(error, ret, "%s: checksums of it are being made; wait for that",
                         file->path);
    return ret ? error_set_errno(error, ret, "cannot lock the checksums of %s", file->path) : 0;
}

void unlock_checksums(const struct file *file)
{
    set_lock(file, F_UNLCK, LOCK_CHECKSUMS_OFFSET, 1);
}

int lock_everything(const struct file *file, struct pcow_error *error)
{
    int ret = lock_tree(file, true, error);

    if (ret)
        return ret;
    ret = set_lock(file, F_WRLCK, LOCK_SNAPSHOTS_OFFSET, (off_t)MAX_LAYER_ID + 1);
    if (ret == -EBUSY)
        return error_set(error, ret,
                         "%s: a snapshot of it is in use (by an export, or by an image that stands "
                         "on it); stop that first",
                         file->path);
    return ret ? error_set_errno(error, ret, "cannot lock the snapshots of %s", file->path) : 0;
}
