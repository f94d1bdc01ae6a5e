/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/volume.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAMES_MAX 4096

int volume_open(const struct volume *volume, const char *path)
{
    struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
        /* As chroot(2) would have it: links that begin with '/' or have '..' stay inside. */
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
    };

    while (*path == '/')
        path++;
    return (int)syscall(SYS_openat2, volume->root, *path ? path : ".", &how, sizeof how);
}

static bool is_kind(mode_t mode, enum file_kind kind)
{
    return kind == KIND_ANY || (kind == KIND_FILE && S_ISREG(mode))
           || (kind == KIND_DIRECTORY && S_ISDIR(mode));
}

static bool look(const struct volume *volume, const char *path, struct stat *status)
{
    int fd = volume_open(volume, path);
    bool known = fd >= 0 && fstat(fd, status) == 0;

    if (fd >= 0)
        close(fd);
    return known;
}

bool volume_has(const struct volume *volume, const char *path, enum file_kind kind)
{
    struct stat status;

    return look(volume, path, &status) && is_kind(status.st_mode, kind);
}

size_t volume_size(const struct volume *volume, const char *path)
{
    struct stat status;

    return look(volume, path, &status) && S_ISREG(status.st_mode) ? (size_t)status.st_size : 0;
}

static bool read_all(int fd, char *data, size_t length)
{
    size_t done = 0;

    while (done < length) {
        ssize_t n = read(fd, data + done, length - done);

        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

char *volume_read(struct arena *arena, const struct volume *volume, const char *path, size_t limit,
                  size_t *length)
{
    int fd = volume_open(volume, path);
    char *data = NULL;
    struct stat status;
    bool no_room = false;

    if (fd < 0)
        return NULL;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size >= 0
        && (size_t)status.st_size <= limit) {
        *length = (size_t)status.st_size;
        data = arena_try(arena, *length + 1);
        no_room = !data;
        if (data && !read_all(fd, data, *length))
            data = NULL;
    }
    close(fd);
    if (no_room)
        arena_alloc(arena, limit + 1);
    return data;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool ends_with(const char *name, const char *suffix)
{
    size_t length = strlen(name), end = strlen(suffix);

    return length > end && strcmp(name + length - end, suffix) == 0;
}

size_t volume_list(struct arena *arena, const struct volume *volume, const char *path,
                   const char *suffix, char ***names)
{
    int fd = volume_open(volume, path);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    size_t count = 0, seen = 0, room = 0;
    char **found = NULL;
    struct dirent *entry;

    *names = NULL;
    if (!directory) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    while (seen++ < NAMES_MAX && (entry = readdir(directory))) {
        size_t length = strlen(entry->d_name);
        char *copy;

        if (!ends_with(entry->d_name, suffix))
            continue;
        if (count == room) {
            char **larger = arena_try(arena, (room + 16) * 2 * sizeof *larger);

            if (!larger)
                break;
            if (count)
                memcpy(larger, found, count * sizeof *larger);
            found = larger;
            room = (room + 16) * 2;
        }
        copy = arena_try(arena, length + 1);
        if (!copy)
            break;
        memcpy(copy, entry->d_name, length);
        found[count++] = copy;
    }
    closedir(directory);
    if (count)
        qsort(found, count, sizeof *found, compare_names);
    *names = found;
    return count;
}

static bool read_number(const char **text, const char *end, unsigned *value)
{
    const char *at = *text;

    for (*value = 0; at < end && *at >= '0' && *at <= '9' && *value < 100000; at++)
        *value = *value * 10 + (unsigned)(*at - '0');
    if (at == *text)
        return false;
    *text = at;
    return true;
}

static void skip_word(const char **text, const char *end, const char *word)
{
    size_t length = strlen(word);

    if ((size_t)(end - *text) >= length && memcmp(*text, word, length) == 0)
        *text += length;
}

const struct volume *volumes_find(const struct volumes *volumes, const char *grub_name,
                                  size_t length)
{
    const char *at = grub_name, *end = grub_name + length;
    unsigned disk, partition = 0;

    if (length < 3 || memcmp(at, "hd", 2) != 0)
        return NULL;
    at += 2;
    if (!read_number(&at, end, &disk))
        return NULL;
    if (at < end) {
        if (*at++ != ',')
            return NULL;
        skip_word(&at, end, "gpt");
        skip_word(&at, end, "msdos");
        if (!read_number(&at, end, &partition) || at != end)
            return NULL;
    }
    for (size_t i = 0; i < volumes->count; i++)
        if (volumes->item[i].disk == disk && volumes->item[i].partition == partition)
            return &volumes->item[i];
    return NULL;
}

char *volume_grub_name(struct arena *arena, const struct volume *volume)
{
    if (!volume->partition)
        return arena_format(arena, "hd%u", volume->disk);
    return arena_format(arena, "hd%u,gpt%u", volume->disk, volume->partition);
}
