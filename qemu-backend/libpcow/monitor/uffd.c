/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * userfaultfd, for the watch (watch.c): an access to memory that is registered with it is noticed
 * whoever makes it: user code, a system call, or KVM. A thread serves it, with a blocking read; it
 * never waits for space, which would make everybody else wait with it.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "util/error.h"
#include "util/order.h"

#define RETRY_INTERVAL_NS 10000000L

/*
 * A descriptor that sees kernel faults too: from the device (its mode decides who may), or by
 * privilege.
 */
static int open_userfaultfd(void)
{
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC), fd = -1;

    if (device >= 0) {
#ifdef USERFAULTFD_IOC_NEW
        fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC);
#endif
        close(device);
    }
    return fd >= 0 ? fd : (int)syscall(SYS_userfaultfd, O_CLOEXEC);
}

static int register_range(const struct pcow_map *map, void *address, size_t length)
{
    struct uffdio_register range = {
        .range = {(uintptr_t)address, length},
        .mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP,
    };

    return ioctl(map->uffd, UFFDIO_REGISTER, &range) ? -errno : 0;
}

int uffd_map(const struct pcow_map *map, void *address, size_t length)
{
    int ret;

    /*
     * Nobody may access it before it is registered: a store would stay there, and a load would see
     * zeros.
     */
    if (order_mmap(address, length, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
        == MAP_FAILED)
        return -errno;
    /*
     * A first touch would make the kernel clear a huge page, only to find then that userfaultfd
     * wants to know.
     */
    madvise(address, length, MADV_NOHUGEPAGE);
    ret = register_range(map, address, length);
    return ret || !mprotect(address, length, PROT_READ | PROT_WRITE) ? ret : -errno;
}

void uffd_wake(const struct pcow_map *map, void *address, size_t length)
{
    struct uffdio_range range = {(uintptr_t)address, length};

    ioctl(map->uffd, UFFDIO_WAKE, &range);
}

static void serve_fault(struct pcow_map *map, const struct uffd_msg *message)
{
    uint64_t offset =
        (message->arg.pagefault.address & ~(PCOW_PAGE_SIZE - 1)) - (uintptr_t)map->address;
    bool write = message->arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE;

    /*
     * Whoever waits for this may be awake already, if a neighbour was served, and everybody be
     * stopped for a snapshot. Its changes of the chain are not met half done: see gate.c. Not by
     * the lock of operations, as a handler in the thread of one may be who waits.
     */
    order_acquire(map);
    __atomic_fetch_add(write ? &map->stats.write_traps : &map->stats.read_traps, 1,
                       __ATOMIC_RELAXED);
    map->uffd_serve(map, offset, write);
    order_release(map);
    /* Everything that this may have mapped, so that nobody waits for a neighbour that is there. */
    uffd_wake(map, map->address + (offset & ~(PCOW_SLAB_SIZE - 1)), PCOW_SLAB_SIZE);
}

static void *serve(void *opaque)
{
    struct pcow_map *map = opaque;
    struct uffd_msg message;
    bool told = false;

    for (;;) {
        ssize_t got = read(map->uffd, &message, sizeof message);

        if (got < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        /* Whoever waits for this thread would wait for ever, and nobody knew why. */
        if (got != sizeof message) {
            const struct timespec interval = {0, RETRY_INTERVAL_NS};

            if (__atomic_load_n(&map->closing, __ATOMIC_RELAXED))
                return NULL;
            if (!told)
                events_post(&map->events, PCOW_EVENT_ERROR, got < 0 ? -errno : -EIO, 0);
            told = true;
            nanosleep(&interval, NULL);
            continue;
        }
        told = false;
        if (message.event != UFFD_EVENT_PAGEFAULT)
            continue;
        if ((message.arg.pagefault.address & ~(PCOW_PAGE_SIZE - 1))
            == (uintptr_t)map->uffd_stop_page) {
            struct uffdio_zeropage zero = {
                .range = {(uintptr_t)map->uffd_stop_page, PCOW_PAGE_SIZE}};

            ioctl(map->uffd, UFFDIO_ZEROPAGE, &zero);
            return NULL;
        }
        serve_fault(map, &message);
    }
}

int uffd_open(struct pcow_map *map, struct pcow_error *error)
{
    struct uffdio_api api = {.api = UFFD_API};
    int ret;

    if (map->uffd >= 0)
        return 0;
    map->uffd = open_userfaultfd();
    if (map->uffd < 0)
        return error_set_errno(error, -errno, "userfaultfd is not available to this process; "
                               "give its user access to /dev/userfaultfd (see pcowctl doctor)");
    if (ioctl(map->uffd, UFFDIO_API, &api)) {
        ret = error_set_errno(error, -errno, "userfaultfd of this kernel cannot be used");
        goto close_fd;
    }
    map->uffd_stop_page =
        mmap(NULL, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map->uffd_stop_page == MAP_FAILED) {
        ret = error_set(error, -ENOMEM, "out of memory");
        goto close_fd;
    }
    ret = register_range(map, map->uffd_stop_page, PCOW_PAGE_SIZE);
    if (ret == 0)
        return 0;
    error_set_errno(error, ret, "cannot register memory with userfaultfd");
    munmap(map->uffd_stop_page, PCOW_PAGE_SIZE);
close_fd:
    close(map->uffd);
    map->uffd = -1;
    return ret;
}

int uffd_start(struct pcow_map *map, uffd_serve_fn *serve_access, struct pcow_error *error)
{
    signal_mask before;
    int ret = 0;

    /*
     * Signals are for the program's own threads. But it copies: an error in memory must not be the
     * end of the process.
     */
    before = signals_change(SIG_SETMASK, ~SIGNALS_LEFT);
    if (!map->uffd_running) {
        map->uffd_serve = serve_access;
        ret = -pthread_create(&map->uffd_thread, NULL, serve, map);
    }
    signals_change(SIG_SETMASK, before);
    if (ret)
        return error_set_errno(error, ret, "cannot start the userfaultfd thread");
    map->uffd_running = true;
    return 0;
}

void uffd_close(struct pcow_map *map)
{
    if (map->uffd < 0)
        return;
    if (map->uffd_running) {
        /*
         * The thread sits in a blocking read; a fault of our own on a page it knows is what ends
         * it.
         */
        *(volatile uint8_t *)map->uffd_stop_page;
        pthread_join(map->uffd_thread, NULL);
        map->uffd_running = false;
    }
    munmap(map->uffd_stop_page, PCOW_PAGE_SIZE);
    close(map->uffd);
    map->uffd = -1;
}
