/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef IMG_SOURCE_FILE_H
#define IMG_SOURCE_FILE_H

#include <pcow.h>

/*
 * A descriptor to read a file that somebody has named. A symbolic link, in its place or on the way
 * to it, is followed if it is the user's own, or root's: who may write to a directory there would
 * choose else which file root reads. libpcow does the same in the place of an image.
 */
int source_file_open(const char *path, struct pcow_error *error);

#endif
