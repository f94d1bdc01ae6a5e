/* SPDX-License-Identifier: BSD-3-Clause */
/* Loads and stores that may end in SIGBUS: a full pool that is set to fail, or a medium error. */
#ifndef IO_GUARD_H
#define IO_GUARD_H

#include <stddef.h>

/* Install the handler; a SIGBUS elsewhere still ends the process. */
void guard_install(void);

/* memcpy(); -EFAULT if the memory answered with SIGBUS, and a part may then have been copied. */
int guarded_copy(void *to, const void *from, size_t length);

#endif
