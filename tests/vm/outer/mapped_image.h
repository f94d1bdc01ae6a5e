/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A new image, mapped, for programs that look at what its file system does beneath it. They end
 * where something fails.
 */
#ifndef PCOW_TESTS_MAPPED_IMAGE_H
#define PCOW_TESTS_MAPPED_IMAGE_H

#include "pcow.h"

struct mapped_image {
    pcow_image *image;                          /* NULL: none was opened */
    pcow_map *map;
    unsigned prepared;                          /* slabs that the thread keeps ready */
};

/* Say so on stderr and end with exit code 1. */
void give_up(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
/* Nanoseconds on a clock that only goes on. */
uint64_t now(void);
/* A new image of this size; its memory. */
volatile uint8_t *mapped_image_make(struct mapped_image *mapped, const char *path, uint64_t size,
                                    unsigned prepared);
/*
 * Until the thread that prepares slabs has nothing to do any more, by what it says and by what it
 * did last.
 */
void mapped_image_wait_idle(const struct mapped_image *mapped);

#endif
