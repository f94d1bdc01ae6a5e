/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The first program of the guest's initramfs (rdinit=): load the modules that its root on
 * persistent memory needs, in the order of their names, tell the kernel of an end of its partition
 * with which it has DAX, and go on as if nothing had been.
 */
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECTOR 512
#define SECTORS_OF_PAGE 8
#define DEVICES "/pcow/dev"
/* Without the root there is nothing to go on to. */
#define WAIT_SECONDS 60

static void load_modules(void)
{
    for (unsigned number = 0; number < 100; number++) {
        char path[32];
        int fd;

        snprintf(path, sizeof path, "/pcow/%02u.ko", number);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return;
        /* one that is there already is as well */
        (void)syscall(SYS_finit_module, fd, "", 0);
        close(fd);
        unlink(path);
    }
}

static ssize_t read_file(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    if (fd < 0)
        return -1;
    n = read(fd, text, size - 1);
    text[n > 0 ? n : 0] = '\0';
    close(fd);
    return n;
}

/* A driver finds its devices in its own time. */
static int wait_open(const char *path)
{
    static const struct timespec pause = {.tv_nsec = 10000000};

    for (unsigned tries = 0; tries < WAIT_SECONDS * 100; tries++) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);

        if (fd >= 0)
            return fd;
        nanosleep(&pause, NULL);
    }
    return -1;
}

static int cut(const char *disk, long long number, long long start, long long size)
{
    struct blkpg_partition partition = {
        .start = start * SECTOR,
        .length = size / SECTORS_OF_PAGE * SECTORS_OF_PAGE * SECTOR,
        .pno = (int)number,
    };
    struct blkpg_ioctl_arg argument = {
        .op = BLKPG_RESIZE_PARTITION,
        .datalen = sizeof partition,
        .data = &partition,
    };
    unsigned long long now = 0;
    char path[64];
    int fd, result;

    snprintf(path, sizeof path, DEVICES "/%sp%lld", disk, number);
    fd = wait_open(path);
    if (fd < 0)
        return -1;
    result = ioctl(fd, BLKGETSIZE64, &now);
    close(fd);
    if (result || now != (unsigned long long)size * SECTOR)
        return -1;
    snprintf(path, sizeof path, DEVICES "/%s", disk);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    result = ioctl(fd, BLKPG, &argument);
    close(fd);
    return result;
}

/* What the shim has found out of the root: DISK NUMBER START SIZE, in sectors. */
static void cut_root(void)
{
    char text[128], *at = text;
    const char *disk;
    long long number, start, size;

    if (read_file("/pcow/cut", text, sizeof text) <= 0)
        return;
    disk = strsep(&at, " ");
    number = at ? strtoll(at, &at, 10) : 0;
    start = at ? strtoll(at, &at, 10) : 0;
    size = at ? strtoll(at, &at, 10) : 0;
    mkdir(DEVICES, 0755);
    if (mount("devtmpfs", DEVICES, "devtmpfs", MS_NOSUID | MS_NOEXEC, NULL)
        || cut(disk, number, start, size))
        dprintf(2, "pcow boot: the kernel takes no other end of %sp%lld: no DAX\n", disk, number);
    umount2(DEVICES, MNT_DETACH);
    rmdir(DEVICES);
    unlink("/pcow/cut");
}

int main(int argc, char **argv, char **environment)
{
    char next[256];

    (void)argc;
    if (read_file("/pcow/next", next, sizeof next) < 0)
        strcpy(next, "/init");
    load_modules();
    cut_root();
    argv[0] = next;
    execve(next, argv, environment);
    dprintf(2, "pcow boot: the guest's initramfs has no %s\n", next);
    return 1;
}
