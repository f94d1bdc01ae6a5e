/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What each image of a directory stood on when it could be read, for the time when it cannot:
 * who has broken out of a QEMU can make the image of that QEMU unreadable, and nobody else's image
 * shall be kept for what it may stand on.
 *
 * An image is known by the number and the time of birth of its file, which the kernel alone sets.
 * That is true of an image that runs as well, and after the host was started again, so this lies
 * beside the list_cache, in a file that grows by what is new. What is lost of it is unknown, and
 * found out when the image can be read.
 */
#ifndef TOOLS_IMG_LIST_BASES_H
#define TOOLS_IMG_LIST_BASES_H

#include <pcow.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#define LIST_BASES ".bases"                     /* at the end of the name of the list_cache */

struct image_base {
    uint64_t inode;
    int64_t born;                               /* ns since the epoch */
    uint64_t virtual_size;
    uint8_t uuid[PCOW_UUID_SIZE];               /* of the base; zeros: it stands on none */
    uint8_t has_base, sealed, zero[6];
    uint64_t sum;                               /* of what is above */
};

struct list_bases {
    int place;                                  /* directory that it is in; -1: there is none */
    const char *name;                           /* of the list_cache */
    struct image_base *entries;
    uint32_t count, room;
    uint32_t known;                             /* entries from the file; others are behind them */
    bool *is_used;                              /* of the known ones */
    uint32_t *index, slots;                     /* of the known ones, by the number of the file */
    uint32_t used, records;                     /* how many the file has, with those that are old */
    bool is_new, is_torn;
};

/* path: of the list_cache; NULL: nothing is ever found.  It is kept. */
void list_bases_open(struct list_bases *bases, const char *path, int directory);
/* Of a file, by what the kernel says of it; false if it does not say when it was born. */
bool list_bases_born(const struct list_bases *bases, const struct statx *stx,
                     struct image_base *image);
/* What the tables of this file said when they could be read, or NULL. */
const struct image_base *list_bases_find(struct list_bases *bases, const struct image_base *image);
/* image: as list_bases_born() has found it, before the file was looked at. */
void list_bases_add(struct list_bases *bases, const struct image_base *image,
                    const struct pcow_summary *summary);
/* complete: the whole directory was listed; what was not found in it may be forgotten. */
void list_bases_close(struct list_bases *bases, bool complete);

#endif
