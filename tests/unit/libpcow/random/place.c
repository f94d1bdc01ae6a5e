/* SPDX-License-Identifier: BSD-3-Clause */
/* File systems for pools, mounted in a namespace of mounts of this process: they go with it. */
#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

static const struct {
    const char *name, *make;
    unsigned mebibytes;
} file_systems[] = {
    {"ext4-4k", "mkfs.ext4 -q -F -m 0 -b 4096", 320},
    {"ext4-1k", "mkfs.ext4 -q -F -m 0 -b 1024", 320},
    {"xfs", "mkfs.xfs -q -f", 512},
    {"xfs-1k", "mkfs.xfs -q -f -b size=1024", 512},
};

static bool run(const char *command)
{
    int status = system(command);

    if (status)
        fprintf(stderr, "%s: %d\n", command, status);
    return status == 0;
}

static bool make_file_system(const char *make, unsigned mebibytes, const char *directory)
{
    char command[900];
    bool made;

    /* The loop device goes with the mount. */
    snprintf(command, sizeof command,
             "truncate -s %uM %s.disk && %s %s.disk >/dev/null && mount -o loop %s.disk %s",
             mebibytes, directory, make, directory, directory, directory);
    made = run(command);
    snprintf(command, sizeof command, "%s.disk", directory);
    unlink(command);
    return made;
}

bool place_make(struct place *place, const char *directory)
{
    char options[64];

    place->directory = directory;
    if (place->is_given)
        return true;
    if (place->is_tmpfs) {
        snprintf(options, sizeof options, "size=%um", place->mebibytes);
        return mount("pcow-test", directory, "tmpfs", 0, options) == 0;
    }
    for (unsigned i = 0; i < sizeof file_systems / sizeof *file_systems; i++)
        if (strcmp(file_systems[i].name, place->name) == 0)
            return make_file_system(file_systems[i].make, file_systems[i].mebibytes, directory);
    return false;
}
