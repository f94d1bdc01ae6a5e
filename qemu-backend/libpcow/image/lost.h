/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Pages of a file that the kernel has told to be lost. On tmpfs it remembers that by itself. In the
 * page cache it drops such a page: whoever has it mapped gets SIGBUS, but any other mapping, and
 * any made later, shows what the disk has, which is older, or zeros. With DAX (Linux 6.1) it maps
 * the page again, or if the device knows better, refuses to in a way that KVM takes for a page that
 * has to be waited for: a vCPU tries for ever. So it is remembered here for as long as the file is
 * open.
 */
#ifndef PCOW_IMAGE_LOST_H
#define PCOW_IMAGE_LOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_LOST_PAGES 64u

struct file;

struct lost_pages {
    /* offsets in the file; 0, which is no page of data: none. Atomics */
    uint64_t page[MAX_LOST_PAGES];
    bool any;                         /* atomic; stays once it is set */
    /*
     * 0: none yet. An empty file: memory that maps it is SIGBUS for every access, whatever its
     * protection
     */
    int nothing;
};

/*
 * The page at this offset is lost: file_read() fails, and accesses through the windows are SIGBUS.
 * 0 or a negative errno.
 */
int lost_add(struct file *file, uint64_t offset);
/*
 * The same for all blocks of the file that its device knows to be bad (class pmem). -ENOSPC: there
 * are more than MAX_LOST_PAGES. Not for signal handlers.
 */
int lost_add_known(struct file *file);
/* Its blocks were given back: what comes there is new. Async-signal-safe. */
void lost_forget(struct file *file, uint64_t offset, uint64_t length);
/* Is there one in the range? Async-signal-safe. */
bool lost_is_in(const struct file *file, uint64_t offset, uint64_t length);
/* The first of them in [offset, end), or end. Async-signal-safe. */
uint64_t lost_next(const struct file *file, uint64_t offset, uint64_t end);
/*
 * A piece of the file was mapped: let no lost page of it show. 0 or a negative errno.
 * Async-signal-safe.
 */
int lost_cover(const struct file *file, void *address, size_t length, uint64_t offset,
               int protection);
void lost_close(struct file *file);

#endif
