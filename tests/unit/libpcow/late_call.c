/* SPDX-License-Identifier: BSD-3-Clause */
#include "late_call.h"

#include "support.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void *store_by_kernel(void *opaque)
{
    struct late_call *call = opaque;
    struct iovec local = {call->from, PCOW_PAGE_SIZE}, remote = {call->to, PCOW_PAGE_SIZE};

    call->moved = process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
    return NULL;
}

void late_call_begin(struct late_call *call, uint8_t *to)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.mode = UFFDIO_REGISTER_MODE_MISSING};
    struct uffd_msg message;

    call->to = to;
    call->fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    assert_true(call->fd >= 0);
    assert_int_equal(ioctl(call->fd, UFFDIO_API, &api), 0);
    call->from =
        mmap(NULL, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(call->from, MAP_FAILED);
    range.range = (struct uffdio_range){(uintptr_t)call->from, PCOW_PAGE_SIZE};
    assert_int_equal(ioctl(call->fd, UFFDIO_REGISTER, &range), 0);
    assert_int_equal(pthread_create(&call->thread, NULL, store_by_kernel, call), 0);
    /* It asks for its source when it has the page that it stores to. */
    assert_int_equal(read(call->fd, &message, sizeof message), sizeof message);
    assert_int_equal(message.event, UFFD_EVENT_PAGEFAULT);
}

void late_call_end(struct late_call *call, uint8_t with)
{
    static unsigned char data[PCOW_PAGE_SIZE];
    struct uffdio_copy copy = {
        .dst = (uintptr_t)call->from, .src = (uintptr_t)data, .len = sizeof data};

    memset(data, with, sizeof data);
    assert_int_equal(ioctl(call->fd, UFFDIO_COPY, &copy), 0);
    pthread_join(call->thread, NULL);
    assert_int_equal(call->moved, PCOW_PAGE_SIZE);
    munmap(call->from, sizeof data);
    close(call->fd);
}
