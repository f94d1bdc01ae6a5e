/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Does a file system on DAX ever move the blocks of a file that were written? Where it does not,
 * blocks that are on the medium need no MAP_SYNC.
 *
 * ext4 refuses to (EXT4_IOC_MOVE_EXT). XFS does it for two reasons. Where files can share blocks, a
 * store to a shared one goes to another block; a pool is made without (mkfs.xfs -m reflink=0). And
 * xfs_fsr exchanges the blocks of a file, mapped or not, for those of a copy in one piece; it
 * leaves files alone that have the flag for that, and so they get it. One that looked before it was
 * set is refused by the kernel, as the file has changed since (XFS_IOC_SWAPEXT compares ctime).
 * Source: Linux fs/ext4/move_extent.c, fs/xfs/xfs_bmap_util.c, xfs_fsr(8), ioctl_xfs_fsgetxattr(2),
 * ioctl_ficlonerange(2).
 */
#include "persist/persist.h"

#include <errno.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342         /* linux/magic.h has it from 6.3 on */
#endif

/*
 * A clone of the first block onto itself changes nothing, and is refused in other words where there
 * are clones.
 */
static bool can_share_blocks(int fd)
{
    struct file_clone_range range = {.src_fd = fd, .src_length = PCOW_PAGE_SIZE};

    return ioctl(fd, FICLONERANGE, &range) == 0 || errno != EOPNOTSUPP;
}

/* Who may not set it finds it set: the creator of the file could. */
static bool is_left_alone(int fd)
{
    struct fsxattr attributes;

    if (ioctl(fd, FS_IOC_FSGETXATTR, &attributes))
        return false;
    if (attributes.fsx_xflags & FS_XFLAG_NODEFRAG)
        return true;
    attributes.fsx_xflags |= FS_XFLAG_NODEFRAG;
    return ioctl(fd, FS_IOC_FSSETXATTR, &attributes) == 0;
}

void persist_find_fixed_blocks(struct persist *persist, int fd)
{
    struct statfs fs;

    persist->fixed_blocks = false;
    if (persist->persistence != PCOW_PERSISTENCE_PMEM || persist->observer || fstatfs(fd, &fs))
        return;
    switch ((uint32_t)fs.f_type) {
    case EXT4_SUPER_MAGIC:
        persist->fixed_blocks = true;
        break;
    case XFS_SUPER_MAGIC:
        persist->fixed_blocks = !can_share_blocks(fd) && is_left_alone(fd);
        break;
    }
}
