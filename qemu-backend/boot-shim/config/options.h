/* SPDX-License-Identifier: BSD-3-Clause */
/* The kernel's command line: as the guest has it, with what a root on an NVDIMM needs. */
#ifndef SHIM_CONFIG_OPTIONS_H
#define SHIM_CONFIG_OPTIONS_H

#include "config/menu.h"

/* The file system that root= means; NULL if it is none that is known. */
const struct volume *options_root(const struct volumes *volumes, const char *options);
/* The value of the last word NAME= before "--"; NULL if there is none. */
char *options_value(struct arena *arena, const char *options, const char *name);
/* What is behind the word "--"; "" if there is nothing. */
const char *options_behind(const char *options);

struct additions {
    const struct volume *root; /* NULL: not known */
    const char *dax; /* "dax=always"; NULL: none */
    const char *rdinit; /* NULL: none */
    const char *const *console; /* words for a guest without any console=, up to NULL */
    const char *const *more; /* words, up to NULL */
};

char *options_make(struct arena *arena, const char *options, const struct additions *additions);

#endif
