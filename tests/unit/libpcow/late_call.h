/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A system call that stores, and that waits for its source after it has looked up where to. As one
 * with O_DIRECT it stores to the page that it found, whatever is mapped by then.
 */
#ifndef PCOW_TESTS_LATE_CALL_H
#define PCOW_TESTS_LATE_CALL_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

struct late_call {
    uint8_t *from, *to;
    ssize_t moved;
    int fd;
    pthread_t thread;
};

/* Begin to store a page, which is mapped for stores; it has been looked up. Needs root. */
void late_call_begin(struct late_call *call, uint8_t *to);
/* Let it store this byte everywhere, and wait for its end. */
void late_call_end(struct late_call *call, uint8_t with);

#endif
