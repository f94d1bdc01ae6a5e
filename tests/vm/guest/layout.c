/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the images of a test hold before it begins: a base, an image on it, and on that one with two
 * snapshots, mixed in units from a page to a slab. A page that a layer holds may be in older layers
 * as well, with other content.
 *
 * Base and middle have different content in every word. The layers above are made by pcow-io, which
 * fills pages with one byte.
 */
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

uint64_t mix(uint64_t value)
{
    value ^= value >> 31;
    value *= 0x7fb5d329728ea185ull;
    value ^= value >> 27;
    value *= 0x81dadef4bc2dd44dull;
    return value ^ value >> 33;
}

void layout_zones(struct memory *memory, size_t size)
{
    size_t slabs = size / SLAB;

    memory->size = size;
    memory->stores = (struct zone){ 0, slabs / 2 * SLAB };
    memory->load = (struct zone){ slabs / 2 * SLAB, slabs / 4 * SLAB };
    memory->transfers.begin = memory->load.begin + memory->load.length;
    memory->transfers.length = slabs * SLAB - memory->transfers.begin;
}

enum level layout_level(size_t page)
{
    size_t slab = page / (SLAB / PAGE);

    switch (slab % 4) {
    case 0:
        return mix(page) % (LEVEL_ACTIVE + 1);
    case 1:
        return mix(page / 16) % (LEVEL_ACTIVE + 1);
    case 2:
        return (slab / 4) % (LEVEL_ACTIVE + 1);
    default:
        return mix(page / 16) % 2 ? mix(page / 16 + 1) % (LEVEL_ACTIVE + 1) : LEVEL_ABSENT;
    }
}

/* Whether the layer of LEVEL has a page of its own. */
static bool holds(enum level level, size_t page)
{
    enum level top = layout_level(page);

    return top == level || (top > level && mix(page * 8 + level) % 4 == 0);
}

static uint64_t word(enum level level, size_t offset)
{
    return mix((uint64_t)level << 56 | offset);
}

static uint8_t page_byte(enum level level, size_t page)
{
    return 1 + mix((uint64_t)level << 48 | page) % 255;
}

static enum level visible(size_t page, enum level level)
{
    enum level found = level;

    while (found > LEVEL_ABSENT && !holds(found, page)) {
        found--;
    }
    return found;
}

/* Content of one page as the chain up to LEVEL shows it. */
static void fill_page(uint8_t *to, size_t page, enum level level)
{
    enum level found = visible(page, level);

    if (found == LEVEL_ABSENT) {
        memset(to, 0, PAGE);
    } else if (found > LEVEL_MIDDLE) {
        memset(to, page_byte(found, page), PAGE);
    } else {
        for (size_t i = 0; i < PAGE; i += 8) {
            uint64_t value = word(found, page * PAGE + i);

            memcpy(to + i, &value, 8);
        }
    }
}

void layout_fill(uint8_t *to, size_t offset, size_t length, enum level level)
{
    for (size_t done = 0; done < length; done += PAGE) {
        fill_page(to + done, (offset + done) / PAGE, level);
    }
}

void layout_disk(uint8_t *to, size_t offset, size_t length)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t value = word(LEVEL_DISK, offset + i);

        memcpy(to + i, &value, 8);
    }
}

static int put(int fd, const uint8_t *data, size_t length, size_t offset)
{
    ssize_t written = pwrite(fd, data, length, (off_t)offset);

    return written == (ssize_t)length ? 0 : -1;
}

/* A sparse raw file with what a chain up to LEVEL shows. */
int layout_write_raw(enum level level, size_t image_size, const char *path)
{
    uint8_t page[PAGE];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int ret = fd < 0 || ftruncate(fd, (off_t)image_size) < 0 ? -1 : 0;

    for (size_t offset = 0; !ret && offset < image_size - DATA_OFFSET; offset += PAGE) {
        if (visible(offset / PAGE, level) != LEVEL_ABSENT) {
            fill_page(page, offset / PAGE, level);
            ret = put(fd, page, PAGE, DATA_OFFSET + offset);
        }
    }
    if (ret < 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
    return ret;
}

int layout_write_disk(size_t size, const char *path)
{
    uint8_t page[PAGE];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int ret = fd < 0 ? -1 : 0;

    for (size_t offset = 0; !ret && offset < size; offset += PAGE) {
        layout_disk(page, offset, PAGE);
        ret = put(fd, page, PAGE, offset);
    }
    if (ret < 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
    return ret;
}

/* Commands for pcow-io that write the layers above the middle image. */
int layout_print_script(size_t image_size)
{
    size_t pages = (image_size - DATA_OFFSET) / PAGE;

    for (enum level level = LEVEL_FIRST; level <= LEVEL_ACTIVE; level++) {
        for (size_t page = 0; page < pages; page++) {
            if (holds(level, page)) {
                printf("write -q -P %u %zu %lu\n", page_byte(level, page),
                       DATA_OFFSET + page * PAGE, PAGE);
            }
        }
        if (level != LEVEL_ACTIVE) {
            printf("snapshot create %s\n", level == LEVEL_FIRST ? "first" : "second");
        }
    }
    return fflush(stdout) ? -1 : 0;
}
