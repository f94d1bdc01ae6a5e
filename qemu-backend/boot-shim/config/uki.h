/* SPDX-License-Identifier: BSD-3-Clause */
/* Unified kernel images: a PE file with a kernel, an initrd and a command line as sections. */
#ifndef SHIM_CONFIG_UKI_H
#define SHIM_CONFIG_UKI_H

#include "config/menu.h"

struct uki_section {
    uint64_t offset, size; /* size 0: there is none */
};

struct uki {
    struct uki_section kernel, initrd, ucode, cmdline, osrel;
};

/* False if the file is none, or is damaged. */
bool uki_read(const struct volume *volume, const char *path, struct uki *uki);
/* A section's text, without blanks at its end; "" if there is none. */
char *uki_text(struct arena *arena, const struct volume *volume, const char *path,
               const struct uki_section *section);

#endif
