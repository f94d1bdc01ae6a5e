/* SPDX-License-Identifier: BSD-3-Clause */
/* Opening the pcow images that a command line names. */
#ifndef IMG_IMAGE_H
#define IMG_IMAGE_H

#include <limits.h>
#include <pcow.h>

/*
 * Open path for a command that works on pcow images only. format: the value of -f, "pcow" or
 * "pcow1"; NULL: pcow.
 */
int img_open(const char *path, const char *format, unsigned flags, const char *snapshot,
             pcow_image **image, struct pcow_error *error);

/*
 * Close an image that was changed. r: what became of that; and if all went well, what is found out
 * now: somebody else has written to its metadata meanwhile.
 */
int img_close(pcow_image *image, int r, struct pcow_error *error);

/* Join the directory of the file path with name.  -ENAMETOOLONG */
int sibling_path(const char *path, const char *name, char result[PATH_MAX],
                 struct pcow_error *error);

/*
 * The path of the base that -b names for the image path: a bare name lies beside the image, as for
 * qemu-img; a path is taken as it is (libpcow insists that it leads to the same directory).
 */
int base_path(const char *path, const char *base, char result[PATH_MAX], struct pcow_error *error);

/* Is format one that a base can have ("pcow" or "pcow1")?  NULL is. */
int check_base_format(const char *format, struct pcow_error *error);

/* "on" or "off"; false with *error set for anything else. */
bool parse_switch(const char *key, const char *value, bool *on, struct pcow_error *error);

#endif
