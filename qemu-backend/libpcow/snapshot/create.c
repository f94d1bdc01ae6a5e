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

/* Nobody could flush it otherwise. False: there is a map, or *ret is what has failed. */
static bool sync_without_map(struct pcow_image *image, int *ret, struct pcow_error *error)
{
    int failed;

    if (image->map)
        return false;
    failed = image_sync_stores(image);
    if (failed)
        *ret = error_set_errno(error, failed, "cannot flush %s", image->file.path);
    return !failed;
}

/* All of it at once. Nobody stores to a map meanwhile. */
static int create(struct pcow_image *image, const char *name, int64_t date_seconds,
                  uint32_t date_nanoseconds, struct pcow_error *error)
{
    uint64_t token = 0;
    int ret;

    while ((ret = making_prepare(image, name, date_seconds, date_nanoseconds, &token, error))
           == PCOW_FLUSH_FIRST)
        if ((ret = sync_and_go_on(image, error)))
            break;
    if (!ret && image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        ret = sync_and_go_on(image, error);
    if (!ret)
        ret = making_freeze(image, token, error);
    while (!ret && (ret = making_finish(image, token, false, error)) == PCOW_FLUSH_FIRST)
        ret = sync_and_go_on(image, error);
    if (ret) {
        making_give_up(image, token);
        (void)making_settle(image, NULL);
    }
    return ret;
}

int pcow_snapshot_create_at(pcow_image *image, const char *name, int64_t date_seconds,
                            uint32_t date_nanoseconds, struct pcow_error *error)
{
    int ret = change_begin(image, error);

    if (ret)
        return ret;
    ret = create(image, name, date_seconds, date_nanoseconds, error);
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
                          uint32_t date_nanoseconds, uint64_t *token, struct pcow_error *error)
{
    int ret = change_begin_making(image, error);

    if (ret)
        return ret;
    do {
        ret = making_prepare(image, name, date_seconds, date_nanoseconds, token, error);
    } while (ret == PCOW_FLUSH_FIRST && sync_without_map(image, &ret, error));
    change_end(image);
    return ret;
}

/* Without a lock of the tree: who reads it would let the guest stand. */
int pcow_snapshot_freeze(pcow_image *image, uint64_t token, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    change_hold(image);
    ret = making_freeze(image, token, error);
    change_let_go(image);
    return ret;
}

/* Without that lock, too: one word makes a snapshot of a layer that is hidden to who reads. */
int pcow_snapshot_finish(pcow_image *image, uint64_t token, uint32_t *id, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    if (id)
        *id = making_layer(token);
    do {
        ret = making_finish(image, token, true, error);
    } while (ret == PCOW_FLUSH_FIRST && sync_without_map(image, &ret, error));
    return ret;
}

void snapshot_close(struct pcow_image *image)
{
    if (image->making.step < MAKING_MARKED)
        return;
    making_give_up(image, making_token(image));
    if (change_begin_making(image, NULL))
        return;
    (void)making_settle(image, NULL);
    change_end(image);
}

int pcow_snapshot_abandon(pcow_image *image, uint64_t token, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    /* Whatever comes of the rest. */
    making_give_up(image, token);
    ret = change_begin_making(image, error);
    if (ret)
        return ret;
    ret = image->making.step == MAKING_ABANDONED ? making_settle(image, error) : 0;
    change_end(image);
    return ret;
}
