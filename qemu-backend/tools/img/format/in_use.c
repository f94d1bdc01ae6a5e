/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/in_use.h"

#include <errno.h>
#include <fcntl.h>

#include "report.h"

int check_not_in_use(int fd, const char *path, struct pcow_error *error)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

    if (!fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK) {
        return fail(error, -EBUSY,
                    "%s is in use by another process; stop it first, or choose another destination",
                    path);
    }
    return 0;
}
