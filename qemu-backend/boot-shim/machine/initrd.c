/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/initrd.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODULE_FILE_MAX ((size_t)16 << 20)

struct output {
    struct arena *arena;
    int fd;
    size_t length;
    unsigned files;
    bool failed;
};

static void put(struct output *output, const void *data, size_t size)
{
    const char *at = data;

    output->length += size;
    while (size && !output->failed) {
        ssize_t n = write(output->fd, at, size);

        if (n <= 0) {
            output->failed = true;
            return;
        }
        at += n;
        size -= (size_t)n;
    }
}

static void pad(struct output *output)
{
    put(output, "\0\0\0", -output->length & 3);
}

/* An entry of a cpio archive (newc). */
static void put_entry(struct output *output, const char *name, unsigned mode, const void *data,
                      size_t size)
{
    char *header =
        arena_format(output->arena, "070701%08X%08X%08X%08X%08X%08X%08zX%08X%08X%08X%08X%08zX%08X",
                     ++output->files, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, strlen(name) + 1, 0);

    put(output, header, strlen(header));
    put(output, name, strlen(name) + 1);
    pad(output);
    put(output, data, size);
    pad(output);
}

static int copy_range(struct output *output, int fd, uint64_t offset, uint64_t size)
{
    off_t at = (off_t)offset;

    while (size) {
        ssize_t n = sendfile(output->fd, fd, &at, size < (1u << 30) ? (size_t)size : 1u << 30);

        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        size -= (uint64_t)n;
        output->length += (size_t)n;
    }
    return 0;
}

static int copy_file(struct output *output, const struct boot_file *file, struct failure *failure)
{
    int fd = volume_open(file->volume, file->path), result = -errno;
    struct stat status;

    if (fd >= 0) {
        result = fstat(fd, &status) ? -errno : 0;
        if (!result)
            result = copy_range(output, fd, file->offset,
                                file->size ? file->size : (uint64_t)status.st_size);
        close(fd);
    }
    if (result)
        return fail_with(failure, result, "%s of %s cannot be read into memory: %s", file->path,
                         file->volume->device, strerror(-result));
    return 0;
}

int boot_file_open(const struct boot_file *file, struct failure *failure)
{
    struct output output = {.fd = -1};
    int result;

    if (!file->size) {
        int fd = volume_open(file->volume, file->path);

        return fd >= 0 ? fd
                       : fail_with(failure, -errno, "%s of %s cannot be opened: %s", file->path,
                                   file->volume->device, strerror(errno));
    }
    output.fd = memfd_create("part", MFD_CLOEXEC);
    if (output.fd < 0)
        return fail_with(failure, -errno, "no file in memory: %s", strerror(errno));
    result = copy_file(&output, file, failure);
    if (result)
        close(output.fd);
    return result ? result : output.fd;
}

static int put_modules(struct output *output, const struct guest_modules *guest,
                       struct failure *failure)
{
    struct arena *arena = output->arena;

    for (size_t i = 0; i < guest->modules.count; i++) {
        const char *path = arena_format(arena, "%s/%s", guest->directory, guest->modules.path[i]);
        size_t length;
        char *data = volume_read(arena, guest->volume, path, MODULE_FILE_MAX, &length);

        if (data)
            data = module_unpack(arena, path, data, &length);
        if (!data)
            return fail_with(failure, -EIO, "the guest's module %s cannot be read", path);
        put_entry(output, arena_format(arena, "pcow/%02zu.ko", i), S_IFREG | 0644, data, length);
    }
    return 0;
}

static int put_ours(struct output *output, const struct guest_modules *guest,
                    const char *first_init, const char *next, struct failure *failure)
{
    struct volume shim = {.device = "the shim"};
    int result;
    size_t length;
    char *program;

    shim.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    program = volume_read(output->arena, &shim, first_init, MODULE_FILE_MAX, &length);
    close(shim.root);
    if (!program)
        return fail_with(failure, -ENOENT, "%s is missing in the shim", first_init);
    put_entry(output, "pcow", S_IFDIR | 0755, "", 0);
    put_entry(output, &FIRST_INIT[1], S_IFREG | 0755, program, length);
    if (next)
        put_entry(output, "pcow/next", S_IFREG | 0644, next, strlen(next));
    result = put_modules(output, guest, failure);
    put_entry(output, "TRAILER!!!", 0, "", 0);
    return result;
}

int initrd_make(struct arena *arena, const struct choice *choice,
                const struct guest_modules *modules, const char *first_init, const char *next,
                struct failure *failure)
{
    struct output output = {.arena = arena, .fd = memfd_create("initrd", MFD_CLOEXEC)};
    int result = 0;

    if (output.fd < 0)
        return fail_with(failure, -errno, "no file in memory for the initrd: %s", strerror(errno));
    if (modules->modules.count)
        result = put_ours(&output, modules, first_init, next, failure);
    for (size_t i = 0; i < choice->initrds_count && !result; i++) {
        pad(&output);
        result = copy_file(&output, &choice->initrds[i], failure);
    }
    if (!result && output.failed)
        result = fail_with(failure, -ENOMEM, "there is too little memory for the initrd");
    if (result) {
        close(output.fd);
        return result;
    }
    lseek(output.fd, 0, SEEK_SET);
    return output.fd;
}
