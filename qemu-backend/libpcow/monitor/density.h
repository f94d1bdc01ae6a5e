/* SPDX-License-Identifier: BSD-3-Clause */
/* What the guest uses of what traps bring in. */
#ifndef PCOW_MONITOR_DENSITY_H
#define PCOW_MONITOR_DENSITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct density {
    int pagemap;                       /* of this process; -1: not to be had */
    /* the guest uses more than a page or two of what a trap brings in */
    bool dense;
    uint32_t windows;                  /* so far */
    const uint8_t *sample;             /* the window that is watched */
    /* that the guest fills the slabs that it begins, see density_begin_slab() */
    uint32_t trust;
    uint32_t slabs;                    /* begun while it was trusted to */
};

/* Should the page table be filled for this window of mapped pages? Async-signal-safe. */
void density_open(struct density *density);
void density_close(struct density *density);
/* How many of these pages, 16 at most, the page table has; -1: not to be had. */
int density_present(const struct density *density, const uint8_t *address, unsigned pages);
/* Is this page mapped by an entry of 2 MiB? False if the kernel does not say. */
bool density_is_huge(const struct density *density, const uint8_t *address);
/* Has the guest lately used what traps brought in? */
bool density_is_high(const struct density *density);
bool density_wants(struct density *density, const uint8_t *window, unsigned pages);
/* What the page table has there says nothing about the guest any more. */
void density_forget(struct density *density, const uint8_t *from, size_t length);
/*
 * The first store to a slab that nothing holds: should all of it be brought in? If not, and the
 * guest fills it, density_completed() is to be told.
 */
bool density_begin_slab(struct density *density);
void density_completed(struct density *density);

#endif
