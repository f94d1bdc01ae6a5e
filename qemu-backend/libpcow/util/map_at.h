/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef PCOW_UTIL_MAP_AT_H
#define PCOW_UTIL_MAP_AT_H

#include <errno.h>

#include "util/order.h"

/*
 * mmap() at this address or not at all: 0 or a negative errno. With MAP_FIXED over what is there;
 * with MAP_FIXED_NOREPLACE only where nothing is, or -EEXIST (not for MAP_SHARED_VALIDATE, to which
 * the kernel refuses the flag). Async-signal-safe.
 */
static inline int map_at(void *address, size_t length, int protection, int flags, int fd,
                         off_t offset)
{
    void *mapped = order_mmap(address, length, protection, flags, fd, offset);

    if (mapped == MAP_FAILED)
        return -errno;
    /* who does not know MAP_FIXED_NOREPLACE (Linux 4.17) takes the address for a hint */
    if (mapped != address) {
        munmap(mapped, length);
        return -EEXIST;
    }
    return 0;
}

#endif
