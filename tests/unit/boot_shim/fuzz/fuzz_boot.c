/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Boot configurations of any content. The first byte says what file it is; two files are there with
 * something reasonable in them, so that paths lead somewhere.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/options.h"
#include "config/probe.h"
#include "find.h"

#define MEMORY ((size_t)8 << 20)
#define STEPS 20000
#define ITEMS_MAX 4

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const paths[] = {
    "boot/grub/grub.cfg",     "loader/entries/a+1-2.conf", "EFI/Linux/a.efi",
    "extlinux/extlinux.conf", "boot/grub/grubenv",         "EFI/a/grub.cfg",
    "loader/loader.conf",
};
static const char grub[] = "load_env\nset default=$saved_entry\nmenuentry a --id b { linux /k $c\n"
                           "initrd /i }\nsubmenu c { menuentry d { linux /k\ninitrd /i } }\n";

static void put(int root, const char *path, const void *data, size_t size)
{
    int fd = openat(root, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    close(fd);
}

static int make_root(void)
{
    static const char *const folders[] = {"boot", "boot/grub", "loader", "loader/entries",
                                          "EFI",  "EFI/Linux", "EFI/a",  "extlinux"};
    const char *top = getenv("TMPDIR");
    char path[256];
    int root;

    snprintf(path, sizeof path, "%s/boot.XXXXXX", top ? top : "/tmp");
    if (!mkdtemp(path))
        abort();
    root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        mkdirat(root, folders[i], 0700);
    put(root, "k", "k", 1);
    put(root, "i", "i", 1);
    return root;
}

static void boot(struct menu *menu)
{
    struct failure failure;
    struct choice choice;

    if (find_menu(menu, &failure) != 0)
        return;
    for (size_t i = 0; i < menu->count && i < ITEMS_MAX; i++) {
        struct additions additions = {.dax = "dax=always", .rdinit = "/pcow/init"};

        if (menu_choose(menu, i, &choice, &failure) != 0 || setjmp(menu->arena->out) != 0)
            continue;
        additions.root = options_root(menu->volumes, choice.options);
        options_make(menu->arena, choice.options, &additions);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int root = -1;
    struct arena arena;
    struct volumes volumes = {.count = 1};
    struct volume probed = {.root = -1};
    struct menu menu = {.arena = &arena, .volumes = &volumes};
    const char *path;
    int disk;

    if (root < 0)
        root = make_root();
    if (!size)
        return 0;
    volumes.item[0] =
        (struct volume){.root = root, .device = "pmem0", .type = "vfat", .uuid = "ABCD-1234"};
    path = paths[data[0] % (sizeof paths / sizeof *paths)];
    if (strcmp(path, "boot/grub/grubenv") == 0)
        put(root, "boot/grub/grub.cfg", grub, sizeof grub - 1);
    put(root, path, data + 1, size - 1);
    arena_open(&arena, MEMORY, STEPS);
    boot(&menu);
    arena_close(&arena);
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        unlinkat(root, paths[i], 0);
    put(root, "disk", data, size);
    disk = openat(root, "disk", O_RDONLY | O_CLOEXEC);
    probe_volume(disk, &probed);
    probe_partition(disk, 1, probed.partuuid);
    close(disk);
    return 0;
}
