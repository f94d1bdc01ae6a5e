/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Order that the kernel makes and ThreadSanitizer cannot see. In other builds all of this is
 * nothing.
 *
 * A thread that waits in a page fault goes on after the userfaultfd thread has served it: what it
 * did before is seen there, and what was done there is seen by it. Who stops all of those threads
 * (snapshot operations, the end of the map) knows both.
 */
#ifndef PCOW_UTIL_ORDER_H
#define PCOW_UTIL_ORDER_H

#include <sys/mman.h>

#if defined(__SANITIZE_THREAD__)
#define PCOW_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PCOW_THREAD_SANITIZER 1
#endif
#endif

#ifdef PCOW_THREAD_SANITIZER

#include <sys/syscall.h>
#include <unistd.h>

void __tsan_acquire(void *address);
void __tsan_release(void *address);

#define order_acquire(address) __tsan_acquire(address)
#define order_release(address) __tsan_release(address)

/*
 * Another mapping where other threads may be loading and storing: to them memory does not change,
 * but the sanitizer takes mmap() for a store to all of it.
 */
static inline void *order_mmap(void *address, size_t length, int protection, int flags, int fd,
                               off_t offset)
{
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

#else

#define order_acquire(address) ((void)(address))
#define order_release(address) ((void)(address))
#define order_mmap mmap

#endif
#endif
