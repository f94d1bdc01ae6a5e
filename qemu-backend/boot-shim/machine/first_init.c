/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The first program of the guest's initramfs (rdinit=): load the modules that its root on
 * persistent memory needs, in the order of their names, and go on as if nothing had been.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void load_modules(void)
{
    for (unsigned number = 0; number < 100; number++) {
        char path[32];
        int fd;

        snprintf(path, sizeof path, "/pcow/%02u.ko", number);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return;
        /* one that is there already is as well */
        (void)syscall(SYS_finit_module, fd, "", 0);
        close(fd);
        unlink(path);
    }
}

int main(int argc, char **argv, char **environment)
{
    char next[256] = "/init";
    int fd = open("/pcow/next", O_RDONLY | O_CLOEXEC);

    (void)argc;
    if (fd >= 0) {
        ssize_t n = read(fd, next, sizeof next - 1);

        next[n > 0 ? n : 0] = '\0';
        close(fd);
    }
    load_modules();
    argv[0] = next;
    execve(next, argv, environment);
    dprintf(2, "pcow boot: the guest's initramfs has no %s\n", next);
    return 1;
}
