/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/dax.h"

#include <string.h>

/*
 * fs_dax_get_by_bdev() wants a partition that begins and ends with a page of memory, and where the
 * page tables shall map 2 MiB at once, both addresses are multiples of that
 * (Documentation/filesystems/dax.rst).
 */
#define SECTOR 512u
#define SMALL_PAGE 4096u
#define LARGE_PAGE (2u << 20)

static const char *why_without(struct arena *arena, const struct volume *root, unsigned version,
                               bool fs_dax, bool initrd)
{
    if (strcmp(root->type, "ext4") != 0 && strcmp(root->type, "xfs") != 0)
        return arena_format(arena, "%s has none", root->type);
    if (!fs_dax)
        return "the kernel was built without it";
    if (root->start % SMALL_PAGE)
        return "the partition does not begin at a multiple of 4 KiB";
    if (root->reflink && root->partition)
        return "XFS with reflink has none in a partition";
    if (!root->dax)
        return "the file system cannot be mounted so, as with blocks other than of 4 KiB";
    if (root->cut && !initrd)
        return "the partition does not end at a multiple of 4 KiB, and there is no initrd";
    /* older kernels refuse to mount XFS with both */
    if (root->reflink && version < 6002)
        return "XFS with reflink has none before Linux 6.2";
    return NULL;
}

struct dax dax_choose(struct arena *arena, const struct volume *root, unsigned version, bool fs_dax,
                      bool initrd)
{
    struct dax dax = {.option = NULL};

    if (!root)
        return dax;
    dax.why = why_without(arena, root, version, fs_dax, initrd);
    if (dax.why) {
        dax.why = arena_format(arena, "the root on %s is used without DAX: %s", root->device,
                               dax.why);
        return dax;
    }
    dax.option = version >= 5008 ? "dax=always" : "dax";
    if (root->cut)
        dax.cut = arena_format(arena, "%.*s %u %llu %llu",
                               (int)(strrchr(root->device, 'p') - root->device), root->device,
                               root->partition, (unsigned long long)root->start / SECTOR,
                               (unsigned long long)root->size / SECTOR);
    if (root->start % LARGE_PAGE)
        dax.why = arena_format(arena,
                               "the root on %s is mapped in pages of 4 KiB: the partition does not "
                               "begin at a multiple of 2 MiB",
                               root->device);
    return dax;
}
