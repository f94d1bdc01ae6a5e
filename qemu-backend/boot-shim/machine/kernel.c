/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/kernel.h"

#include <errno.h>
#include <linux/kexec.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Offsets in the kernel's setup header (Documentation/arch/x86/boot.rst). */
#define HEADER_SIZE 0x264
#define AT_MAGIC 0x202
#define AT_VERSION 0x206
#define AT_RELEASE 0x20e
#define AT_XLOADFLAGS 0x236
#define AT_CMDLINE_SIZE 0x238
#define XLF_KERNEL_64 1

static unsigned get16(const unsigned char *at)
{
    return (unsigned)(at[0] | at[1] << 8);
}

static void read_release(int fd, unsigned at, struct kernel *kernel)
{
    char text[sizeof kernel->release] = "";
    ssize_t n = at ? pread(fd, text, sizeof text - 1, at + 0x200) : 0;

    if (n <= 0)
        return;
    text[strcspn(text, " \n")] = '\0';
    /* it becomes part of a path */
    if (!strchr(text, '/') && *text != '.')
        strcpy(kernel->release, text);
    sscanf(kernel->release, "%u.%u", &kernel->major, &kernel->minor);
}

int kernel_look(int fd, const char *path, struct kernel *kernel, struct failure *failure)
{
    unsigned char header[HEADER_SIZE];

    memset(kernel, 0, sizeof *kernel);
    kernel->fd = fd;
    if (pread(fd, header, sizeof header, 0) != (ssize_t)sizeof header)
        return fail_with(failure, -ENOEXEC, "%s is too short for a kernel", path);
    if (memcmp(header + 0x38, "ARMd", 4) == 0)
        return fail_with(failure, -ENOEXEC, "%s is a kernel for ARM, and this machine is x86-64",
                         path);
    if (memcmp(header + AT_MAGIC, "HdrS", 4) != 0 || get16(header + AT_VERSION) < 0x20c
        || !(get16(header + AT_XLOADFLAGS) & XLF_KERNEL_64))
        return fail_with(failure, -ENOEXEC, "%s is no Linux kernel for x86-64", path);
    kernel->options_max = header[AT_CMDLINE_SIZE] | (size_t)header[AT_CMDLINE_SIZE + 1] << 8;
    read_release(fd, get16(header + AT_RELEASE), kernel);
    return 0;
}

int kernel_load(const struct kernel *kernel, int initrd, const char *options,
                struct failure *failure)
{
    unsigned long flags = initrd < 0 ? KEXEC_FILE_NO_INITRAMFS : 0;

    if (strlen(options) > kernel->options_max)
        return fail_with(failure, -E2BIG,
                         "the command line has %zu characters, and this kernel takes "
                         "%zu",
                         strlen(options), kernel->options_max);
    if (syscall(SYS_kexec_file_load, kernel->fd, initrd, strlen(options) + 1, options, flags) == 0)
        return 0;
    return fail_with(
        failure, -errno, "the kernel %s cannot be loaded: %s%s", kernel->release, strerror(errno),
        errno == ENOMEM ? " (give the guest more memory: kernel and initrd must fit twice)" : "");
}

int kernel_start(struct failure *failure)
{
    sync();
    syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
    return fail_with(failure, -errno, "the kernel cannot be started: %s", strerror(errno));
}
