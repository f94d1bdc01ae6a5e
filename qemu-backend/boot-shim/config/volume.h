/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The guest's file systems, mounted read-only. No path leads out of the one that it is meant for.
 */
#ifndef SHIM_CONFIG_VOLUME_H
#define SHIM_CONFIG_VOLUME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "config/arena.h"

#define VOLUMES_MAX 64

struct volume {
    int root; /* its directory, open */
    unsigned disk; /* which of the disks, from 0 */
    unsigned partition; /* from 1; 0: the whole disk */
    char device[32]; /* pmem0p1 */
    uint64_t start, size; /* bytes in front of it on the disk, and of it; of a partition */
    char type[8]; /* ext4, xfs, btrfs, vfat */
    char uuid[40]; /* lower case, as Linux and GRUB write it */
    char label[64];
    char partuuid[40]; /* "" if it is no partition */
    bool dirty; /* ext4: its journal was not replayed, so where files lie may be old */
    bool dax; /* it could be mounted so */
    bool cut; /* only after the kernel was told of an end at a multiple of 4 KiB */
    bool reflink; /* XFS, whose older kernels then refuse DAX */
};

struct volumes {
    struct volume item[VOLUMES_MAX];
    size_t count;
    char refused[VOLUMES_MAX][32]; /* devices that were said not to be had */
    size_t refused_count;
};

enum file_kind { KIND_ANY, KIND_FILE, KIND_DIRECTORY };

/* A path that begins anywhere is one from the root of the file system. -1 and errno on failure. */
int volume_open(const struct volume *volume, const char *path);
bool volume_has(const struct volume *volume, const char *path, enum file_kind kind);
/* Bytes, 0 if it is none. */
size_t volume_size(const struct volume *volume, const char *path);
/*
 * The content of a regular file of at most limit bytes, with a zero byte behind it; NULL if there
 * is none or it is longer.
 */
char *volume_read(struct arena *arena, const struct volume *volume, const char *path, size_t limit,
                  size_t *length);
/* Names in a directory that end so, sorted; at most 4096 are looked at. */
size_t volume_list(struct arena *arena, const struct volume *volume, const char *path,
                   const char *suffix, char ***names);

/* GRUB's names: hd0, hd0,gpt1, hd0,msdos1, hd0,1. NULL if there is none. */
const struct volume *volumes_find(const struct volumes *volumes, const char *grub_name,
                                  size_t length);
char *volume_grub_name(struct arena *arena, const struct volume *volume);

#endif
