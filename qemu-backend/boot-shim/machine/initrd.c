/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/initrd.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODULE_FILE_MAX ((size_t)16 << 20)
#define PAGE 4096u

/* An archive as the kernel unpacks it (cpio, newc). */
struct archive {
    struct text text;
    unsigned files;
};

static void pad(struct archive *archive)
{
    text_add(&archive->text, "\0\0\0", -archive->text.length & 3);
}

static void put_entry(struct archive *archive, const char *name, unsigned mode, const void *data,
                      size_t size)
{
    text_add_string(&archive->text,
                    arena_format(archive->text.arena,
                                 "070701%08X%08X%08X%08X%08X%08X%08zX%08X%08X%08X%08X%08zX%08X",
                                 ++archive->files, mode, 0, 0, 1, 0, size, 0, 0, 0, 0,
                                 strlen(name) + 1, 0));
    text_add(&archive->text, name, strlen(name) + 1);
    pad(archive);
    text_add(&archive->text, data, size);
    pad(archive);
}

int boot_file_map(const struct boot_file *file, struct piece *piece, struct failure *failure)
{
    int fd = volume_open(file->volume, file->path), error = errno;
    uint64_t skip = file->offset % PAGE;
    void *data = MAP_FAILED;
    struct stat status;

    if (fd >= 0) {
        error = fstat(fd, &status) ? errno : EINVAL;
        if (error == EINVAL && S_ISREG(status.st_mode) && status.st_size > 0) {
            piece->size = file->size ? (size_t)file->size : (size_t)status.st_size;
            data = mmap(NULL, piece->size + skip, PROT_READ, MAP_PRIVATE, fd,
                        (off_t)(file->offset - skip));
            error = errno;
        }
        close(fd);
    }
    if (data == MAP_FAILED)
        return fail_with(failure, -error, "%s of %s cannot be read: %s", file->path,
                         file->volume->device, strerror(error));
    piece->data = (char *)data + skip;
    return 0;
}

static int put_modules(struct archive *archive, const struct guest_modules *guest,
                       struct failure *failure)
{
    struct arena *arena = archive->text.arena;

    for (size_t i = 0; i < guest->modules.count; i++) {
        const char *path = arena_format(arena, "%s/%s", guest->directory, guest->modules.path[i]);
        size_t length;
        char *data = volume_read(arena, guest->volume, path, MODULE_FILE_MAX, &length);

        if (data)
            data = module_unpack(arena, path, data, &length);
        if (!data)
            return fail_with(failure, -EIO, "the guest's module %s cannot be read", path);
        put_entry(archive, arena_format(arena, "pcow/%02zu.ko", i), S_IFREG | 0644, data, length);
    }
    return 0;
}

static int put_ours(struct archive *archive, const struct guest_modules *guest,
                    const struct first_init *first, struct failure *failure)
{
    struct volume shim = {.device = "the shim"};
    int result;
    size_t length;
    char *program;

    shim.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    program = volume_read(archive->text.arena, &shim, first->program, MODULE_FILE_MAX, &length);
    close(shim.root);
    if (!program)
        return fail_with(failure, -ENOENT, "%s is missing in the shim", first->program);
    put_entry(archive, "pcow", S_IFDIR | 0755, "", 0);
    put_entry(archive, &FIRST_INIT[1], S_IFREG | 0755, program, length);
    if (first->next)
        put_entry(archive, "pcow/next", S_IFREG | 0644, first->next, strlen(first->next));
    if (first->cut)
        put_entry(archive, "pcow/cut", S_IFREG | 0644, first->cut, strlen(first->cut));
    result = put_modules(archive, guest, failure);
    put_entry(archive, "TRAILER!!!", 0, "", 0);
    return result;
}

int initrd_make(struct arena *arena, const struct choice *choice,
                const struct guest_modules *modules, const struct first_init *first,
                struct piece *pieces, size_t *count, struct failure *failure)
{
    struct archive archive = {.text = {.arena = arena}};
    int result = 0;

    *count = 0;
    if (modules->modules.count || first->cut) {
        result = put_ours(&archive, modules, first, failure);
        pieces[(*count)++] = (struct piece){.data = archive.text.data, .size = archive.text.length};
    }
    for (size_t i = 0; i < choice->initrds_count && !result; i++)
        result = boot_file_map(&choice->initrds[i], &pieces[(*count)++], failure);
    return result;
}
