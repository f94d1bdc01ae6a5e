/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Blocks that a file shares with a copy of it (cp --reflink, which is what cp does on XFS). The
 * first store to one takes another block from the pool; through a mapping a full pool is SIGBUS
 * then, as with a hole. So they are made the file's own before anything is mapped for stores.
 */
#include "image/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342         /* linux/magic.h has it from 6.3 on */
#endif

#define EXTENTS 8u

bool file_may_share(int fd)
{
    struct statfs fs;

    /*
     * btrfs shares, too, but a store to a block of its own takes a new one as well: nothing helps
     * there.
     */
    return fstatfs(fd, &fs) == 0 && (uint32_t)fs.f_type == XFS_SUPER_MAGIC;
}

static int unshare(const struct file *file, uint64_t offset, uint64_t length)
{
    int ret = persist_observe(
        &file->persist,
        (struct observation){.what = OBSERVED_ALLOCATE, .offset = offset, .length = length});

    if (ret)
        return ret;
    do {
        ret = fallocate(file->fd, FALLOC_FL_UNSHARE_RANGE, (off_t)offset, (off_t)length);
    } while (ret && errno == EINTR);
    if (ret == 0 || errno == EOPNOTSUPP)
        return 0;
    return errno == EDQUOT || errno == ENOMEM ? -ENOSPC : -errno;
}

/* The part of the extent that lies in the range, if others have it as well. */
static int unshare_extent(const struct file *file, const struct fiemap_extent *extent,
                          uint64_t offset, uint64_t end)
{
    uint64_t from = extent->fe_logical > offset ? extent->fe_logical : offset;
    uint64_t to =
        extent->fe_logical + extent->fe_length < end ? extent->fe_logical + extent->fe_length : end;

    return extent->fe_flags & FIEMAP_EXTENT_SHARED && from < to ? unshare(file, from, to - from)
                                                                : 0;
}

int file_unshare(const struct file *file, uint64_t offset, uint64_t length)
{
    uint64_t end = offset + length, at = offset;

    while (file->may_share && at < end) {
        union {
            struct fiemap map;
            uint8_t space[sizeof(struct fiemap) + EXTENTS * sizeof(struct fiemap_extent)];
        } found = {.map = {.fm_start = at, .fm_length = end - at, .fm_extent_count = EXTENTS}};

        if (ioctl(file->fd, FS_IOC_FIEMAP, &found.map) || found.map.fm_mapped_extents == 0)
            return 0;
        for (unsigned i = 0; i < found.map.fm_mapped_extents && i < EXTENTS; i++) {
            const struct fiemap_extent *extent = &found.map.fm_extents[i];
            int ret = unshare_extent(file, extent, offset, end);

            if (ret)
                return ret;
            if (extent->fe_flags & FIEMAP_EXTENT_LAST
                || extent->fe_logical + extent->fe_length <= at)
                return 0;
            at = extent->fe_logical + extent->fe_length;
        }
    }
    return 0;
}
