/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/saves.h"

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "config/grubenv.h"

/* An extent of these kinds is not simply the file's bytes on the device. */
#define UNUSABLE \
    (FIEMAP_EXTENT_UNKNOWN | FIEMAP_EXTENT_DELALLOC | FIEMAP_EXTENT_ENCODED \
     | FIEMAP_EXTENT_DATA_ENCRYPTED | FIEMAP_EXTENT_NOT_ALIGNED | FIEMAP_EXTENT_DATA_INLINE \
     | FIEMAP_EXTENT_DATA_TAIL | FIEMAP_EXTENT_UNWRITTEN | FIEMAP_EXTENT_SHARED)

/* Where a small file lies on its device; 0 if nobody can say. */
static uint64_t find_block(const struct volume *volume, const char *path, size_t length)
{
    union {
        struct fiemap map;
        char room[sizeof(struct fiemap) + sizeof(struct fiemap_extent)];
    } request = {.map = {.fm_length = length, .fm_extent_count = 1}};
    const struct fiemap_extent *extent = request.map.fm_extents;
    int fd = volume_open(volume, path), result;

    if (fd < 0)
        return 0;
    result = ioctl(fd, FS_IOC_FIEMAP, &request.map);
    close(fd);
    if (result != 0 || request.map.fm_mapped_extents != 1 || extent->fe_logical != 0
        || extent->fe_length < length || (extent->fe_flags & UNUSABLE))
        return 0;
    return extent->fe_physical;
}

static bool write_block(const struct volume *volume, uint64_t at, const char *data, size_t length)
{
    char device[64];
    int fd, no = 0, yes = 1;
    bool written;

    snprintf(device, sizeof device, "/dev/%s", volume->device);
    fd = open(device, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ioctl(fd, BLKROSET, &no);
    close(fd);
    fd = open(device, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    written = pwrite(fd, data, length, (off_t)at) == (ssize_t)length && fsync(fd) == 0;
    ioctl(fd, BLKROSET, &yes);
    close(fd);
    return written;
}

static bool write_file(struct arena *arena, const struct save *saves, const struct save *file)
{
    /* btrfs has checksums of its data, and vfat no FIEMAP */
    /* Of XFS nobody can say here whether its log says something else. */
    bool simple = strcmp(file->volume->type, "ext4") == 0 && !file->volume->dirty;
    size_t length;
    char *data;
    uint64_t at;

    if (!simple)
        return false;
    data = volume_read(arena, file->volume, file->path, GRUBENV_MAX, &length);
    for (const struct save *save = saves; save && data; save = save->next)
        if (save->volume == file->volume && strcmp(save->path, file->path) == 0)
            data = grubenv_change(arena, data, length, save->name, save->value);
    at = data ? find_block(file->volume, file->path, length) : 0;
    return at && write_block(file->volume, at, data, length);
}

/* Whether an earlier one names the same file. */
static bool done_before(const struct save *saves, const struct save *save)
{
    for (; saves != save; saves = saves->next)
        if (saves->volume == save->volume && strcmp(saves->path, save->path) == 0)
            return true;
    return false;
}

void saves_write(struct arena *arena, const struct save *saves)
{
    for (const struct save *save = saves; save; save = save->next)
        if (!done_before(saves, save) && !write_file(arena, saves, save))
            printf("pcow boot: %s of %s cannot be changed in place, so an entry meant for one boot "
                   "boots again\n",
                   save->path, save->volume->device);
}
