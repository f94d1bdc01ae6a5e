/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/uki.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SECTIONS_MAX 96
#define SECTION_HEADER 40
#define TEXT_MAX ((uint64_t)64 << 10)

static uint32_t get32(const unsigned char *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint16_t get16(const unsigned char *at)
{
    return (uint16_t)(at[0] | at[1] << 8);
}

static bool read_at(int fd, uint64_t offset, void *data, size_t size)
{
    return offset < INT64_MAX - size && pread(fd, data, size, (off_t)offset) == (ssize_t)size;
}

static void add_section(struct uki *uki, const unsigned char *header, uint64_t file_size)
{
    const struct {
        const char *name;
        struct uki_section *section;
    } known[] = {
        {".linux", &uki->kernel},    {".initrd", &uki->initrd}, {".ucode", &uki->ucode},
        {".cmdline", &uki->cmdline}, {".osrel", &uki->osrel},
    };
    uint32_t memory = get32(header + 8), stored = get32(header + 16), offset = get32(header + 20);
    uint32_t size = memory < stored ? memory : stored;
    char name[9] = {0};

    memcpy(name, header, 8);
    if (!size || (uint64_t)offset + size > file_size)
        return;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0 && !known[i].section->size)
            *known[i].section = (struct uki_section){.offset = offset, .size = size};
}

static bool read_sections(int fd, uint64_t file_size, struct uki *uki)
{
    unsigned char header[SECTION_HEADER], start[64], pe[24];
    uint64_t at;
    unsigned count;

    if (!read_at(fd, 0, start, sizeof start) || memcmp(start, "MZ", 2) != 0)
        return false;
    at = get32(start + 60);
    if (!read_at(fd, at, pe, sizeof pe) || memcmp(pe, "PE\0\0", 4) != 0)
        return false;
    count = get16(pe + 6);
    at += sizeof pe + get16(pe + 20);
    if (count > SECTIONS_MAX)
        return false;
    for (unsigned i = 0; i < count; i++, at += SECTION_HEADER) {
        if (!read_at(fd, at, header, sizeof header))
            return false;
        add_section(uki, header, file_size);
    }
    return uki->kernel.size != 0;
}

bool uki_read(const struct volume *volume, const char *path, struct uki *uki)
{
    int fd = volume_open(volume, path);
    struct stat status;
    bool known;

    memset(uki, 0, sizeof *uki);
    if (fd < 0)
        return false;
    known = fstat(fd, &status) == 0 && S_ISREG(status.st_mode)
            && read_sections(fd, (uint64_t)status.st_size, uki);
    close(fd);
    return known;
}

char *uki_text(struct arena *arena, const struct volume *volume, const char *path,
               const struct uki_section *section)
{
    size_t size = section->size < TEXT_MAX ? (size_t)section->size : (size_t)TEXT_MAX;
    char *text = arena_alloc(arena, size + 1);
    int fd = size ? volume_open(volume, path) : -1;

    if (fd >= 0) {
        if (!read_at(fd, section->offset, text, size))
            *text = '\0';
        close(fd);
    }
    for (size = strlen(text); size && strchr(" \t\r\n", text[size - 1]); size--)
        text[size - 1] = '\0';
    return text;
}
