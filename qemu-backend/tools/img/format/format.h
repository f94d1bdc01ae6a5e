/* SPDX-License-Identifier: BSD-3-Clause */
/* The image formats that pcow-img reads and writes whole images in. */
#ifndef IMG_FORMAT_H
#define IMG_FORMAT_H

#include <pcow.h>
#include <stdbool.h>

enum image_format { FORMAT_RAW, FORMAT_QCOW2, FORMAT_PCOW, FORMAT_PCOW_1 };

const char *format_name(enum image_format format);

/* *.pcow */
bool is_called_pcow(const char *path);

/*
 * The format of an existing file. name: the value of -f or -F (option, for the message), or NULL:
 * then the file must be called *.pcow, and whoever opens it as pcow finds out whether it is one.
 * Nothing else is ever guessed: a guest that writes a qcow2 header to its raw disk would make us
 * open any file of the host.
 */
int format_of_file(const char *path, const char *name, const char *option,
                   enum image_format *format, struct pcow_error *error);

/*
 * The format of a file to be made: name, the value of -O, or NULL: then that which its name tells
 * (*.pcow, *.qcow2, *.raw, *.img). A name that tells none is refused.
 */
int format_of_new_file(const char *path, const char *name, enum image_format *format,
                       struct pcow_error *error);

#endif
