/* SPDX-License-Identifier: BSD-3-Clause */
/* userfaultfd as the paper's method needs it. */
#ifndef BENCH_UFFD_H
#define BENCH_UFFD_H

#include <stddef.h>
#include <stdint.h>

/* A descriptor that is ready for use, or a negative errno. */
int bench_uffd_open(void);
int bench_uffd_register(int fd, void *address, size_t length);
void bench_uffd_wake(int fd, void *address, size_t length);
void bench_uffd_zero_page(int fd, void *address);
/* The page of the next fault; NULL when the descriptor is done. */
void *bench_uffd_wait(int fd);

#endif
