/* SPDX-License-Identifier: BSD-3-Clause */
/* Where a file of what is dropped lies: its name, its room, who may read it. */
#include "check/rescue.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "util/error.h"

#define MAX_ATTEMPTS 1000u
/* What is left free of the file system: a part of it, and no more than guests need for a while. */
#define MARGIN_PART 32u
#define MOST_MARGIN (UINT64_C(64) << 20)

void rescue_first_words(const struct check *check, char words[RESCUE_FIRST_SIZE])
{
    int used = snprintf(words, RESCUE_FIRST_SIZE, "{\"pcow-rescue\": 1, \"uuid\": \"");

    for (unsigned i = 0; i < PCOW_UUID_SIZE; i++)
        used +=
            snprintf(words + used, RESCUE_FIRST_SIZE - (size_t)used, "%02x", check->header.uuid[i]);
    snprintf(words + used, RESCUE_FIRST_SIZE - (size_t)used, "\"");
}

/* Was it left by a repair of this image that was interrupted? */
static bool is_unfinished(const struct check *check, const char *path)
{
    char expected[RESCUE_FIRST_SIZE], found[RESCUE_FIRST_SIZE], end[sizeof RESCUE_FINISHED - 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    size_t length;
    struct stat st;
    bool ours, ended;

    rescue_first_words(check, expected);
    length = strlen(expected);
    if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    /* A crash may have come before what was written first was on the medium. */
    ours = pread(fd, found, length, 0) < (ssize_t)length || found[0] == 0
           || !memcmp(found, expected, length);
    ended = st.st_size >= (off_t)sizeof end
            && pread(fd, end, sizeof end, st.st_size - (off_t)sizeof end) == (ssize_t)sizeof end
            && !memcmp(end, RESCUE_FINISHED, sizeof end);
    close(fd);
    return ours && !ended;
}

/* The first name that is free; those before are of repairs that were interrupted. */
int rescue_create(struct check *check, char **path)
{
    struct pcow_check_result *result = check->result;
    size_t size = strlen(check->file.path) + sizeof result->rescue_suffix;
    int fd, reason = 0;

    *path = malloc(size);
    if (!*path)
        return error_set(check->error, -ENOMEM, "out of memory");
    for (unsigned i = 1; i <= MAX_ATTEMPTS; i++) {
        if (i == 1)
            snprintf(result->rescue_suffix, sizeof result->rescue_suffix, ".rescue");
        else
            snprintf(result->rescue_suffix, sizeof result->rescue_suffix, ".rescue-%u", i);
        snprintf(*path, size, "%s%s", check->file.path, result->rescue_suffix);
        fd = open(*path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0)
            return fd;
        reason = errno;
        if (reason != EEXIST || !is_unfinished(check, *path))
            break;
    }
    result->rescue_suffix[0] = 0;
    return reason == EEXIST
               ? error_set(check->error, -EEXIST,
                           "%s is there, which keeps what an earlier repair dropped; look at it "
                           "with pcow-img rescue, and move it away or delete it first. Nothing was "
                           "repaired",
                           *path)
               : error_set_errno(check->error, -reason, "cannot create %s; nothing was repaired",
                                 *path);
}

/* Who may read the image may read what was in it, and nobody else. */
int rescue_take_mode(const struct check *check, int fd)
{
    struct stat st;

    if (fstat(check->file.fd, &st))
        return -errno;
    if (fchown(fd, st.st_uid, st.st_gid))
        st.st_mode &= ~(mode_t)(S_IRWXG | S_IRWXO);
    return fchmod(fd, st.st_mode & 0666) ? -errno : 0;
}

int rescue_sync_directory(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1,
        ret = fd < 0 || fsync(fd) ? -errno : 0;

    if (fd >= 0)
        close(fd);
    free(copy);
    return ret;
}

/* Of the file system beside the name that was given, which may be a link to the image. */
static int ask_room(const char *path, struct statvfs *room)
{
    char *copy = strdup(path);
    int ret = copy ? statvfs(dirname(copy), room) : -1;

    free(copy);
    return ret;
}

/* A pool that is filled to the brim stops the guests that are in it: so much is left to them. */
static uint64_t margin_of(const struct statvfs *room)
{
    uint64_t size = (uint64_t)room->f_blocks * room->f_frsize / MARGIN_PART;

    return size < MOST_MARGIN ? size : MOST_MARGIN;
}

int rescue_check_room(struct check *check, uint64_t needed)
{
    struct statvfs room;
    uint64_t there, margin;

    if (ask_room(check->file.path, &room) || room.f_blocks == 0)
        return 0;
    there = (uint64_t)room.f_bavail * room.f_frsize;
    margin = margin_of(&room);
    if (there >= margin && needed < there - margin)
        return 0;
    return error_set(check->error, -ENOSPC,
                     "%s: what a repair would drop needs %llu bytes beside it, and there are %llu, "
                     "of which %llu have to stay free; make room there, or repair a copy "
                     "elsewhere. Nothing was repaired",
                     check->file.path, (unsigned long long)needed, (unsigned long long)there,
                     (unsigned long long)margin);
}
