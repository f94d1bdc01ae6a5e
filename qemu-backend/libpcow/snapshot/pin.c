/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/pin.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "image/lock.h"
#include "snapshot/beside_writer.h"
#include "snapshot/flags.h"
#include "snapshot/tree.h"
#include "util/error.h"

int pin_set(const struct pcow_image *base, struct pcow_error *error)
{
    const struct layer *layer = layer_find(base, base->view);
    struct file file;
    int ret;

    if (layer->flags & LAYER_PINNED)
        return 0;
    ret = beside_writer_open(base, &file, error);
    if (ret)
        return ret;
    ret = lock_tree(&file, true, error);
    if (!ret)
        ret = beside_writer_attach(&file, error);
    if (!ret)
        ret = flags_change(base, &file, layer, LAYER_PINNED, 0, error);
    file_close(&file);
    return ret;
}

bool pin_is_set(const struct pcow_image *image, const struct layer *layer)
{
    struct layer now = *layer;

    /* A reader has what it loaded; a writer's own view of the mark may be old. */
    if (image->file.writable)
        flags_refresh(image, &now, NULL);
    return now.flags & LAYER_PINNED;
}

static int refuse(const struct pcow_image *image, const struct layer *layer,
                  const struct children *children, struct pcow_error *error)
{
    if (children->count)
        return error_set(
            error, -EBUSY, "%s: %u image%s on snapshot '%s': %s; delete or rebase %s first",
            image->file.path, children->count, children->count == 1 ? " stands" : "s stand",
            layer->name, children->names, children->count == 1 ? "it" : "them");
    return error_set(error, -EBUSY,
                     "%s: '%s' in its directory may stand on snapshot '%s', but cannot be read; "
                     "repair or remove it, or run "
                     "'pcow-img snapshot --unpin' as a user who may read it",
                     image->file.path, children->first_unknown, layer->name);
}

int pin_check_free(const struct pcow_image *image, const struct file *file, struct layer *layer,
                   struct pcow_error *error)
{
    struct children children = {0};
    int ret = flags_refresh(image, layer, error), busy, found = 0;

    if (ret)
        return ret;
    /*
     * First the lock: who is about to make an image on it holds it until that image can be found.
     */
    busy = lock_snapshot(file, layer->id, true);
    if (busy && busy != -EBUSY)
        return error_set_errno(error, busy, "cannot lock snapshot '%s' of %s", layer->name,
                               image->file.path);
    if (layer->flags & LAYER_PINNED || busy)
        found = children_find(image, layer->id, !busy, &children);
    if (children.count || (layer->flags & LAYER_PINNED && children.unknown))
        ret = refuse(image, layer, &children, error);
    else if (busy)
        ret = error_set(error, -EBUSY,
                        "%s: snapshot '%s' is in use (by an export, or by a VM or tool whose image "
                        "stands on it); "
                        "wait for it or stop it first",
                        image->file.path, layer->name);
    else if (layer->flags & LAYER_PINNED && found == -EBUSY)
        ret = error_set(error, -EBUSY,
                        "%s: images were made on snapshot '%s', and whether they still exist "
                        "cannot be seen while files come and go "
                        "in its directory all the time; try again",
                        image->file.path, layer->name);
    else if (layer->flags & LAYER_PINNED && found)
        ret = error_set(
            error, -EBUSY,
            "%s: images were made on snapshot '%s', and whether they still exist cannot be seen "
            "from here (%s); "
            "run 'pcow-img snapshot --unpin' as a user who may list the directory, then try again",
            image->file.path, layer->name, strerror(-found));
    else if (layer->flags & LAYER_PINNED
             && (image->elsewhere || children.image.st_nlink > children.names_of_image))
        ret = error_set(error, -EBUSY,
                        "%s: images were made on snapshot '%s', and whether they still exist "
                        "cannot be seen from here: the image "
                        "has another name outside of it (a hard link or a bind mount); use the one "
                        "in its pool, and remove other hard links",
                        image->file.path, layer->name);
    if (ret && !busy)
        unlock_snapshot(file, layer->id);
    return ret;
}

int pin_clear(struct pcow_image *image, const char *name, struct pcow_error *error)
{
    struct layer *layer = snapshot_find(image, name, error);
    struct file file;
    int ret;

    if (!layer)
        return -ENOENT;
    if (!(layer->flags & LAYER_PINNED))
        return 0;
    ret = beside_writer_open(image, &file, error);
    if (ret)
        return ret;
    /*
     * The lock that our own view holds is in the way of the question whether anybody else has one.
     */
    unlock_snapshot(&image->file, layer->id);
    ret = lock_tree(&file, true, error);
    if (!ret)
        ret = pin_check_free(image, &file, layer, error);
    if (!ret)
        ret = beside_writer_attach(&file, error);
    if (!ret)
        ret = flags_change(image, &file, layer, 0, LAYER_PINNED, error);
    file_close(&file);
    return ret;
}
