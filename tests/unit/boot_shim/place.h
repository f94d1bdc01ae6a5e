/* SPDX-License-Identifier: BSD-3-Clause */
/* A guest's file systems as directories. */
#ifndef TESTS_BOOT_SHIM_PLACE_H
#define TESTS_BOOT_SHIM_PLACE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "config/menu.h"

#define ROOT_UUID "11111111-2222-3333-4444-555555555555"

struct place {
    char directory[256];
    struct arena arena;
    struct volumes volumes;
    struct menu menu;
    struct choice choice;
    struct failure failure;
};

/* For cmocka: *state is a place without a volume. */
int place_setup(void **state);
int place_teardown(void **state);

struct volume *place_volume(struct place *place, const char *type, const char *uuid,
                            unsigned partition);
void place_put(const struct volume *volume, const char *path, const char *content);
void place_put_bytes(const struct volume *volume, const char *path, const void *data, size_t size);
/* A file of the folder data. */
void place_data(const struct volume *volume, const char *path, const char *name);
/* /boot/vmlinuz-VERSION and an initrd of that name. */
void place_kernel(const struct volume *volume, const char *kernel, const char *initrd);
/* Find the menu and take its default into place->choice. What the first of both that fails says. */
int place_boot(struct place *place);
/* The value that a variable is to be saved with; "-" if it is none, "unset" if it goes. */
const char *place_saved(const struct place *place, const char *name);

#endif
