/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * System calls that store to the guest's memory some time after they have looked up its page, as
 * those with O_DIRECT do: whatever is mapped there by then, what they have stored must be found.
 * The kernel waits in between for the source, a page that somebody brings late (userfaultfd).
 */
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_TRIES 1000u
#define LATEST_NS 200000u
#define MUCH_LATER 20u                 /* so many times, now and then */
#define LOOK_MS 20

static void *bring(void *opaque)
{
    struct call *call = opaque;
    uint64_t seed = (uintptr_t)call | 1;
    struct pollfd waits = {.fd = call->fd, .events = POLLIN};
    struct uffdio_copy copy = {
        .dst = (uintptr_t)call->source, .src = (uintptr_t)call->data, .len = PAGE};
    struct uffd_msg message;

    while (!atomic_load(&call->stop)) {
        long times = below(&seed, 8) ? 1 : MUCH_LATER;
        struct timespec late = {0, times * (long)below(&seed, LATEST_NS)};

        if (poll(&waits, 1, LOOK_MS) != 1
            || read(call->fd, &message, sizeof message) != sizeof message)
            continue;
        nanosleep(&late, NULL);
        /* One fault may be told twice: the second time its page may have been for the last call. */
        pthread_mutex_lock(&call->busy);
        if (call->is_awaited)
            ioctl(call->fd, UFFDIO_COPY, &copy);
        pthread_mutex_unlock(&call->busy);
    }
    return NULL;
}

/* Without userfaultfd (of who is not root, it may be forbidden) nobody brings it late. */
void call_begin(struct call *call)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range = {(uintptr_t)call->source, PAGE},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    sigset_t all, before;

    call->source = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    call->fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    range.range.start = (uintptr_t)call->source;
    atomic_store(&call->stop, false);
    pthread_mutex_init(&call->busy, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    call->late = call->source != MAP_FAILED && call->fd >= 0
                 && ioctl(call->fd, UFFDIO_API, &api) == 0
                 && ioctl(call->fd, UFFDIO_REGISTER, &range) == 0
                 && pthread_create(&call->thread, NULL, bring, call) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void call_end(struct call *call)
{
    atomic_store(&call->stop, true);
    if (call->late)
        pthread_join(call->thread, NULL);
    if (call->fd >= 0)
        close(call->fd);
    if (call->source != MAP_FAILED)
        munmap(call->source, PAGE);
    pthread_mutex_destroy(&call->busy);
}

/*
 * -EFAULT may be the answer of a call for which the memory was asked in time: a watch begins, or it
 * was withdrawn. Then it was not stored to.
 */
static bool store_once(const struct world *world, struct call *call, uint64_t at, uint64_t value)
{
    struct iovec from = {call->late ? (void *)call->source : call->data, sizeof value},
                 to = {world->memory + at, sizeof value};
    ssize_t moved;

    pthread_mutex_lock(&call->busy);
    memcpy(call->data, &value, sizeof value);
    call->is_awaited = true;
    pthread_mutex_unlock(&call->busy);
    moved = process_vm_writev(getpid(), &from, 1, &to, 1, 0);
    pthread_mutex_lock(&call->busy);
    call->is_awaited = false;
    if (call->late)
        madvise(call->source, PAGE, MADV_DONTNEED);
    pthread_mutex_unlock(&call->busy);
    if (moved != sizeof value && (moved >= 0 || errno != EFAULT))
        wrong(world, "a system call that stores returns %zd, errno %d", moved, errno);
    return moved == sizeof value;
}

bool call_store(const struct world *world, struct call *call, uint64_t at, uint64_t value)
{
    for (unsigned tries = 0; tries < MOST_TRIES; tries++) {
        int ret = pcow_map_resolve(world->map, at, sizeof value, true, NULL);

        if (ret == -ENOSPC)
            return false;
        if (ret)
            wrong(world, "pcow_map_resolve() for a system call returns %d", ret);
        if (store_once(world, call, at, value))
            return true;
    }
    wrong(world, "a system call that stores to %llu fails %u times", (unsigned long long)at,
          MOST_TRIES);
}
