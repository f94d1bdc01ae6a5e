/* SPDX-License-Identifier: BSD-3-Clause */
#include "list_cache.h"

#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "list_file.h"

#define SECOND_NS INT64_C(1000000000)
/*
 * Longer than a tick of any clock that sets the time of a file: ext4 with inodes of 128 bytes keeps
 * whole seconds.
 */
#define SETTLED_NS (2 * SECOND_NS)
#define MAX_ENTRIES 1000000u

/* The number at the end is that of the layout of struct pcow_summary: raise it with that. */
static const char magic[8] = {'p', 'c', 'o', 'w', 'l', 's', 't', '2'};
_Static_assert(sizeof(struct pcow_summary) == 384, "the layout has changed");

#define BOOT_ID "/proc/sys/kernel/random/boot_id"
#define BOOT_ID_SIZE 40u

struct head {
    char magic[8];
    uint32_t entry_size, count;
    uint64_t device;
    /*
     * After a crash of the host a file may have what was changed, and still the time of before:
     * data can be made durable alone.
     */
    char boot_id[BOOT_ID_SIZE];
    uint64_t sum;                               /* of the entries */
};

static uint64_t sum_of(const struct pcow_summary *entries, uint32_t count)
{
    const unsigned char *bytes = (const unsigned char *)entries;
    size_t length = count * sizeof(*entries);
    uint64_t sum = UINT64_C(0xcbf29ce484222325), word;

    for (size_t i = 0; i + sizeof(word) <= length; i += sizeof(word)) {
        memcpy(&word, bytes + i, sizeof(word));
        sum = (sum ^ word) * UINT64_C(0x100000001b3);
        sum ^= sum >> 32;
    }
    return sum;
}

static bool read_boot_id(char id[BOOT_ID_SIZE])
{
    int fd = open(BOOT_ID, O_RDONLY | O_CLOEXEC);
    bool found;

    memset(id, 0, BOOT_ID_SIZE);
    found = fd >= 0 && read(fd, id, BOOT_ID_SIZE) > 0;
    if (fd >= 0) {
        close(fd);
    }
    return found;
}

static uint32_t slot_of(const struct list_cache *cache, uint64_t inode)
{
    return (uint32_t)(inode * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (cache->slots - 1);
}

static bool make_index(struct list_cache *cache)
{
    for (cache->slots = 64; cache->slots < 2 * cache->count;) {
        cache->slots *= 2;
    }
    cache->index = calloc(cache->slots, sizeof(*cache->index));
    cache->is_used = calloc(cache->count + 1, sizeof(*cache->is_used));
    if (!cache->index || !cache->is_used) {
        return false;
    }
    for (uint32_t i = 0; i < cache->count; i++) {
        uint32_t slot = slot_of(cache, cache->entries[i].version.inode);

        while (cache->index[slot]) {
            /* Each file is there once, or it takes long to look for any. */
            if (cache->entries[cache->index[slot] - 1].version.inode
                == cache->entries[i].version.inode) {
                return false;
            }
            slot = (slot + 1) & (cache->slots - 1);
        }
        cache->index[slot] = i + 1;
    }
    return true;
}

/* Whoever wrote it: no text without an end, and nothing but 0 and 1 where that is all there is. */
static bool is_sound(const struct pcow_summary *entry)
{
    static const size_t flags[] = {
        offsetof(struct pcow_summary, steady),
        offsetof(struct pcow_summary, sealed),
        offsetof(struct pcow_summary, has_base),
    };

    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        if (((const unsigned char *)entry)[flags[i]] > 1) {
            return false;
        }
    }
    return memchr(entry->base_name, '\0', sizeof(entry->base_name));
}

static bool load(struct list_cache *cache, int fd)
{
    struct head head;
    struct stat st;

    if (!list_file_is_ours(fd, &st) || !read_whole(fd, &head, sizeof(head))
        || memcmp(head.magic, magic, sizeof(magic))
        || memcmp(head.boot_id, cache->boot_id, BOOT_ID_SIZE)
        || head.entry_size != sizeof(*cache->entries) || head.device != cache->device
        || head.count > MAX_ENTRIES
        || (uint64_t)st.st_size != sizeof(head) + (uint64_t)head.count * head.entry_size) {
        return false;
    }
    cache->entries = malloc((head.count + 1) * sizeof(*cache->entries));
    if (!cache->entries || !read_whole(fd, cache->entries, head.count * sizeof(*cache->entries))
        || sum_of(cache->entries, head.count) != head.sum) {
        return false;
    }
    for (uint32_t i = 0; i < head.count; i++) {
        if (!is_sound(&cache->entries[i])) {
            return false;
        }
    }
    cache->room = head.count + 1;
    cache->count = cache->known = head.count;
    return make_index(cache);
}

static void forget(struct list_cache *cache)
{
    free(cache->entries);
    free(cache->index);
    free(cache->is_used);
    cache->entries = NULL;
    cache->index = NULL;
    cache->is_used = NULL;
    cache->count = cache->known = cache->room = 0;
}

void list_cache_open(struct list_cache *cache, const char *path, int directory)
{
    struct timespec now;
    struct stat st;
    int fd;

    memset(cache, 0, sizeof(*cache));
    cache->place = -1;
    if (!path || fstat(directory, &st) || !list_file_can_be_kept(directory)) {
        return;
    }
    if (!read_boot_id(cache->boot_id)) {
        return;
    }
    cache->place = list_file_place(path, &cache->name);
    if (cache->place < 0) {
        return;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    cache->device = st.st_dev;
    cache->now = now.tv_sec * SECOND_NS + now.tv_nsec;
    fd = openat(cache->place, cache->name,
                O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW);
    if (fd >= 0) {
        if (!load(cache, fd)) {
            forget(cache);
        }
        close(fd);
    }
}

const struct pcow_summary *list_cache_find(struct list_cache *cache, const struct stat *st)
{
    uint32_t slot, found;

    if (!cache->known) {
        return NULL;
    }
    for (slot = slot_of(cache, st->st_ino); (found = cache->index[slot]);
         slot = (slot + 1) & (cache->slots - 1)) {
        const struct pcow_version *version = &cache->entries[found - 1].version;

        if (version->inode == st->st_ino && version->size == (uint64_t)st->st_size
            && version->blocks == (uint64_t)st->st_blocks
            && version->changed == st->st_ctim.tv_sec * SECOND_NS + st->st_ctim.tv_nsec
            && cache->device == st->st_dev) {
            cache->used += !cache->is_used[found - 1];
            cache->is_used[found - 1] = true;
            return &cache->entries[found - 1];
        }
    }
    return NULL;
}

void list_cache_add(struct list_cache *cache, const struct pcow_summary *summary)
{
    /* Nor of a time to come: the clock was set back, and may come to show it once more. */
    if (!list_cache_is_used(cache) || !summary->steady
        || cache->now - summary->version.changed < SETTLED_NS || cache->count == MAX_ENTRIES) {
        return;
    }
    if (cache->count == cache->room) {
        uint32_t room = cache->room ? 2 * cache->room : 64;
        void *entries = realloc(cache->entries, room * sizeof(*cache->entries));

        if (!entries) {
            return;
        }
        cache->entries = entries;
        cache->room = room;
    }
    cache->entries[cache->count++] = *summary;
    cache->added++;
}

static void save(const struct list_cache *cache)
{
    struct head head = {
        .entry_size = sizeof(*cache->entries),
        .count = cache->count,
        .device = cache->device,
        .sum = sum_of(cache->entries, cache->count),
    };
    char name[NAME_MAX + 1];
    int fd;

    memcpy(head.magic, magic, sizeof(magic));
    memcpy(head.boot_id, cache->boot_id, BOOT_ID_SIZE);
    if (snprintf(name, sizeof(name), "%s" LIST_FILE_NEW, cache->name) >= (int)sizeof(name)
        || (fd = list_file_new(cache->place, name)) < 0) {
        return;
    }
    /* Not flushed: what a power cut leaves of it has another sum. */
    if (!write_whole(fd, &head, sizeof(head))
        || !write_whole(fd, cache->entries, cache->count * sizeof(*cache->entries))
        || renameat(cache->place, name, cache->place, cache->name)) {
        unlinkat(cache->place, name, 0);
    }
    close(fd);
}

static void drop_unused(struct list_cache *cache)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < cache->count; i++) {
        if (i >= cache->known || cache->is_used[i]) {
            cache->entries[kept++] = cache->entries[i];
        }
    }
    cache->count = kept;
}

void list_cache_close(struct list_cache *cache, bool complete)
{
    /* To write all of it for each image that comes or goes costs more than to look at a few. */
    if (list_cache_is_used(cache) && complete
        && (cache->added > 15 + cache->used / 256 || cache->known > 64 + 2 * cache->used)) {
        drop_unused(cache);
        save(cache);
    }
    if (list_cache_is_used(cache)) {
        close(cache->place);
    }
    forget(cache);
}
