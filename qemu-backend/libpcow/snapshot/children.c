/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Finding the images that stand on a snapshot: by looking at every file of the directory, as
 * nothing else is sure to be true.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "snapshot/pin.h"

/*
 * For how long a directory is listed again in which something changes all the time; the VM may be
 * waiting.
 */
#define LISTS_NS INT64_C(300000000)
#define SECOND_NS INT64_C(1000000000)

enum answer { NO, YES, UNKNOWN };

/* Of a header as it lies in a file that may be damaged. */
static enum answer stands_on(const struct header *header, const uint8_t uuid[PCOW_UUID_SIZE],
                             uint32_t layer)
{
    uint64_t slot = word_value(header->base_slot);

    if (memcmp(header->magic, FORMAT2_MAGIC, sizeof header->magic))
        return NO;
    if (!word_is_valid(header->base_slot) || slot > 2)
        return UNKNOWN;
    if (slot == 0)
        return NO;
    if (header->base[slot - 1].crc != base_record_crc(&header->base[slot - 1]))
        return UNKNOWN;
    return header->base[slot - 1].layer == layer
                   && memcmp(header->base[slot - 1].uuid, uuid, PCOW_UUID_SIZE) == 0
               ? YES
               : NO;
}

static enum answer look_at(int directory, const char *name, const struct pcow_image *image,
                           uint32_t layer, struct children *children)
{
    struct header header;
    struct stat st;
    enum answer answer = UNKNOWN;
    ssize_t got;
    int fd;

    /*
     * What is no regular file is not opened: a device may not like it. A link leads to a file that
     * is found by its own name.
     */
    if (fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT ? NO : UNKNOWN;
    if (!S_ISREG(st.st_mode))
        return NO;
    if (st.st_dev == children->image.st_dev && st.st_ino == children->image.st_ino)
        children->names_of_image++;
    fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0)
        return errno == ENOENT ? NO : UNKNOWN;
    got = pread(fd, &header, sizeof header, 0);
    if (got >= 0)
        answer = (size_t)got < sizeof header ? NO : stands_on(&header, image->header.uuid, layer);
    close(fd);
    return answer;
}

static void add_name(struct children *children, const char *name)
{
    size_t used = strlen(children->names);

    children->count++;
    if (used + strlen(name) + 10 < sizeof children->names)
        snprintf(children->names + used, sizeof children->names - used, "%s'%s'", used ? ", " : "",
                 name);
    else if (used && children->names[used - 1] != '.')
        snprintf(children->names + used, sizeof children->names - used, ", ...");
}

static int list(int fd, DIR *entries, const struct pcow_image *image, uint32_t layer,
                struct children *children)
{
    const struct dirent *entry;

    memset(children, 0, sizeof *children);
    if (fstat(image->file.fd, &children->image))
        return -errno;
    rewinddir(entries);
    while (errno = 0, (entry = readdir(entries))) {
        enum answer answer = look_at(fd, entry->d_name, image, layer, children);

        if (answer == YES)
            add_name(children, entry->d_name);
        if (answer == UNKNOWN && children->unknown++ == 0)
            snprintf(children->first_unknown, sizeof children->first_unknown, "%s", entry->d_name);
    }
    return -errno;
}

static int64_t nanoseconds(const struct timespec *time)
{
    return time->tv_sec * SECOND_NS + time->tv_nsec;
}

/* File systems that keep whole seconds (ext4 with inodes of 128 bytes) say so by what they show. */
static int64_t granularity(const struct timespec *changed)
{
    struct timespec tick;

    clock_getres(CLOCK_REALTIME_COARSE, &tick);
    return changed->tv_nsec == 0 ? SECOND_NS : nanoseconds(&tick);
}

/*
 * Who lists a directory does not see a file for certain that is renamed meanwhile (readdir(3p)). So
 * nothing may have changed in it: neither during the list nor within the same tick of the clock
 * that tells when, before it.
 */
static int list_settled(int fd, DIR *entries, const struct pcow_image *image, uint32_t layer,
                        struct children *children)
{
    static const struct timespec moment = {0, 5000000};
    struct timespec begun, now;
    struct stat before, after;

    clock_gettime(CLOCK_MONOTONIC, &begun);
    do {
        int64_t age;
        int ret;

        if (fstat(fd, &before))
            return -errno;
        clock_gettime(CLOCK_REALTIME_COARSE, &now);
        age = nanoseconds(&now) - nanoseconds(&before.st_ctim);
        ret = list(fd, entries, image, layer, children);
        if (ret || children->count)
            return ret;
        if (fstat(fd, &after))
            return -errno;
        /* A change that lies in the future is one from before the clock was set back. */
        if ((age > granularity(&before.st_ctim) || age < 0)
            && nanoseconds(&before.st_ctim) == nanoseconds(&after.st_ctim))
            return 0;
        nanosleep(&moment, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (nanoseconds(&now) - nanoseconds(&begun) < LISTS_NS + granularity(&before.st_ctim));
    return -EBUSY;
}

int children_find(const struct pcow_image *image, uint32_t layer, bool certain,
                  struct children *children)
{
    int fd = openat(image->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret;
    DIR *entries = fd >= 0 ? fdopendir(fd) : NULL;

    memset(children, 0, sizeof *children);
    if (!entries) {
        ret = -errno;
        if (fd >= 0)
            close(fd);
        return ret;
    }
    ret = certain ? list_settled(fd, entries, image, layer, children)
                  : list(fd, entries, image, layer, children);
    closedir(entries);
    return ret;
}
