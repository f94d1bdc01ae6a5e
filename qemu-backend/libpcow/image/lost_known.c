/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Blocks that the driver of an NVDIMM knows to be bad: from before, or found by a scrub. Which
 * pages of a file they are is asked of its file system.
 */
#include <errno.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "image/file.h"

#define MAX_KNOWN 512u                 /* ranges; the kernel keeps no more in a list */
#define SECTOR 512u
#define BATCH 64u

struct known {
    uint64_t from[MAX_KNOWN], to[MAX_KNOWN];       /* bytes of the device */
    unsigned count;
};

/* Of the whole device that the file system is on; any other has no such list. */
static void read_list(const struct file *file, struct known *known)
{
    unsigned long long sector, sectors;
    struct stat status;
    char path[80];
    FILE *list;

    known->count = 0;
    if (fstat(file->fd, &status))
        return;
    snprintf(path, sizeof path, "/sys/dev/block/%u:%u/badblocks", major(status.st_dev),
             minor(status.st_dev));
    list = fopen(path, "re");
    if (!list)
        return;
    while (known->count < MAX_KNOWN && fscanf(list, "%llu %llu", &sector, &sectors) == 2) {
        known->from[known->count] = sector * SECTOR;
        known->to[known->count++] = (sector + sectors) * SECTOR;
    }
    fclose(list);
}

static int add_extent(struct file *file, const struct known *known,
                      const struct fiemap_extent *extent)
{
    uint64_t end = extent->fe_physical + extent->fe_length;

    /* The one reads as zeros, whatever is there; of the other nobody knows where it is. */
    if (extent->fe_flags & (FIEMAP_EXTENT_UNWRITTEN | FIEMAP_EXTENT_UNKNOWN))
        return 0;
    for (unsigned i = 0; i < known->count; i++) {
        uint64_t from = known->from[i] > extent->fe_physical ? known->from[i] : extent->fe_physical,
                 to = known->to[i] < end ? known->to[i] : end;
        uint64_t page = (from - extent->fe_physical + extent->fe_logical) & ~(PCOW_PAGE_SIZE - 1);

        for (; from < to && page < to - extent->fe_physical + extent->fe_logical;
             page += PCOW_PAGE_SIZE) {
            int ret = page ? lost_add(file, page) : 0;

            if (ret)
                return ret;
        }
    }
    return 0;
}

int lost_add_known(struct file *file)
{
    struct {
        struct fiemap map;
        struct fiemap_extent extent[BATCH];
    } request;
    struct known known;
    uint64_t offset = 0;

    if (file->persist.persistence != PCOW_PERSISTENCE_PMEM)
        return 0;
    read_list(file, &known);
    while (known.count) {
        memset(&request, 0, sizeof request);
        request.map.fm_start = offset;
        request.map.fm_length = FIEMAP_MAX_OFFSET - offset;
        request.map.fm_extent_count = BATCH;
        if (ioctl(file->fd, FS_IOC_FIEMAP, &request))
            return errno == EOPNOTSUPP ? 0 : -errno;
        for (unsigned i = 0; i < request.map.fm_mapped_extents; i++) {
            int ret = add_extent(file, &known, &request.extent[i]);

            if (ret)
                return ret;
            offset = request.extent[i].fe_logical + request.extent[i].fe_length;
        }
        if (request.map.fm_mapped_extents < BATCH)
            break;
    }
    return 0;
}
