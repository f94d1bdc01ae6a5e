/* SPDX-License-Identifier: BSD-3-Clause */
/* The words of the mirror, for those that keep it (mirror.h). */
#ifndef PCOW_IMAGE_MIRROR_WORDS_H
#define PCOW_IMAGE_MIRROR_WORDS_H

#include "image/file.h"

/* Where the word of a page is stored to, or one beside it; NULL with errno set. */
uint64_t *mirror_word_address(struct file *file, uint64_t group, unsigned page);
/* Also the value that is there: it may be another thread's, and not on the medium yet. */
int mirror_store_word(struct file *file, uint64_t *where, uint64_t value, bool synced);
/* page: of the file. */
void mirror_set_marked(struct file *file, uint64_t page);

#endif
