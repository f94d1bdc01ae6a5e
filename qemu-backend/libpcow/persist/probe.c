/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "persist/persist.h"
#include "util/error.h"

const char *pcow_persistence_name(enum pcow_persistence persistence)
{
    switch (persistence) {
    case PCOW_PERSISTENCE_PMEM:
        return "pmem";
    case PCOW_PERSISTENCE_PAGE_CACHE:
        return "page-cache";
    case PCOW_PERSISTENCE_VOLATILE:
        break;
    }
    return "volatile";
}

unsigned pcow_persistence_survives(enum pcow_persistence persistence, bool flushed)
{
    return persistence != PCOW_PERSISTENCE_VOLATILE && flushed
               ? PCOW_SURVIVES_PROCESS | PCOW_SURVIVES_HOST | PCOW_SURVIVES_POWER
               : PCOW_SURVIVES_PROCESS;
}

int pcow_probe_persistence(const char *path, enum pcow_persistence *persistence,
                           struct pcow_error *error)
{
    struct stat st;
    int fd;

    if (stat(path, &st))
        return error_set_errno(error, -errno, "cannot look at %s", path);
    if (S_ISDIR(st.st_mode)) {
        fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (fd >= 0 && ftruncate(fd, (off_t)PCOW_PAGE_SIZE)) {
            int code = -errno;

            close(fd);
            return error_set_errno(error, code, "cannot make a probe file in %s", path);
        }
    } else {
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    if (fd < 0)
        return error_set_errno(error, -errno, "cannot open %s to find its persistence class", path);
    *persistence = persist_classify(fd);
    close(fd);
    return 0;
}
