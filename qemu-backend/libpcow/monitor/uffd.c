/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * userfaultfd, for two users. Engine "uffd": absent memory is anonymous memory registered with it, so that its first touch is noticed
 * whoever makes it: user code, a system call, or KVM. And the watch (watch.c). One thread serves both, with a blocking read (a poll
 * before it doubles the latency); it never waits for space, which would make everybody else wait with it.
 * Regular files cannot be registered, so copy-on-write of read-only mappings stays with SIGSEGV.
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

static int register_range(const struct pcow_map *map, void *address, size_t length, bool copies)
{
    struct uffdio_register range = {
        .range = {(uintptr_t)address, length},
        .mode = UFFDIO_REGISTER_MODE_MISSING | (copies ? UFFDIO_REGISTER_MODE_WP : 0),
    };

    return ioctl(map->uffd, UFFDIO_REGISTER, &range) ? -errno : 0;
}

/* Also of a process that has all of its memory locked. */
static int drop_pages(void *address, size_t length)
{
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24        /* Linux 5.18 */
#endif
    return madvise(address, length, MADV_DONTNEED) && (errno != EINVAL || madvise(address, length, MADV_DONTNEED_LOCKED)) ? -1 : 0;
}

int uffd_map(const struct pcow_map *map, void *address, size_t length, bool copies)
{
    int ret;

    /*
     * Nobody may store to it before it is registered: that would stay there. Absent memory may be loaded from, by system calls too, which
     * would get EFAULT otherwise: it is zeros. What is to be copied in is not.
     */
    if (order_mmap(address, length, copies ? PROT_NONE : PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return -errno;
    /* A first touch would make the kernel clear a huge page, only to find then that userfaultfd wants to know. */
    madvise(address, length, MADV_NOHUGEPAGE);
    ret = register_range(map, address, length, copies);
    if (ret)
        return ret;
    /* The zero pages of such loads: a store to one of them would not be reported. */
    if (!copies && drop_pages(address, length))
        return -errno;
    return mprotect(address, length, PROT_READ | PROT_WRITE) ? -errno : 0;
}

void uffd_wake(const struct pcow_map *map, void *address, size_t length)
{
    struct uffdio_range range = {(uintptr_t)address, length};

    if (map->uffd >= 0)
        ioctl(map->uffd, UFFDIO_WAKE, &range);
}

/* Without space: absent memory as the signal engine has it. Loads go on, and a store traps where its own thread can wait. */
static void make_read_only(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t start = guest_slab << SLAB_BITS;
    unsigned pages = (unsigned)((map->size - start) / PCOW_PAGE_SIZE < PAGES_PER_SLAB ? (map->size - start) / PCOW_PAGE_SIZE : PAGES_PER_SLAB);

    chain_claim(map->image->chain, guest_slab);
    for (unsigned page = 0; page < pages && !map->slabs[guest_slab].cold;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);

        if (!place.present)
            signal_engine.map_absent(map, map->address + start + page * PCOW_PAGE_SIZE, place.pages * PCOW_PAGE_SIZE, MAP_FIXED);
        page += place.pages;
    }
    chain_release(map->image->chain, guest_slab);
}

/*
 * No access at all: the waiting instruction runs again and gets SIGSEGV, and whoever serves that the error; a system call gets EFAULT. Who asks for the
 * next one has it mapped anew.
 */
static void make_inaccessible(struct pcow_map *map, uint64_t offset)
{
    uint64_t guest_slab = offset >> SLAB_BITS;

    chain_claim(map->image->chain, guest_slab);
    if (!page_set_has(&map->slabs[guest_slab].writable, (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB))) {
        map->slabs[guest_slab].behind = 1;         /* a load of what is present maps it anew */
        __atomic_store_n(&map->slabs[guest_slab].inaccessible, 1, __ATOMIC_RELEASE);
        order_mmap(map->address + offset, PCOW_PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
    chain_release(map->image->chain, guest_slab);
}

/* offset: of the page. Read or write, it becomes a cluster of the file: anonymous memory must never hold what the guest stored. */
static void serve_absent(struct pcow_map *map, uint64_t offset)
{
    int ret = resolve(map, offset, true, false);

    if (ret == -ENOSPC)
        make_read_only(map, offset >> SLAB_BITS);
    else if (ret)
        make_inaccessible(map, offset);
}

static void serve_fault(struct pcow_map *map, const struct uffd_msg *message)
{
    uint64_t offset = (message->arg.pagefault.address & ~(PCOW_PAGE_SIZE - 1)) - (uintptr_t)map->address;
    bool write = message->arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE;

    /*
     * Whoever waits for this may be awake already, if a neighbour was served, and everybody be stopped for a snapshot: its changes of
     * the chain must not be met half done.
     */
    ahead_hold(map);
    __atomic_fetch_add(write ? &map->stats.write_traps : &map->stats.read_traps, 1, __ATOMIC_RELAXED);
    if (!watch_serve(map, offset, write) && map->engine->id == PCOW_ENGINE_UFFD)
        serve_absent(map, offset);
    ahead_release(map);
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
        if ((message.arg.pagefault.address & ~(PCOW_PAGE_SIZE - 1)) == (uintptr_t)map->uffd_stop_page) {
            struct uffdio_zeropage zero = {.range = {(uintptr_t)map->uffd_stop_page, PCOW_PAGE_SIZE}};

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
    map->uffd_stop_page = mmap(NULL, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map->uffd_stop_page == MAP_FAILED) {
        ret = error_set(error, -ENOMEM, "out of memory");
        goto close_fd;
    }
    ret = register_range(map, map->uffd_stop_page, PCOW_PAGE_SIZE, false);
    if (ret == 0)
        return 0;
    error_set_errno(error, ret, "cannot register memory with userfaultfd");
    munmap(map->uffd_stop_page, PCOW_PAGE_SIZE);
close_fd:
    close(map->uffd);
    map->uffd = -1;
    return ret;
}

int uffd_start(struct pcow_map *map, struct pcow_error *error)
{
    sigset_t bus, before;
    int ret;

    /* It copies: an error in memory must not be the end of the process, whatever whoever starts it has blocked. */
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &bus, &before);
    ret = map->uffd_running ? 0 : -pthread_create(&map->uffd_thread, NULL, serve, map);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
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
        /* The thread sits in a blocking read; a fault of our own on a page it knows is what ends it. */
        *(volatile uint8_t *)map->uffd_stop_page;
        pthread_join(map->uffd_thread, NULL);
        map->uffd_running = false;
    }
    munmap(map->uffd_stop_page, PCOW_PAGE_SIZE);
    close(map->uffd);
    map->uffd = -1;
}

static int prepare(struct pcow_map *map, struct pcow_error *error)
{
    struct pcow_error reason;
    int ret = uffd_open(map, &reason);

    return ret ? error_set(error, ret, "%.900s; or use another engine", reason.message) : 0;
}

static int map_absent(struct pcow_map *map, void *address, size_t length, int fixed)
{
    (void)fixed;
    return uffd_map(map, address, length, false);
}

static void wake(struct pcow_map *map, void *address, size_t length)
{
    uffd_wake(map, address, length);
}

const struct engine uffd_engine = {PCOW_ENGINE_UFFD, prepare, uffd_start, uffd_close, map_absent, wake};
