/* SPDX-License-Identifier: BSD-3-Clause */
#include "peer.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAX_LABEL 512

/* "PROFILE (MODE)\n", or "unconfined\n". */
static ssize_t read_label(int64_t pid, char *label, size_t size)
{
    char path[64];
    ssize_t length;
    int fd;

    snprintf(path, sizeof path, "/proc/%" PRId64 "/attr/apparmor/current", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    length = read(fd, label, size);
    close(fd);
    return length;
}

bool peer_is_confined_by(int64_t pid, const char *profile)
{
    size_t length = strlen(profile);
    char label[MAX_LABEL];
    ssize_t found = pid > 0 ? read_label(pid, label, sizeof label) : -1;

    if (!length || found < (ssize_t)length + 2) {
        return false;
    }
    return !memcmp(label, profile, length) && !memcmp(label + length, " (", 2);
}
