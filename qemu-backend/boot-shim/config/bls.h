/* SPDX-License-Identifier: BSD-3-Clause */
/* Entries of the Boot Loader Specification: /loader/entries/NAME.conf. */
#ifndef SHIM_CONFIG_BLS_H
#define SHIM_CONFIG_BLS_H

#include "config/menu.h"

struct bls_entry {
    const struct volume *volume;
    const char *id; /* of the file, without ".conf" and what counts tries */
    const char *title, *version, *sort_key, *machine_id;
    const char *kernel, *options, *efi;
    const char *initrds[INITRDS_MAX];
    size_t initrds_count;
    bool exhausted; /* it was tried as often as it may be */
};

/*
 * Sorted as systemd-boot does. Entries that boot nothing here (of another architecture) are left
 * out.
 */
size_t bls_read(struct arena *arena, const struct volume *volume, const char *directory,
                struct bls_entry **entries);
int bls_compare(const void *a, const void *b);
void bls_sort(struct bls_entry *entries, size_t count);
/* A name without "+3-1": *exhausted if no try is left. */
const char *bls_name(struct arena *arena, const char *file, const char *suffix, bool *exhausted);

#endif
