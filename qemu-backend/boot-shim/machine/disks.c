/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/disks.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/probe.h"

#define DISKS_MAX 16
#define PARTITIONS_MAX 128
#define SECTOR 512u
#define PAGE 4096u
#define VIRTIO_PMEM_ID "0x105b\n"

static const char *const no_file_system[] = {"LUKS", "LVM"};

bool machine_has_nvdimm(void)
{
    return access("/sys/firmware/acpi/tables/NFIT", F_OK) == 0;
}

bool machine_has_virtio_pmem(void)
{
    DIR *devices = opendir("/sys/bus/pci/devices");
    struct dirent *entry;
    bool found = false;

    while (devices && !found && (entry = readdir(devices))) {
        char path[300], id[16] = "";
        int fd;

        snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/device", entry->d_name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (read(fd, id, sizeof id - 1) > 0)
            found = strcmp(id, VIRTIO_PMEM_ID) == 0;
        close(fd);
    }
    if (devices)
        closedir(devices);
    return found;
}

static bool try_mount(const struct volume *volume, const char *device, const char *directory,
                      bool dax)
{
    static const struct {
        const char *type, *options, *dax;
    } known[] = {
        {"ext4", "noload", "noload,dax=always"},
        {"xfs", "norecovery,nouuid", "norecovery,nouuid,dax=always"},
        {"btrfs", "rescue=nologreplay", NULL},
        {"vfat", "codepage=437,iocharset=ascii", NULL},
    };
    unsigned long flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;

    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].type, volume->type) == 0)
            return (!dax || known[i].dax)
                   && mount(device, directory, volume->type, flags,
                            dax ? known[i].dax : known[i].options)
                          == 0;
    return false;
}

/* Tell the kernel, and not the table on the disk, how large a partition is. */
static bool set_size(const struct volume *volume, uint64_t size)
{
    struct blkpg_partition partition = {
        .start = (long long)volume->start,
        .length = (long long)size,
        .pno = (int)volume->partition,
    };
    struct blkpg_ioctl_arg argument = {
        .op = BLKPG_RESIZE_PARTITION,
        .datalen = sizeof partition,
        .data = &partition,
    };
    char path[64];
    bool result;
    int fd;

    snprintf(path, sizeof path, "/dev/%.*s",
             (int)(strrchr(volume->device, 'p') - volume->device), volume->device);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    result = ioctl(fd, BLKPG, &argument) == 0;
    close(fd);
    return result;
}

/*
 * There is no DAX in a partition that does not end with a page of memory, and growpart ends it at
 * the last sector that GPT leaves: always such a one. The file system has no use for those sectors,
 * if its blocks are as large as DAX wants them.
 */
static bool try_dax(struct volume *volume, const char *device, const char *directory)
{
    /* at once, as the kernel says it aloud if it cannot */
    volume->cut = volume->partition && volume->size % PAGE
                  && set_size(volume, volume->size / PAGE * PAGE);
    if (try_mount(volume, device, directory, true))
        return true;
    if (volume->cut)
        set_size(volume, volume->size);
    volume->cut = false;
    return false;
}

/* It is said once, and not tried again while the shim waits for other disks. */
static void refuse(struct volumes *volumes, const char *device)
{
    if (volumes->refused_count < VOLUMES_MAX)
        strcpy(volumes->refused[volumes->refused_count++], device);
}

static void mount_volume(struct volumes *volumes, struct volume *volume)
{
    char device[64], directory[64];
    int fd, yes = 1;

    snprintf(device, sizeof device, "/dev/%s", volume->device);
    snprintf(directory, sizeof directory, "/volumes/%s", volume->device);
    fd = open(device, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (!probe_volume(fd, volume)) {
        close(fd);
        return;
    }
    for (size_t i = 0; i < sizeof no_file_system / sizeof *no_file_system; i++) {
        if (strcmp(no_file_system[i], volume->type) == 0) {
            printf("pcow boot: %s is %s, which this shim does not open\n", volume->device,
                   volume->type);
            refuse(volumes, volume->device);
            close(fd);
            return;
        }
    }
    /* whatever a file system's driver thinks of it */
    ioctl(fd, BLKROSET, &yes);
    close(fd);
    mkdir(directory, 0755);
    volume->dax = try_dax(volume, device, directory);
    if (!volume->dax && !try_mount(volume, device, directory, false)) {
        printf("pcow boot: the %s file system of %s cannot be mounted: %m\n", volume->type,
               volume->device);
        refuse(volumes, volume->device);
        return;
    }
    volume->root = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (volume->root >= 0 && volumes->count < VOLUMES_MAX)
        volumes->item[volumes->count++] = *volume;
    else
        refuse(volumes, volume->device);
}

/* Bytes of a partition; the kernel counts in 512 whatever the device does. */
static uint64_t read_bytes(const char *device, const char *name)
{
    unsigned long long sectors = 0;
    char path[80];
    FILE *file;

    snprintf(path, sizeof path, "/sys/class/block/%s/%s", device, name);
    file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%llu", &sectors) != 1)
            sectors = 0;
        fclose(file);
    }
    return (uint64_t)sectors * SECTOR;
}

static bool known(const struct volumes *volumes, const char *device)
{
    for (size_t i = 0; i < volumes->refused_count; i++)
        if (strcmp(volumes->refused[i], device) == 0)
            return true;
    for (size_t i = 0; i < volumes->count; i++)
        if (strcmp(volumes->item[i].device, device) == 0)
            return true;
    return false;
}

static void find_on(struct volumes *volumes, unsigned number, unsigned disk)
{
    char path[64];
    unsigned partitions = 0;
    int fd;

    snprintf(path, sizeof path, "/dev/pmem%u", number);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    for (unsigned partition = 1; partition <= PARTITIONS_MAX; partition++) {
        struct volume volume = {.disk = disk, .partition = partition, .root = -1};

        snprintf(path, sizeof path, "/dev/pmem%up%u", number, partition);
        if (access(path, F_OK) != 0)
            continue;
        partitions++;
        snprintf(volume.device, sizeof volume.device, "pmem%up%u", number, partition);
        if (known(volumes, volume.device))
            continue;
        probe_partition(fd, partition, volume.partuuid);
        volume.start = read_bytes(volume.device, "start");
        volume.size = read_bytes(volume.device, "size");
        mount_volume(volumes, &volume);
    }
    close(fd);
    if (!partitions) {
        struct volume volume = {.disk = disk, .root = -1};

        snprintf(volume.device, sizeof volume.device, "pmem%u", number);
        if (!known(volumes, volume.device))
            mount_volume(volumes, &volume);
    }
}

static int compare_numbers(const void *a, const void *b)
{
    const unsigned *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

size_t disks_find(struct volumes *volumes)
{
    DIR *blocks = opendir("/sys/block");
    unsigned numbers[DISKS_MAX];
    struct dirent *entry;
    size_t count = 0;

    while (blocks && count < DISKS_MAX && (entry = readdir(blocks))) {
        char rest;

        /* not pmem0s, a namespace in sectors, nor pmem0p1 */
        if (sscanf(entry->d_name, "pmem%u%c", &numbers[count], &rest) == 1)
            count++;
    }
    if (blocks)
        closedir(blocks);
    if (count)
        qsort(numbers, count, sizeof *numbers, compare_numbers);
    for (size_t i = 0; i < count; i++)
        find_on(volumes, numbers[i], (unsigned)i);
    return count;
}
