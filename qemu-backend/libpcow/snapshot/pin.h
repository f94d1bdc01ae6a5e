/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshots that images stand on. A pinned snapshot is not deleted as long as a file in the
 * directory of its image names it as its base. The mark belongs to whoever has the tree locked, so
 * that it can be set in the image of a running VM.
 */
#ifndef PCOW_SNAPSHOT_PIN_H
#define PCOW_SNAPSHOT_PIN_H

#include <sys/stat.h>

#include "image/image.h"

#define CHILDREN_TEXT_SIZE 400

/* snapshot/children.c */
struct children {
    unsigned count;                    /* files whose base record names the snapshot */
    char names[CHILDREN_TEXT_SIZE];    /* the first of them, "'a', 'b', ..." */
    unsigned unknown;                  /* files that may stand on it, but could not be looked at */
    char first_unknown[PCOW_BASE_NAME_SIZE];
    struct stat image;
    /* that it has in its directory; with more links than those, it lies in another one too */
    uint64_t names_of_image;
};

/*
 * Who in its directory stands on this layer of the image? 0, or negative if that cannot be listed.
 * certain: nobody is left out, for which it may take some tenths of a second; -EBUSY: files come
 * and go all the time.
 */
int children_find(const struct pcow_image *image, uint32_t layer, bool certain,
                  struct children *children);

/* Mark a snapshot, durably. base is open at it, read-only, so it stays until base is closed. */
int pin_set(const struct pcow_image *base, struct pcow_error *error);

/*
 * Take the mark off if no image stands on it any more: pcow_snapshot_unpin(). image is open at the
 * snapshot, read-only.
 */
int pin_clear(struct pcow_image *image, const char *name, struct pcow_error *error);

/* Is it marked, as far as this image knows, or can see in the file? */
bool pin_is_set(const struct pcow_image *image, const struct layer *layer);

/*
 * May this snapshot go? 0, with the snapshot locked for ourselves; -EBUSY in words if somebody
 * reads it or an image stands on it. file, the image's or another descriptor of it, has the tree
 * locked for a change and gets the lock.
 */
int pin_check_free(const struct pcow_image *image, const struct file *file, struct layer *layer,
                   struct pcow_error *error);

#endif
