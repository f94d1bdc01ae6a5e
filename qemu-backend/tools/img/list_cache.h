/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What was found out of the images of a directory, for the next list of it: a file that costs time
 * if it is lost, damaged or not there, and nothing else.
 *
 * An entry counts if the file is by its number, length, blocks and time of change the one that was
 * looked at. It is made only of what nobody had open for writing, and that had not been changed for
 * a while: whoever writes to an image changes its time first, to another one than that (see
 * pcow_summarize()). The time is set by the kernel, so only file systems count of which there is
 * one kernel, and only until the host is started again.
 *
 * The file counts if it belongs to this user, and nobody else may write to it: what it says decides
 * whether there is room, and what may be deleted.
 */
#ifndef TOOLS_IMG_LIST_CACHE_H
#define TOOLS_IMG_LIST_CACHE_H

#include <pcow.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

struct list_cache {
    int place;                                  /* directory that it is in; -1: there is none */
    const char *name;
    uint64_t device;                            /* of the directory that is listed */
    char boot_id[40];                           /* of the kernel that runs */
    int64_t now;                                /* when the list was begun */
    struct pcow_summary *entries;
    uint32_t count, room, added, used;
    uint32_t known;                             /* entries from the file; others are behind them */
    bool *is_used;                              /* of the known ones */
    uint32_t *index, slots;                     /* of the known ones, by the number of the file */
};

/* path NULL: nothing is ever found.  It is kept. */
void list_cache_open(struct list_cache *cache, const char *path, int directory);
static inline bool list_cache_is_used(const struct list_cache *cache)
{
    return cache->place >= 0;
}

/* What the tables of this file say, or NULL. */
const struct pcow_summary *list_cache_find(struct list_cache *cache, const struct stat *st);
/* Of a file that was not found. */
void list_cache_add(struct list_cache *cache, const struct pcow_summary *summary);
/* complete: the whole directory was listed; what was not found in it is forgotten. */
void list_cache_close(struct list_cache *cache, bool complete);

#endif
