/* SPDX-License-Identifier: BSD-3-Clause */
#include "list_bases.h"

#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "list_file.h"

#define SECOND_NS INT64_C(1000000000)
#define MAX_RECORDS 4000000u

/* The number at the end is that of the layout of struct image_base. */
static const char magic[8] = {'p', 'c', 'o', 'w', 'b', 'a', 's', '1'};
_Static_assert(sizeof(struct image_base) == 56, "the layout has changed");
_Static_assert(offsetof(struct image_base, sum) % sizeof(uint64_t) == 0, "whole words");

static uint64_t sum_of(const struct image_base *entry)
{
    uint64_t sum = UINT64_C(0xcbf29ce484222325), word;

    for (size_t i = 0; i < offsetof(struct image_base, sum); i += sizeof(word)) {
        memcpy(&word, (const unsigned char *)entry + i, sizeof(word));
        sum = (sum ^ word) * UINT64_C(0x100000001b3);
        sum ^= sum >> 32;
    }
    return sum;
}

static uint32_t slot_of(const struct list_bases *bases, uint64_t inode)
{
    return (uint32_t)(inode * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (bases->slots - 1);
}

/* Where a file is in the index, or would be. */
static uint32_t *place_of(const struct list_bases *bases, uint64_t inode)
{
    uint32_t slot = slot_of(bases, inode), found;

    while ((found = bases->index[slot]) && bases->entries[found - 1].inode != inode) {
        slot = (slot + 1) & (bases->slots - 1);
    }
    return &bases->index[slot];
}

static void forget(struct list_bases *bases)
{
    free(bases->entries);
    free(bases->index);
    free(bases->is_used);
    bases->entries = NULL;
    bases->index = NULL;
    bases->is_used = NULL;
    bases->count = bases->known = bases->room = bases->records = 0;
}

/* Of one file the last record counts; one that is torn, or was never written, none. */
static bool make_index(struct list_bases *bases)
{
    for (bases->slots = 64; bases->slots < 2 * bases->records;) {
        bases->slots *= 2;
    }
    bases->index = calloc(bases->slots, sizeof(*bases->index));
    bases->is_used = calloc(bases->records + 1, sizeof(*bases->is_used));
    if (!bases->index || !bases->is_used) {
        return false;
    }
    for (uint32_t i = 0; i < bases->records; i++) {
        struct image_base entry = bases->entries[i];
        uint32_t *place = place_of(bases, entry.inode);

        if (entry.sum != sum_of(&entry) || entry.has_base > 1 || entry.sealed > 1) {
            bases->is_torn = true;
        } else if (*place) {
            bases->entries[*place - 1] = entry;
        } else {
            bases->entries[bases->known++] = entry;
            *place = bases->known;
        }
    }
    bases->count = bases->known;
    return true;
}

static bool load(struct list_bases *bases, int fd)
{
    char head[sizeof(magic)];
    struct stat st;
    uint64_t length;

    if (!list_file_is_ours(fd, &st) || st.st_nlink != 1 || !read_whole(fd, head, sizeof(head))
        || memcmp(head, magic, sizeof(magic))) {
        return false;
    }
    length = (uint64_t)st.st_size - sizeof(head);
    if (length / sizeof(*bases->entries) > MAX_RECORDS) {
        return false;
    }
    bases->records = (uint32_t)(length / sizeof(*bases->entries));
    bases->is_torn = length % sizeof(*bases->entries) != 0;
    bases->room = bases->records + 1;
    bases->entries = malloc(bases->room * sizeof(*bases->entries));
    return bases->entries
           && read_whole(fd, bases->entries, bases->records * sizeof(*bases->entries))
           && make_index(bases);
}

static bool name_of(const struct list_bases *bases, const char *end, char name[NAME_MAX + 1])
{
    return snprintf(name, NAME_MAX + 1, "%s" LIST_BASES "%s", bases->name, end) <= NAME_MAX;
}

static int open_file(const struct list_bases *bases, int flags)
{
    char name[NAME_MAX + 1];

    return name_of(bases, "", name)
               ? openat(bases->place, name, flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW)
               : -1;
}

void list_bases_open(struct list_bases *bases, const char *path, int directory)
{
    int fd;

    memset(bases, 0, sizeof(*bases));
    bases->place = -1;
    if (!path || !list_file_can_be_kept(directory)) {
        return;
    }
    bases->place = list_file_place(path, &bases->name);
    if (bases->place < 0) {
        return;
    }
    fd = open_file(bases, O_RDONLY);
    bases->is_new = fd < 0 || !load(bases, fd);
    if (bases->is_new) {
        forget(bases);
    }
    if (fd >= 0) {
        close(fd);
    }
}

bool list_bases_born(const struct list_bases *bases, const struct statx *stx,
                     struct image_base *image)
{
    if (bases->place < 0 || !(stx->stx_mask & STATX_BTIME)) {
        return false;
    }
    *image = (struct image_base){
        .inode = stx->stx_ino,
        .born = stx->stx_btime.tv_sec * SECOND_NS + stx->stx_btime.tv_nsec,
    };
    return true;
}

const struct image_base *list_bases_find(struct list_bases *bases, const struct image_base *image)
{
    uint32_t found = bases->known ? *place_of(bases, image->inode) : 0;

    if (!found || bases->entries[found - 1].born != image->born) {
        return NULL;
    }
    bases->used += !bases->is_used[found - 1];
    bases->is_used[found - 1] = true;
    return &bases->entries[found - 1];
}

static bool make_room(struct list_bases *bases)
{
    uint32_t room = bases->room ? 2 * bases->room : 64;
    void *entries;

    if (bases->count < bases->room) {
        return true;
    }
    entries = bases->count < MAX_RECORDS ? realloc(bases->entries, room * sizeof(*bases->entries))
                                         : NULL;
    if (!entries) {
        return false;
    }
    bases->entries = entries;
    bases->room = room;
    return true;
}

void list_bases_add(struct list_bases *bases, const struct image_base *image,
                    const struct pcow_summary *summary)
{
    struct image_base now = {
        .inode = image->inode,
        .born = image->born,
        .virtual_size = summary->virtual_size,
        .has_base = summary->has_base,
        .sealed = summary->sealed,
    };
    const struct image_base *known = list_bases_find(bases, image);

    if (summary->version.inode != image->inode) {   /* another file has come to its name */
        return;
    }
    if (summary->has_base) {
        memcpy(now.uuid, summary->base_uuid, sizeof(now.uuid));
    }
    now.sum = sum_of(&now);
    if ((!known || memcmp(known, &now, sizeof(now))) && make_room(bases)) {
        bases->entries[bases->count++] = now;
    }
}

/* What was found, and of that what is new behind what is old. */
static void save(struct list_bases *bases)
{
    char name[NAME_MAX + 1], new_name[NAME_MAX + 1];
    uint32_t kept = 0;
    int fd;

    for (uint32_t i = 0; i < bases->count; i++) {
        if (i >= bases->known || bases->is_used[i]) {
            bases->entries[kept++] = bases->entries[i];
        }
    }
    if (!name_of(bases, "", name) || !name_of(bases, LIST_FILE_NEW, new_name)
        || (fd = list_file_new(bases->place, new_name)) < 0) {
        return;
    }
    if (!write_whole(fd, magic, sizeof(magic))
        || !write_whole(fd, bases->entries, kept * sizeof(*bases->entries))
        || renameat(bases->place, new_name, bases->place, name)) {
        unlinkat(bases->place, new_name, 0);
    }
    close(fd);
}

/*
 * What is new, in one call: a list that ends at the same time loses nothing by it. Not flushed, as
 * what a power cut leaves of a record has another sum.
 */
static void append(const struct list_bases *bases)
{
    int fd = open_file(bases, O_WRONLY | O_APPEND);
    struct stat st;

    if (fd < 0) {
        return;
    }
    if (list_file_is_ours(fd, &st) && st.st_nlink == 1) {
        write_whole(fd, bases->entries + bases->known,
                    (bases->count - bases->known) * sizeof(*bases->entries));
    }
    close(fd);
}

void list_bases_close(struct list_bases *bases, bool complete)
{
    if (bases->place < 0) {
        return;
    }
    if (bases->is_new ? bases->count
                      : complete && (bases->is_torn || bases->records > 64 + 2 * bases->used)) {
        save(bases);
    } else if (bases->count > bases->known) {
        append(bases);
    }
    close(bases->place);
    forget(bases);
}
