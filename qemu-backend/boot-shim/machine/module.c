/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/module.h"

#include <lzma.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

#define MODULE_MAX ((size_t)32 << 20)
#define LZMA_MEMORY ((uint64_t)96 << 20)

/* "kernel/drivers/nvdimm/nd_pmem.ko.xz" is nd_pmem, and '-' is '_'. */
static bool is_module(const char *path, size_t length, const char *name)
{
    const char *slash = memrchr(path, '/', length), *base = slash ? slash + 1 : path;
    size_t size = length - (size_t)(base - path), want = strlen(name);

    if (size <= want || base[want] != '.')
        return false;
    for (size_t i = 0; i < want; i++)
        if (base[i] != name[i] && !(base[i] == '-' && name[i] == '_'))
            return false;
    return true;
}

static const char *find_line(const char *list, const char *name, size_t *length)
{
    for (; *list; list += strcspn(list, "\n"), list += *list == '\n') {
        *length = strcspn(list, ":\n");
        if (is_module(list, *length, name))
            return list;
    }
    return NULL;
}

bool modules_listed(const char *list, const char *name)
{
    size_t length;

    return find_line(list, name, &length) != NULL;
}

static bool add_path(struct arena *arena, struct modules *modules, const char *path, size_t length)
{
    for (size_t i = 0; i < modules->count; i++)
        if (strlen(modules->path[i]) == length && memcmp(modules->path[i], path, length) == 0)
            return true;
    if (modules->count == MODULES_MAX)
        return false;
    modules->path[modules->count++] = arena_text(arena, path, length);
    return true;
}

bool modules_add(struct arena *arena, struct modules *modules, const char *dependencies,
                 const char *name)
{
    size_t length;
    const char *line = find_line(dependencies, name, &length), *start, *at;

    if (!line)
        return false;
    /* depmod writes all that is needed, what is needed last first */
    start = line + length + (line[length] == ':');
    at = start + strcspn(start, "\n");
    while (at > start) {
        const char *end;

        while (at > start && (at[-1] == ' ' || at[-1] == '\t'))
            at--;
        end = at;
        while (at > start && at[-1] != ' ' && at[-1] != '\t')
            at--;
        if (end > at && !add_path(arena, modules, at, (size_t)(end - at)))
            return false;
    }
    return add_path(arena, modules, line, length);
}

static bool ends_with(const char *path, const char *suffix)
{
    size_t length = strlen(path), size = strlen(suffix);

    return length > size && strcmp(path + length - size, suffix) == 0;
}

static bool unpack_xz(const char *data, size_t length, char *out, size_t room, size_t *size)
{
    uint64_t limit = LZMA_MEMORY;
    size_t in = 0;

    *size = 0;
    return lzma_stream_buffer_decode(&limit, 0, NULL, (const uint8_t *)data, &in, length,
                                     (uint8_t *)out, size, room)
           == LZMA_OK;
}

static bool unpack_gz(const char *data, size_t length, char *out, size_t room, size_t *size)
{
    z_stream stream = {.next_in = (Bytef *)(uintptr_t)data,
                       .avail_in = (uInt)length,
                       .next_out = (Bytef *)out,
                       .avail_out = (uInt)room};
    bool done;

    if (inflateInit2(&stream, 15 + 32) != Z_OK)
        return false;
    done = inflate(&stream, Z_FINISH) == Z_STREAM_END;
    *size = stream.total_out;
    inflateEnd(&stream);
    return done;
}

static bool unpack_zstd(const char *data, size_t length, char *out, size_t room, size_t *size)
{
    *size = ZSTD_decompress(out, room, data, length);
    return !ZSTD_isError(*size);
}

char *module_unpack(struct arena *arena, const char *path, char *data, size_t *length)
{
    static const struct {
        const char *suffix;
        bool (*unpack)(const char *data, size_t length, char *out, size_t room, size_t *size);
    } kinds[] = {{".xz", unpack_xz}, {".zst", unpack_zstd}, {".gz", unpack_gz}};

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t size;

        if (!ends_with(path, kinds[i].suffix))
            continue;
        /* modules shrink to a quarter or so; try what is likely first */
        for (size_t room = *length * 8; room && room <= MODULE_MAX; room *= 4) {
            char *out = arena_try(arena, room);

            if (!out)
                return NULL;
            if (kinds[i].unpack(data, *length, out, room, &size)) {
                *length = size;
                return out;
            }
        }
        return NULL;
    }
    return data;
}
