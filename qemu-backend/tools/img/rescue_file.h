/* SPDX-License-Identifier: BSD-3-Clause */
/* Reading what a repair has dropped: doc/source/reference/rescue.rst. */
#ifndef IMG_RESCUE_FILE_H
#define IMG_RESCUE_FILE_H

#include <json.h>
#include <pcow.h>
#include <stdbool.h>
#include <stdint.h>

struct rescue_file;

enum rescue_line {
    RESCUE_END_OF_FILE,
    RESCUE_HEADER,
    RESCUE_LAYER,
    RESCUE_LOST,                               /* a range; its content follows */
    RESCUE_CONTENT,                            /* bytes, see rescue_read() */
    RESCUE_UNREAD,                             /* what the medium did not give back */
    RESCUE_END,                                /* all is there */
    RESCUE_REPAIRED,                           /* and the repair was done */
};

int rescue_open(const char *path, struct rescue_file **file, struct pcow_error *error);
void rescue_close(struct rescue_file *file);
/*
 * The next line: its kind, or -EBADMSG. *object lives until the next call. What of the content was
 * not read is passed over.
 */
int rescue_next(struct rescue_file *file, json_object **object, struct pcow_error *error);
/* Some of the content; 0: no more of it. */
int64_t rescue_read(struct rescue_file *file, void *buffer, size_t size, struct pcow_error *error);
/* A number of the object, 0 if it has none. */
uint64_t rescue_number(json_object *object, const char *key);
/* A text of the object, NULL if it has none. */
const char *rescue_text(json_object *object, const char *key);

#endif
