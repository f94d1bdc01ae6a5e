/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/firmware.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define BIOS_DATA 0x400
/* Offsets in struct boot_params, which begins with struct screen_info. */
#define AT_COLUMN 0x00
#define AT_ROW 0x01
#define AT_PAGE 0x04
#define AT_MODE 0x06
#define AT_COLUMNS 0x07
#define AT_LINES 0x0e
#define AT_IS_VGA 0x0f
#define AT_POINTS 0x10
#define AT_EFI_SIGNATURE 0x1c0
/* Offsets in the BIOS data area. */
#define BIOS_MODE 0x49
#define BIOS_COLUMNS 0x4a
#define BIOS_CURSOR 0x50
#define BIOS_PAGE 0x62
#define BIOS_LAST_LINE 0x84
#define BIOS_POINTS 0x85
#define TEXT_MODE 3

void firmware_screen(unsigned char *params, const unsigned char bios_data[BIOS_DATA_SIZE])
{
    if (params[AT_LINES] || params[AT_COLUMNS] || params[AT_IS_VGA])
        return;
    /* Without a display the BIOS leaves zeros; a mode with graphics has no text to go on with. */
    if (bios_data[BIOS_MODE] != TEXT_MODE || !bios_data[BIOS_COLUMNS] || bios_data[BIOS_PAGE] > 7
        || !bios_data[BIOS_LAST_LINE] || bios_data[BIOS_LAST_LINE] == 0xff)
        return;
    params[AT_COLUMN] = bios_data[BIOS_CURSOR + 2 * bios_data[BIOS_PAGE]];
    params[AT_ROW] = bios_data[BIOS_CURSOR + 2 * bios_data[BIOS_PAGE] + 1];
    params[AT_PAGE] = bios_data[BIOS_PAGE];
    params[AT_MODE] = TEXT_MODE;
    params[AT_COLUMNS] = bios_data[BIOS_COLUMNS];
    params[AT_LINES] = (unsigned char)(bios_data[BIOS_LAST_LINE] + 1);
    params[AT_IS_VGA] = 1;
    params[AT_POINTS] = bios_data[BIOS_POINTS];
}

static void read_screen(unsigned char *params)
{
    unsigned char data[BIOS_DATA_SIZE];
    int fd = open("/dev/mem", O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    if (pread(fd, data, sizeof data, BIOS_DATA) == (ssize_t)sizeof data)
        firmware_screen(params, data);
    close(fd);
}

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
    read_screen(params);
    return 0;
}
