/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/menu.h"

#include <errno.h>
#include <string.h>

struct menu_item *menu_add(struct menu *menu)
{
    /* The array grows by doubling: a power of two is full. */
    if ((menu->count & (menu->count - 1)) == 0) {
        struct menu_item *larger =
            arena_alloc(menu->arena, (menu->count ? menu->count * 2 : 1) * sizeof *larger);

        if (menu->count)
            memcpy(larger, menu->items, menu->count * sizeof *larger);
        menu->items = larger;
    }
    return &menu->items[menu->count++];
}

static int check_file(const struct boot_file *file, const char *what, const char *title,
                      struct failure *failure)
{
    if (volume_has(file->volume, file->path, KIND_FILE))
        return 0;
    return fail_with(failure, -ENOENT, "\"%s\" names the %s %s, which is not on %s", title, what,
                     file->path, file->volume->device);
}

int menu_check(const struct choice *choice, struct failure *failure)
{
    int result;

    if (!choice->kernel.path)
        return fail_with(failure, -ENOEXEC, "\"%s\" boots no Linux kernel", choice->title);
    result = check_file(&choice->kernel, "kernel", choice->title, failure);
    for (size_t i = 0; i < choice->initrds_count && !result; i++)
        result = check_file(&choice->initrds[i], "initrd", choice->title, failure);
    return result;
}

int menu_choose(struct menu *menu, size_t item, struct choice *choice, struct failure *failure)
{
    jmp_buf outer;
    uint64_t steps = menu->arena->steps;
    int result;

    memcpy(outer, menu->arena->out, sizeof outer);
    if (setjmp(menu->arena->out))
        result = fail_with(failure, -E2BIG,
                           "this entry asks for more memory or time than one may: is "
                           "there a loop in it?");
    else
        result = menu->prepare(menu, item, choice, failure);
    memcpy(menu->arena->out, outer, sizeof outer);
    /* Somebody chose it: another entry may take as many. */
    menu->arena->steps = steps;
    return result;
}
