/* SPDX-License-Identifier: BSD-3-Clause */
#include "find.h"

#include <errno.h>
#include <string.h>

#include "config/extlinux.h"
#include "config/loader.h"
#include "script/grub.h"

typedef int reader(struct menu *menu, const struct volume *volume, const char *path,
                   struct failure *failure);

/* In the root's file system, in one of /boot alone, in a subvolume of btrfs. */
static const char *const grub_paths[] = {
    "/boot/grub/grub.cfg",
    "/boot/grub2/grub.cfg",
    "/grub/grub.cfg",
    "/grub2/grub.cfg",
    "/@/boot/grub/grub.cfg",
    "/@/boot/grub2/grub.cfg",
    "/root/boot/grub2/grub.cfg",
    NULL,
};
static const char *const extlinux_paths[] = {
    "/boot/extlinux/extlinux.conf",
    "/extlinux/extlinux.conf",
    "/boot/syslinux/syslinux.cfg",
    "/syslinux/syslinux.cfg",
    "/extlinux.conf",
    "/syslinux.cfg",
    NULL,
};

/* 1 if there is none. */
static int read_first(struct menu *menu, const char *const *paths, reader *read,
                      struct failure *failure)
{
    for (size_t i = 0; i < menu->volumes->count; i++) {
        const struct volume *volume = &menu->volumes->item[i];

        for (const char *const *path = paths; *path; path++)
            if (volume_size(volume, *path))
                return read(menu, volume, *path, failure);
    }
    return 1;
}

/* GRUB's configuration on the EFI system partition, which mostly names another one. */
static int read_esp(struct menu *menu, struct failure *failure)
{
    for (size_t i = 0; i < menu->volumes->count; i++) {
        const struct volume *volume = &menu->volumes->item[i];
        char **names;
        size_t count = volume_list(menu->arena, volume, "/EFI", "", &names);

        for (size_t j = 0; j < count && strcmp(volume->type, "vfat") == 0; j++) {
            const char *path = arena_format(menu->arena, "/EFI/%s/grub.cfg", names[j]);

            if (volume_size(volume, path))
                return grub_read(menu, volume, path, failure);
        }
    }
    return 1;
}

/* One after another until one has something that boots; the first failure is what is said. */
static int find(struct menu *menu, struct failure *failure)
{
    bool loader_first = loader_installed(menu->volumes);
    struct failure first = {.text = ""};
    int result = 0;

    for (unsigned step = 0; step < 5; step++) {
        int status = 1;

        /* What was refused leaves nothing behind. */
        menu->count = 0;
        menu->chosen = 0;
        menu->locked = false;
        menu->saves = NULL;
        switch (step) {
        case 0: status = loader_first ? loader_read(menu, failure) : 1; break;
        case 1: status = read_first(menu, grub_paths, grub_read, failure); break;
        case 2: status = read_esp(menu, failure); break;
        case 3: status = read_first(menu, extlinux_paths, extlinux_read, failure); break;
        case 4: status = loader_first ? 1 : loader_read(menu, failure); break;
        }
        if (!status)
            return 0;
        if (status < 0 && status != -ENOENT && !result) {
            first = *failure;
            result = status;
        }
    }
    if (!result)
        return fail_with(failure, -ENOENT,
                         "no file system has a configuration of GRUB, systemd-boot or "
                         "extlinux");
    *failure = first;
    return result;
}

int find_menu(struct menu *menu, struct failure *failure)
{
    jmp_buf outer;
    int result;

    memcpy(outer, menu->arena->out, sizeof outer);
    if (setjmp(menu->arena->out))
        result = fail_with(failure, -E2BIG,
                           "the boot configuration asks for more memory or time than "
                           "one may: is there a loop in it?");
    else
        result = find(menu, failure);
    memcpy(menu->arena->out, outer, sizeof outer);
    return result;
}
