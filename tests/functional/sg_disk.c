// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: a loop device that takes SCSI commands, as a disk with SG_IO does: the kernel itself
 * moves the data between the buffers of the command and the disk.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <scsi/sg.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define BLOCK 512
#define BLOCKS (16u << 11)             /* 16 MiB */
#define VERSION 30000

enum { INQUIRY = 0x12, READ_CAPACITY = 0x25, READ = 0x28, WRITE = 0x2a };

static void answer(const sg_io_hdr_t *header, const void *data, size_t length)
{
    if (!header->dxfer_len)
        return;
    memset(header->dxferp, 0, header->dxfer_len);
    memcpy(header->dxferp, data, length < header->dxfer_len ? length : header->dxfer_len);
}

static int transfer(int fd, sg_io_hdr_t *header, int is_read)
{
    struct iovec one = {header->dxferp, header->dxfer_len},
                 *buffers = header->iovec_count ? header->dxferp : &one;
    int count = header->iovec_count ? header->iovec_count : 1;
    uint32_t block;
    ssize_t moved;

    memcpy(&block, header->cmdp + 2, sizeof(block));
    moved = is_read ? preadv(fd, buffers, count, (off_t)be32toh(block) * BLOCK)
                    : pwritev(fd, buffers, count, (off_t)be32toh(block) * BLOCK);
    if (moved == (ssize_t)header->dxfer_len)
        return 0;
    errno = EFAULT;
    return -1;
}

static int command(int fd, sg_io_hdr_t *header)
{
    static const uint8_t inquiry[36] = {0, 0, 5, 2, 31, [8] = 'p', 'c', 'o', 'w'};
    uint32_t capacity[2] = {htobe32(BLOCKS - 1), htobe32(BLOCK)};

    header->status = header->host_status = header->driver_status = 0;
    header->resid = 0;
    switch (header->cmdp[0]) {
    case INQUIRY:
        answer(header, inquiry, header->cmdp[1] & 1 ? 0 : sizeof(inquiry));
        return 0;
    case READ_CAPACITY:
        answer(header, capacity, sizeof(capacity));
        return 0;
    case READ:
    case WRITE:
        return transfer(fd, header, header->cmdp[0] == READ);
    default:
        answer(header, "", 0);
        return 0;
    }
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    void *argument;

    va_start(arguments, request);
    argument = va_arg(arguments, void *);
    va_end(arguments);
    if (request == SG_GET_VERSION_NUM) {
        *(int *)argument = VERSION;
        return 0;
    }
    if (request == SG_IO)
        return command(fd, argument);
    return (int)syscall(SYS_ioctl, fd, request, argument);
}
