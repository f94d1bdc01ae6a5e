/* SPDX-License-Identifier: BSD-3-Clause */
/* Finding the images that stand on a snapshot: by looking at every file of the directory, as nothing else is sure to be true. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "snapshot/pin.h"

enum answer { NO, YES, UNKNOWN };

/* Of a header as it lies in a file that may be damaged. */
static enum answer stands_on(const struct header *header, const uint8_t uuid[PCOW_UUID_SIZE], uint32_t layer)
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
    return header->base[slot - 1].layer == layer && memcmp(header->base[slot - 1].uuid, uuid, PCOW_UUID_SIZE) == 0 ? YES : NO;
}

static enum answer look_at(int directory, const char *name, const struct pcow_image *image, uint32_t layer, struct children *children)
{
    struct header header;
    struct stat st;
    enum answer answer = UNKNOWN;
    ssize_t got;
    int fd;

    /* What is no regular file is not opened: a device may not like it. A link leads to a file that is found by its own name. */
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
        snprintf(children->names + used, sizeof children->names - used, "%s'%s'", used ? ", " : "", name);
    else if (used && children->names[used - 1] != '.')
        snprintf(children->names + used, sizeof children->names - used, ", ...");
}

int children_find(const struct pcow_image *image, uint32_t layer, struct children *children)
{
    int fd = openat(image->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret;
    DIR *entries = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;

    memset(children, 0, sizeof *children);
    if (!entries || fstat(image->file.fd, &children->image)) {
        ret = -errno;
        if (entries)
            closedir(entries);
        else if (fd >= 0)
            close(fd);
        return ret;
    }
    while (errno = 0, (entry = readdir(entries))) {
        enum answer answer = look_at(fd, entry->d_name, image, layer, children);

        if (answer == YES)
            add_name(children, entry->d_name);
        if (answer == UNKNOWN && children->unknown++ == 0)
            snprintf(children->first_unknown, sizeof children->first_unknown, "%s", entry->d_name);
    }
    ret = -errno;
    closedir(entries);
    return ret;
}
