/* SPDX-License-Identifier: BSD-3-Clause */
/* The file that keeps what a repair drops: what its two parts share. */
#ifndef PCOW_CHECK_RESCUE_H
#define PCOW_CHECK_RESCUE_H

#include "check/check.h"

#define RESCUE_FIRST_SIZE 80
#define RESCUE_FINISHED "{\"repaired\": true}\n"

/* What it begins with: whose it is. */
void rescue_first_words(const struct check *check, char words[RESCUE_FIRST_SIZE]);
/*
 * Make it, under the first name that is free; those before are of repairs that were interrupted.
 * The descriptor, or a negative errno; the caller frees the path.
 */
int rescue_create(struct check *check, char **path);
/* Who may read the image may read what was in it, and nobody else. */
int rescue_take_mode(const struct check *check, int fd);
int rescue_sync_directory(const char *path);
/* -ENOSPC: it would not fit beside the image, or leave too little there. */
int rescue_check_room(struct check *check, uint64_t needed);

#endif
