/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/firmware.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* Offset in struct boot_params. */
#define AT_EFI_SIGNATURE 0x1c0

int firmware_params(unsigned char params[PARAMS_SIZE], struct failure *failure)
{
    int fd = open("/sys/kernel/boot_params/data", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, params, PARAMS_SIZE);

    if (fd >= 0)
        close(fd);
    if (n != PARAMS_SIZE)
        return fail_with(failure, -EIO, "the machine's boot parameters cannot be read: %s",
                         strerror(errno));
    if (memcmp(params + AT_EFI_SIGNATURE, "EL", 2) == 0)
        return fail_with(failure, -ENOTSUP,
                         "the machine was started by EFI firmware: the boot "
                         "shim goes on from BIOS only");
    return 0;
}
