/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The files in which lists of a directory remember something of its images. What they say decides
 * what may be deleted, so one counts only if it belongs to this user, and nobody else may write
 * to it.
 */
#ifndef TOOLS_IMG_LIST_FILE_H
#define TOOLS_IMG_LIST_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#define LIST_FILE_NEW ".new"                    /* at the end of the name of one that is written */

/* Whether what was seen in an open directory stays true until this kernel changes it. */
bool list_file_can_be_kept(int directory);
/*
 * The directory of a file: who may write to the one above puts no link in its place. The name of
 * the file is what is behind it. -1: it cannot be opened.
 */
int list_file_place(const char *path, const char **name);
bool list_file_is_ours(int fd, struct stat *st);
/* To be replaced by rename(): -1 if somebody else just makes one, or this user may not. */
int list_file_new(int place, const char *name);
bool read_whole(int fd, void *buffer, size_t length);
bool write_whole(int fd, const void *buffer, size_t length);

#endif
