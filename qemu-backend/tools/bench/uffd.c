/* SPDX-License-Identifier: BSD-3-Clause */
#include "uffd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pcow.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int bench_uffd_open(void)
{
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC), fd = -1;
    struct uffdio_api api = {.api = UFFD_API};

    if (device >= 0) {
#ifdef USERFAULTFD_IOC_NEW
        fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC);
#endif
        close(device);
    }
    if (fd < 0) {
        fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    }
    if (fd < 0) {
        return -errno;
    }
    if (ioctl(fd, UFFDIO_API, &api)) {
        int code = -errno;

        close(fd);
        return code;
    }
    return fd;
}

int bench_uffd_register(int fd, void *address, size_t length)
{
    struct uffdio_register range = {.range = {(uintptr_t)address, length},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};

    return ioctl(fd, UFFDIO_REGISTER, &range) ? -errno : 0;
}

void bench_uffd_wake(int fd, void *address, size_t length)
{
    struct uffdio_range range = {(uintptr_t)address, length};

    ioctl(fd, UFFDIO_WAKE, &range);
}

void bench_uffd_zero_page(int fd, void *address)
{
    struct uffdio_zeropage zero = {.range = {(uintptr_t)address, PCOW_PAGE_SIZE}};

    ioctl(fd, UFFDIO_ZEROPAGE, &zero);
}

void *bench_uffd_wait(int fd)
{
    struct uffd_msg message;

    for (;;) {
        /*
         * A blocking read: a poll before it, as published, doubles the latency. The paper's method
         * is given its best.
         */
        ssize_t got = read(fd, &message, sizeof(message));

        if (got < 0 && (errno == EINTR || errno == EAGAIN)) {
            continue;
        }
        if (got != (ssize_t)sizeof(message)) {
            return NULL;
        }
        if (message.event == UFFD_EVENT_PAGEFAULT) {
            return (void *)(uintptr_t)(message.arg.pagefault.address & ~(PCOW_PAGE_SIZE - 1));
        }
    }
}
