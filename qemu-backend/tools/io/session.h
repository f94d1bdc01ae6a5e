/* SPDX-License-Identifier: BSD-3-Clause */
/* An open image as pcow-io's commands see it: mapped as QEMU maps it, or not (--no-map). */
#ifndef IO_SESSION_H
#define IO_SESSION_H

#include <pcow.h>

#include "events.h"

#define CHUNK_SIZE ((size_t)2 << 20)           /* most bytes of one load or store */

struct session {
    const char *path, *snapshot;
    unsigned open_flags;
    bool use_map;
    struct pcow_map_options map_options;
    pcow_image *image;
    pcow_map *map;                             /* NULL without one */
    struct events events;
    /* a revert of the VM is: its next start drops what is written */
    bool unfinished;
    bool done;                                 /* quit was said */
};

int session_open(struct session *session, struct pcow_error *error);
/* False: what is wrong with the image was found when it was closed, and reported. */
bool session_close(struct session *session);

/*
 * Take the map away and put it back, around what is not allowed, or not seen, while the image is
 * mapped.
 */
void session_unmap(struct session *session);
int session_map(struct session *session, struct pcow_error *error);

/* offset + length <= pcow_size() is checked; with a map these are plain loads and stores. */
int session_read(struct session *session, uint64_t offset, void *buffer, size_t length,
                 struct pcow_error *error);
int session_write(struct session *session, uint64_t offset, const void *buffer, size_t length,
                  struct pcow_error *error);
int session_zero(struct session *session, uint64_t offset, uint64_t length,
                 struct pcow_error *error);
int session_flush(struct session *session, struct pcow_error *error);

/* -EINVAL unless the range lies in the image. */
int session_check_range(const struct session *session, uint64_t offset, uint64_t length,
                        struct pcow_error *error);

#endif
