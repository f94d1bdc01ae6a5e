/* SPDX-License-Identifier: BSD-3-Clause */
#include "huge.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define DIRECTORY "huge"

static const char *mount_private(const char *path)
{
    if (geteuid() != 0) {
        return "mounting a tmpfs with huge=always needs root";
    }
    if (mkdir(path, 0700) && errno != EEXIST) {
        return "no directory for it could be made in the pool";
    }
    /* Of this process alone: nobody has to unmount it, however the process ends. */
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
        return "no mount namespace could be made";
    }
    return mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "huge=always,size=100%,mode=700") ?
           "the kernel has no tmpfs with huge=always" : NULL;
}

/*
 * Huge pages are taken from what lies together; a machine that has run for a while has little of
 * that. Best effort.
 */
static void compact_memory(void)
{
    int fd = open("/proc/sys/vm/compact_memory", O_WRONLY | O_CLOEXEC);

    if (fd >= 0) {
        if (write(fd, "1", 1) != 1) {
            errno = 0;
        }
        close(fd);
    }
}

bool huge_pool_enter(struct bench *bench)
{
    size_t length = strlen(bench->directory) + sizeof("/" DIRECTORY);
    char *path;

    if (bench->persistence != PCOW_PERSISTENCE_VOLATILE) {
        bench->huge_problem = "they are made on a tmpfs; on this pool the other rows show what it "
                              "maps with huge pages";
        return false;
    }
    path = malloc(length);
    if (!path) {
        bench->huge_problem = "out of memory";
        return false;
    }
    memcpy(path, bench->directory, strlen(bench->directory));
    memcpy(path + strlen(bench->directory), "/" DIRECTORY, sizeof("/" DIRECTORY));
    bench->huge_problem = mount_private(path);
    if (bench->huge_problem) {
        free(path);
        return false;
    }
    compact_memory();
    bench->outer_directory = bench->directory;
    bench->directory = path;
    return true;
}

void huge_pool_leave(struct bench *bench)
{
    umount2(bench->directory, MNT_DETACH);
    free(bench->directory);
    bench->directory = bench->outer_directory;
    bench->outer_directory = NULL;
}
