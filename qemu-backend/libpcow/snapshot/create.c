/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <time.h>

#include "snapshot/change.h"
#include "snapshot/making.h"
#include "util/error.h"

static int sync_and_go_on(struct pcow_image *image, struct pcow_error *error)
{
    int ret = image_sync(image);

    return ret ? error_set_errno(error, ret, "cannot flush %s", image->file.path) : 0;
}

/* All of it at once. Nobody stores to a map meanwhile. */
static int create(struct pcow_image *image, const char *name, int64_t date_seconds,
                  uint32_t date_nanoseconds, struct pcow_error *error)
{
    int ret = making_settle(image, error);

    while (!ret
           && (ret = making_prepare(image, name, date_seconds, date_nanoseconds, error)) == PCOW_FLUSH_FIRST)
        ret = sync_and_go_on(image, error);
    if (!ret && image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        ret = sync_and_go_on(image, error);
    if (!ret)
        ret = making_freeze(image, error);
    while (!ret && (ret = making_finish(image, false, error)) == PCOW_FLUSH_FIRST)
        ret = sync_and_go_on(image, error);
    return ret;
}

int pcow_snapshot_create_at(pcow_image *image, const char *name, int64_t date_seconds,
                            uint32_t date_nanoseconds, struct pcow_error *error)
{
    int ret = change_begin_making(image, error);

    if (ret)
        return ret;
    ret = create(image, name, date_seconds, date_nanoseconds, error);
    if (ret)
        making_abandon(image, NULL);
    change_end(image);
    return ret;
}

int pcow_snapshot_create(pcow_image *image, const char *name, struct pcow_error *error)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return pcow_snapshot_create_at(image, name, now.tv_sec, (uint32_t)now.tv_nsec, error);
}

int pcow_snapshot_prepare(pcow_image *image, const char *name, int64_t date_seconds,
                          uint32_t date_nanoseconds, struct pcow_error *error)
{
    int ret = change_begin_making(image, error);

    if (ret)
        return ret;
    ret = making_prepare(image, name, date_seconds, date_nanoseconds, error);
    change_end(image);
    return ret;
}

int pcow_snapshot_freeze(pcow_image *image, struct pcow_error *error)
{
    int ret = change_begin_making(image, error);

    if (ret)
        return ret;
    ret = making_freeze(image, error);
    change_end(image);
    return ret;
}

int pcow_snapshot_finish(pcow_image *image, uint32_t *id, struct pcow_error *error)
{
    int ret = change_begin_making(image, error);

    if (ret)
        return ret;
    if (id)
        *id = image->making.layer;
    ret = making_finish(image, true, error);
    change_end(image);
    return ret;
}

int pcow_snapshot_abandon(pcow_image *image, struct pcow_error *error)
{
    int ret = change_begin_making(image, error);

    if (ret)
        return ret;
    ret = making_abandon(image, error);
    change_end(image);
    return ret;
}
