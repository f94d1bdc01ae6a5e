/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/probe.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define EXT4_AT 0x400
#define EXT4_RECOVER 4 /* of its incompatible features */
#define BTRFS_AT 0x10000
#define XFS_REFLINK 4u

static bool read_at(int fd, off_t offset, void *data, size_t size)
{
    return pread(fd, data, size, offset) == (ssize_t)size;
}

static uint32_t get32(const unsigned char *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void set_uuid(char *text, const unsigned char *id)
{
    for (unsigned i = 0; i < 16; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";

        text += sprintf(text, "%s%02x", dash, id[i]);
    }
}

static void set_label(struct volume *volume, const unsigned char *label, size_t size)
{
    if (size > sizeof volume->label - 1)
        size = sizeof volume->label - 1;
    memcpy(volume->label, label, size);
    volume->label[size] = '\0';
}

static bool probe_ext4(int fd, struct volume *volume)
{
    unsigned char block[0x100];

    if (!read_at(fd, EXT4_AT, block, sizeof block) || memcmp(block + 0x38, "\x53\xef", 2) != 0)
        return false;
    strcpy(volume->type, "ext4");
    volume->dirty = block[0x60] & EXT4_RECOVER;
    set_uuid(volume->uuid, block + 0x68);
    set_label(volume, block + 0x78, 16);
    return true;
}

static bool probe_xfs(int fd, struct volume *volume)
{
    unsigned char block[0x100];

    if (!read_at(fd, 0, block, sizeof block) || memcmp(block, "XFSB", 4) != 0)
        return false;
    strcpy(volume->type, "xfs");
    set_uuid(volume->uuid, block + 32);
    set_label(volume, block + 108, 12);
    /* sb_features_ro_compat, big-endian, of version 5 */
    volume->reflink = (block[101] & 0xf) == 5 && (block[215] & XFS_REFLINK);
    return true;
}

static bool probe_btrfs(int fd, struct volume *volume)
{
    unsigned char block[0x200];

    if (!read_at(fd, BTRFS_AT, block, sizeof block) || memcmp(block + 0x40, "_BHRfS_M", 8) != 0)
        return false;
    strcpy(volume->type, "btrfs");
    set_uuid(volume->uuid, block + 0x20);
    set_label(volume, block + 0x12b, 63);
    return true;
}

static bool probe_vfat(int fd, struct volume *volume)
{
    unsigned char block[512];
    const unsigned char *serial;
    unsigned end = 11;

    if (!read_at(fd, 0, block, sizeof block) || block[510] != 0x55 || block[511] != 0xaa)
        return false;
    if (memcmp(block + 0x52, "FAT32", 5) == 0)
        serial = block + 0x43;
    else if (memcmp(block + 0x36, "FAT1", 4) == 0)
        serial = block + 0x27;
    else
        return false;
    strcpy(volume->type, "vfat");
    sprintf(volume->uuid, "%02x%02x-%02x%02x", serial[3], serial[2], serial[1], serial[0]);
    while (end && serial[4 + end - 1] == ' ')
        end--;
    set_label(volume, serial + 4, end);
    return true;
}

/* What this shim cannot look into. */
static bool probe_other(int fd, struct volume *volume)
{
    unsigned char block[4096];

    if (!read_at(fd, 0, block, sizeof block))
        return false;
    if (memcmp(block, "LUKS\xba\xbe", 6) == 0)
        strcpy(volume->type, "LUKS");
    for (unsigned i = 0; i < 4 && !*volume->type; i++)
        if (memcmp(block + i * 512, "LABELONE", 8) == 0)
            strcpy(volume->type, "LVM");
    return *volume->type != '\0';
}

bool probe_volume(int fd, struct volume *volume)
{
    return probe_ext4(fd, volume) || probe_btrfs(fd, volume) || probe_xfs(fd, volume)
           || probe_vfat(fd, volume) || probe_other(fd, volume);
}

static void set_guid(char *text, const unsigned char *id)
{
    static const unsigned char order[16] = {3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15};
    unsigned char swapped[16];

    for (unsigned i = 0; i < 16; i++)
        swapped[i] = id[order[i]];
    set_uuid(text, swapped);
}

void probe_partition(int disk, unsigned partition, char uuid[static 40])
{
    unsigned char block[512], entry[128];
    uint32_t size, signature;
    uint64_t at;

    *uuid = '\0';
    if (!partition || !read_at(disk, 512, block, sizeof block))
        return;
    if (memcmp(block, "EFI PART", 8) == 0) {
        at = get32(block + 72) | (uint64_t)get32(block + 76) << 32;
        size = get32(block + 84);
        if (partition > get32(block + 80) || size < 128 || size > 4096 || at > INT64_MAX / 1024)
            return;
        at = at * 512 + (uint64_t)(partition - 1) * size;
        if (read_at(disk, (off_t)at, entry, sizeof entry))
            set_guid(uuid, entry + 16);
    } else if (read_at(disk, 0, block, sizeof block) && block[510] == 0x55 && block[511] == 0xaa) {
        signature = get32(block + 440);
        if (signature)
            snprintf(uuid, 40, "%08x-%02x", signature, partition);
    }
}
