/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A state that the library does not have: the bytes of a slab are on storage that is slower and
 * cheaper, its blocks in the pool are given back, and nothing of it is mapped; the first access
 * brings them back. It is a skeleton, to show what a new state takes: the row below, and cold.c.
 * What it lacks is in its head.
 */
#ifndef PCOW_TEST_COLD_H
#define PCOW_TEST_COLD_H

#include <stdbool.h>
#include <stdint.h>

/*
 * What is unmapped can become cold. Whoever has brought the bytes back has the slab mapped next,
 * for which UNKNOWN is there. All else would lose them: it is refused.
 */
#define SLAB_TEST_ROWS(ROW) ROW(COLD, "cold", SLAB_IS_UNMAPPED, IN(UNKNOWN), IN(UNMAPPED))

struct pcow_map;
struct pcow_error;

/* From here on slabs of the map can be put away in this file. / All come back. */
int cold_begin(struct pcow_map *map, const char *path, struct pcow_error *error);
int cold_end(struct pcow_map *map, struct pcow_error *error);
/* -EAGAIN: not all pages are own and in one piece of the file, or it is not mapped so. */
int cold_put_away(struct pcow_map *map, uint64_t guest_slab, struct pcow_error *error);

#endif
