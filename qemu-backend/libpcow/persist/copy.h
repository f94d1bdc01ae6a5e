/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Copies whose source may turn out to be unreadable in the middle: memory that has lost its
 * content, which nobody knows before it is loaded (the machine then interrupts the load, and the
 * kernel sends SIGBUS). A target may be such memory, too. Async-signal-safe.
 */
#ifndef PCOW_PERSIST_COPY_H
#define PCOW_PERSIST_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* As memcpy(): 0, or -EIO; then a part may have been copied. */
int copy_bytes(void *to, const void *from, size_t length);
/*
 * The same with non-temporal stores; both addresses are multiples of 16 bytes, the length of 64. To
 * be fenced. Whole lines written so are not read first and leave the caches to the guest: half the
 * cost of copy + clwb, two thirds of that of memcpy() for much data. Going through four pages side
 * by side gives the memory more to do at a time.
 */
int copy_past_caches(void *to, const void *from, size_t length);
/* Load a byte, so that the kernel maps its page: false if it cannot be loaded. */
bool copy_touch(const void *at);

/*
 * SIGBUS was met at this place (a ucontext_t): if it is an access of these copies, let them go on
 * with -EIO.
 */
bool copy_fail_at(void *context);

#endif
