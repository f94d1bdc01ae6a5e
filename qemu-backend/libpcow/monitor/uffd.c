/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "uffd": absent memory is anonymous memory registered with userfaultfd, so its first touch is noticed whoever makes it:
 * user code, a system call, or KVM. One thread serves it, with a blocking read (a poll before it doubles the latency).
 * Regular files cannot be registered, so copy-on-write of read-only mappings stays with SIGSEGV.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "util/error.h"

/* A descriptor that sees kernel faults too: from the device (its mode decides who may), or by privilege. */
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
        .mode = UFFDIO_REGISTER_MODE_MISSING,
    };

    return ioctl(map->uffd, UFFDIO_REGISTER, &range) ? -errno : 0;
}

static void wake(struct pcow_map *map, void *address, size_t length)
{
    struct uffdio_range range = {(uintptr_t)address, length};

    ioctl(map->uffd, UFFDIO_WAKE, &range);
}

/* Let the access find a page that nothing is behind, so that a thread that cannot be served is not stuck for ever. */
static void fail_access(struct pcow_map *map, uint64_t address)
{
    uint64_t slab = (address - (uintptr_t)map->address) & ~(PCOW_SLAB_SIZE - 1);

    /* No access at all: the waiting instruction runs again and gets SIGSEGV, or EFAULT in a system call. */
    mmap(map->address + slab, PCOW_SLAB_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    map->slabs[slab >> SLAB_BITS].cold = 1;
}

static void *serve(void *opaque)
{
    struct pcow_map *map = opaque;
    struct uffd_msg message;

    for (;;) {
        ssize_t got = read(map->uffd, &message, sizeof message);
        uint64_t address;

        if (got < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (got != sizeof message)
            return NULL;
        if (message.event != UFFD_EVENT_PAGEFAULT)
            continue;
        address = message.arg.pagefault.address & ~(PCOW_PAGE_SIZE - 1);
        if (address == (uintptr_t)map->uffd_stop_page) {
            struct uffdio_zeropage zero = {.range = {address, PCOW_PAGE_SIZE}};

            ioctl(map->uffd, UFFDIO_ZEROPAGE, &zero);
            return NULL;
        }
        __atomic_fetch_add(message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE ? &map->stats.write_traps : &map->stats.read_traps,
                           1, __ATOMIC_RELAXED);
        /* Read or write, it becomes a cluster of the file: anonymous memory must never hold what the guest stored. */
        if (resolve(map, address - (uintptr_t)map->address, true, true))
            fail_access(map, address);
        /* Everything that this may have mapped, so that nobody waits for a neighbour that is there. */
        wake(map, (void *)(address & ~(PCOW_SLAB_SIZE - 1)), PCOW_SLAB_SIZE);
    }
}

static int prepare(struct pcow_map *map, struct pcow_error *error)
{
    struct uffdio_api api = {.api = UFFD_API};
    int ret;

    map->uffd = open_userfaultfd();
    if (map->uffd < 0)
        return error_set_errno(error, -errno, "userfaultfd is not available to this process; "
                               "give its user access to /dev/userfaultfd (see pcowctl doctor) or use the signal engine");
    if (ioctl(map->uffd, UFFDIO_API, &api)) {
        ret = error_set_errno(error, -errno, "userfaultfd of this kernel cannot be used; use the signal engine");
        goto close_fd;
    }
    map->uffd_stop_page = mmap(NULL, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

static int start(struct pcow_map *map, struct pcow_error *error)
{
    int ret = -pthread_create(&map->uffd_thread, NULL, serve, map);

    map->uffd_running = ret == 0;
    return ret ? error_set_errno(error, ret, "cannot start the userfaultfd thread") : 0;
}

static void stop(struct pcow_map *map)
{
    if (map->uffd_running) {
        /* The thread sits in a blocking read; a fault of our own on a page it knows is what ends it. */
        *(volatile uint8_t *)map->uffd_stop_page;
        pthread_join(map->uffd_thread, NULL);
    }
    munmap(map->uffd_stop_page, PCOW_PAGE_SIZE);
    close(map->uffd);
    map->uffd = -1;
}

static int map_absent(struct pcow_map *map, void *address, size_t length)
{
    if (mmap(address, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return -errno;
    return register_range(map, address, length);
}

const struct engine uffd_engine = {PCOW_ENGINE_UFFD, prepare, start, stop, map_absent, wake};
