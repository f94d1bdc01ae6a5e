/* SPDX-License-Identifier: BSD-3-Clause */
/* What a boot loader's configuration offers, and what an entry of it boots. */
#ifndef SHIM_CONFIG_MENU_H
#define SHIM_CONFIG_MENU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "config/arena.h"
#include "config/fail.h"
#include "config/volume.h"

#define INITRDS_MAX 8
#define CONFIG_MAX ((size_t)1 << 20) /* bytes of a configuration file */

/* A file of the guest, or a part of one (a section of a unified kernel image). */
struct boot_file {
    const struct volume *volume;
    const char *path;
    uint64_t offset, size; /* size 0: all of it */
};

struct choice {
    const char *title, *id;
    struct boot_file kernel;
    struct boot_file initrds[INITRDS_MAX];
    size_t initrds_count;
    const char *options; /* the kernel's command line */
};

/*
 * A variable that the boot loader wants to find at the next boot: an entry meant once is used up.
 */
struct save {
    struct save *next;
    const struct volume *volume;
    const char *path; /* of a grubenv */
    const char *name;
    const char *value; /* NULL: it goes */
};

struct menu_item {
    const char *title; /* printable */
    const char *id;
    void *entry;
};

struct menu;

/* Fill *choice from an item; -EXDEV etc. and words if it boots nothing that this shim can boot. */
typedef int menu_prepare(struct menu *menu, size_t item, struct choice *choice,
                         struct failure *failure);

struct menu {
    struct arena *arena;
    const struct volumes *volumes;
    const char *source; /* "/boot/grub/grub.cfg of pmem0p1 (GRUB)" */
    struct menu_item *items;
    size_t count;
    size_t chosen; /* what boots by default */
    bool locked; /* the guest's administrator has set a password: no choice is offered */
    struct save *saves; /* as of the last prepare() */
    menu_prepare *prepare;
    void *loader;
};

/* Room for one more item. */
struct menu_item *menu_add(struct menu *menu);
/* prepare(), and -E2BIG if it asks for too much. */
int menu_choose(struct menu *menu, size_t item, struct choice *choice, struct failure *failure);
/* For prepare(): whether the files are there. */
int menu_check(const struct choice *choice, struct failure *failure);

#endif
