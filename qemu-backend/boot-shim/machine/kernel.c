/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/kernel.h"

#include <errno.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Offsets in the kernel's setup header (Documentation/arch/x86/boot.rst). */
#define HEADER_SIZE 0x264
#define AT_SECTORS 0x1f1
#define AT_MAGIC 0x202
#define AT_VERSION 0x206
#define AT_RELEASE 0x20e
#define AT_INITRD_MAX 0x22c
#define AT_XLOADFLAGS 0x236
#define AT_CMDLINE_SIZE 0x238
#define AT_PREFERRED 0x258
#define AT_INIT_SIZE 0x260
#define XLF_KERNEL_64 1
#define ROOM_MAX (1u << 30)

static unsigned get16(const unsigned char *at)
{
    return (unsigned)(at[0] | at[1] << 8);
}

static uint32_t get32(const unsigned char *at)
{
    return get16(at) | (uint32_t)get16(at + 2) << 16;
}

static void read_release(const struct piece *file, size_t at, struct kernel *kernel)
{
    const char *text = (const char *)file->data + at;
    size_t length = 0;

    while (at + length < file->size && length < sizeof kernel->release - 1 && text[length]
           && text[length] != ' ' && text[length] != '\n')
        length++;
    /* it becomes part of a path */
    if (!length || *text == '.' || memchr(text, '/', length))
        return;
    memcpy(kernel->release, text, length);
    sscanf(kernel->release, "%u.%u", &kernel->major, &kernel->minor);
}

int kernel_look(const struct piece *file, const char *path, struct kernel *kernel,
                struct failure *failure)
{
    const unsigned char *header = file->data;

    memset(kernel, 0, sizeof *kernel);
    kernel->file = *file;
    if (file->size < HEADER_SIZE)
        return fail_with(failure, -ENOEXEC, "%s is too short for a kernel", path);
    if (memcmp(header + 0x38, "ARMd", 4) == 0)
        return fail_with(failure, -ENOEXEC, "%s is a kernel for ARM, and this machine is x86-64",
                         path);
    if (memcmp(header + AT_MAGIC, "HdrS", 4) != 0 || get16(header + AT_VERSION) < 0x20c
        || !(get16(header + AT_XLOADFLAGS) & XLF_KERNEL_64))
        return fail_with(failure, -ENOEXEC, "%s is no Linux kernel for x86-64", path);
    kernel->setup_size = ((header[AT_SECTORS] ? header[AT_SECTORS] : 4u) + 1) * 512;
    kernel->room = get32(header + AT_INIT_SIZE);
    if (kernel->setup_size + 0x200 >= file->size || kernel->room > ROOM_MAX)
        return fail_with(failure, -ENOEXEC, "%s was cut off, or is damaged", path);
    kernel->address =
        get32(header + AT_PREFERRED) | (uint64_t)get32(header + AT_PREFERRED + 4) << 32;
    kernel->initrd_max = get32(header + AT_INITRD_MAX);
    kernel->options_max = get32(header + AT_CMDLINE_SIZE);
    if (kernel->room < file->size - kernel->setup_size)
        kernel->room = file->size - kernel->setup_size;
    if (get16(header + AT_RELEASE))
        read_release(file, get16(header + AT_RELEASE) + 0x200u, kernel);
    return 0;
}

int kernel_start(struct failure *failure)
{
    sync();
    syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
    return fail_with(failure, -errno, "the kernel cannot be started: %s", strerror(errno));
}
