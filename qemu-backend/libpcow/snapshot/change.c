/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/change.h"

#include "image/lock.h"
#include "image/remains.h"
#include "monitor/monitor.h"
#include "snapshot/making.h"
#include "snapshot/tree.h"

static int lock(struct pcow_image *image, bool making, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (!ret)
        ret = lock_tree(&image->file, true, error);
    if (ret)
        return ret;
    ret = tree_free_stale_record(image, error);
    if (!ret && !making && image->making.step != MAKING_NONE) {
        change_hold(image);
        ret = making_settle(image, error);
        change_let_go(image);
    }
    if (ret)
        unlock_tree(&image->file);
    return ret;
}

int change_lock(struct pcow_image *image, struct pcow_error *error)
{
    return lock(image, false, error);
}

void change_hold(struct pcow_image *image)
{
    if (image->map)
        turnstile_hold(image->map);
}

static int begin(struct pcow_image *image, bool making, struct pcow_error *error)
{
    int ret = lock(image, making, error);

    if (!ret)
        change_hold(image);
    return ret;
}

int change_begin(struct pcow_image *image, struct pcow_error *error)
{
    return begin(image, false, error);
}

int change_begin_making(struct pcow_image *image, struct pcow_error *error)
{
    return begin(image, true, error);
}

void change_end(struct pcow_image *image)
{
    unlock_tree(&image->file);
    change_let_go(image);
}

void change_let_go(struct pcow_image *image)
{
    if (image->map)
        turnstile_release(image->map);
    if (image->map
        && (remains_are_due(image) || ahead_has_frozen(image->map) || retire_is_due(image->map)))
        ahead_wake(image->map);
}
