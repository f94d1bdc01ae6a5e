/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Checkpoints that are there, and what becomes of one that was being taken,
 * deleted or reverted to when QEMU was killed: see the table in
 * migration/pcow/checkpoint.h.
 */
#include "qemu/osdep.h"
#include "block/aio.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/coroutine.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "migration/pcow/checkpoint.h"

/* One is being taken or deleted: its marks are nobody else's. Main loop. */
static bool under_way;

void checkpoint_begin(void)
{
    assert(!under_way);
    under_way = true;
}

void checkpoint_end(void)
{
    under_way = false;
}

bool checkpoint_is_under_way(void)
{
    return under_way;
}

bool checkpoint_check_alone(Error **errp)
{
    if (under_way) {
        /* Whoever asks by QMP waits for these words, as pcow_driver does */
        error_setg(errp, "another checkpoint of the VM is being taken: wait "
                   "until that has ended");
    }
    return !under_way;
}

typedef struct Call {
    CheckpointFn *fn;
    void *opaque;
    Coroutine *waits;
    bool ok;
    Error *err;
} Call;

static void call_in_main_loop(void *opaque)
{
    Call *call = opaque;

    call->ok = call->fn(call->opaque, &call->err);
    aio_co_wake(call->waits);
}

bool coroutine_fn checkpoint_co_call(CheckpointFn *fn, void *opaque,
                                     Error **errp)
{
    Call call = { .fn = fn, .opaque = opaque, .waits = qemu_coroutine_self() };

    aio_bh_schedule_oneshot(qemu_get_aio_context(), call_in_main_loop, &call);
    qemu_coroutine_yield();
    error_propagate(errp, call.err);
    return call.ok;
}

/* ---- the parts of one ---------------------------------------------------- */

typedef struct Walk {
    HostMemPcow *home;
    const struct pcow_snapshot *of;
    CheckpointPartFn *fn;
    void *opaque;
} Walk;

static bool visit(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const Walk *walk = opaque;
    struct pcow_snapshot part;

    if (pcow->readonly || pcow == walk->home) {
        return true;
    }
    return checkpoint_find_part(pcow, walk->of, &part, errp) &&
           (!part.id || walk->fn(pcow, &part, walk->opaque, errp));
}

bool checkpoint_foreach_part(HostMemPcow *home, const struct pcow_snapshot *of,
                             CheckpointPartFn *fn, void *opaque, Error **errp)
{
    Walk walk = { home, of, fn, opaque };

    return hostmem_pcow_foreach(visit, &walk, errp);
}

static bool delete_part(HostMemPcow *pcow, const struct pcow_snapshot *part,
                        void *opaque, Error **errp)
{
    HostMemPcowDeletion deletion = { .name = part->name };

    return hostmem_pcow_change_unlocked(pcow, hostmem_pcow_delete_snapshot,
                                        &deletion, errp);
}

static bool delete_all(HostMemPcow *home, const struct pcow_snapshot *of,
                       Error **errp)
{
    struct pcow_snapshot last;

    /*
     * That of the home is what the others are found by: it goes last, by
     * whatever name it has by now
     */
    if (!checkpoint_foreach_part(home, of, delete_part, NULL, errp) ||
        !hostmem_pcow_find_snapshot(home->image, NULL, of->id, &last, errp)) {
        return false;
    }
    return !last.id || delete_part(home, &last, NULL, errp);
}

static bool rename_part(HostMemPcow *pcow, const struct pcow_snapshot *part,
                        void *opaque, Error **errp)
{
    const char *name = opaque;
    struct pcow_error error;
    int ret = 0;

    if (strcmp(part->name, name)) {
        ret = pcow_snapshot_rename(pcow->image, part->name, name, &error);
    }
    return hostmem_pcow_propagate(ret, &error, errp);
}

/* ---- a list -------------------------------------------------------------- */

static bool add_sizes(HostMemPcow *pcow, const struct pcow_snapshot *part,
                      void *opaque, Error **errp)
{
    PcowCheckpointInfo *info = opaque;

    info->data_size += part->data_size;
    info->shared_size += part->shared_size;
    info->delete_frees += part->delete_frees;
    return true;
}

/* Its name, or NULL: it is no checkpoint.  One that a revert is to keeps it. */
static const char *name_of(const HostMemPcow *home,
                           const struct pcow_snapshot *snapshot)
{
    if (!snapshot->state_size) {
        return NULL;
    }
    if (home->loading_mark && !strcmp(snapshot->name, home->loading_mark)) {
        return home->loading_name;
    }
    return hostmem_pcow_is_mark(snapshot->name) ? NULL : snapshot->name;
}

/* The nearest one that is a checkpoint, too. */
static const struct pcow_snapshot *
find_parent(const HostMemPcow *home, const struct pcow_snapshot *list,
            size_t count, uint32_t id)
{
    for (size_t left = count; id && left; left--) {
        size_t i = 0;

        while (i < count && list[i].id != id) {
            i++;
        }
        if (i == count) {
            return NULL;
        }
        if (name_of(home, &list[i])) {
            return &list[i];
        }
        id = list[i].parent_id;
    }
    return NULL;
}

/* Does the VM go on from it, with no other one in between? */
static bool is_current(const HostMemPcow *home,
                       const struct pcow_snapshot *list, size_t count,
                       const struct pcow_snapshot *snapshot)
{
    for (size_t i = 0; i < count; i++) {
        if (list[i].current) {
            return find_parent(home, list, count, list[i].id) == snapshot;
        }
    }
    return false;
}

static PcowCheckpointInfo *describe(HostMemPcow *home,
                                    const struct pcow_snapshot *list,
                                    size_t count, size_t at, Error **errp)
{
    const struct pcow_snapshot *snapshot = &list[at], *parent;
    PcowCheckpointInfo *info = g_new0(PcowCheckpointInfo, 1);

    parent = find_parent(home, list, count, snapshot->parent_id);
    info->name = g_strdup(name_of(home, snapshot));
    info->parent = parent ? g_strdup(name_of(home, parent)) : NULL;
    info->date_sec = snapshot->date_seconds;
    info->date_nsec = snapshot->date_nanoseconds;
    info->current = is_current(home, list, count, snapshot);
    info->state_size = snapshot->state_size;
    if (!add_sizes(home, snapshot, info, errp) ||
        !checkpoint_foreach_part(home, snapshot, add_sizes, info, errp)) {
        qapi_free_PcowCheckpointInfo(info);
        return NULL;
    }
    return info;
}

PcowCheckpointInfoList *coroutine_fn qmp_query_pcow_checkpoints(Error **errp)
{
    PcowCheckpointInfoList *result = NULL, **tail = &result;
    struct pcow_snapshot *list;
    struct pcow_error error;
    HostMemPcow *home;
    size_t count;
    int ret;

    /* The image may be taken away meanwhile */
    hostmem_pcow_await_changes();
    home = checkpoint_home(errp);
    if (!home) {
        return NULL;
    }
    ret = pcow_snapshot_list(home->image, &list, &count, &error);
    if (!hostmem_pcow_propagate(ret, &error, errp)) {
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        PcowCheckpointInfo *info;

        if (!name_of(home, &list[i])) {
            continue;
        }
        info = describe(home, list, count, i, errp);
        if (!info) {
            qapi_free_PcowCheckpointInfoList(result);
            result = NULL;
            break;
        }
        QAPI_LIST_APPEND(tail, info);
    }
    free(list);
    return result;
}

/* ---- what a QEMU left that was killed ------------------------------------ */

static bool finish_taking(HostMemPcow *home,
                          const struct pcow_snapshot *snapshot, Error **errp)
{
    g_autoptr(Checkpoint) checkpoint = NULL;

    if (!snapshot->state_size) {
        return delete_all(home, snapshot, errp);
    }
    checkpoint = checkpoint_read(home->image, snapshot, errp);
    if (!checkpoint) {
        return false;
    }
    return checkpoint_foreach_part(home, snapshot, rename_part,
                                   checkpoint->name, errp) &&
           rename_part(home, snapshot, checkpoint->name, errp);
}

static bool finish_reverting(HostMemPcow *home,
                             const struct pcow_snapshot *snapshot, Error **errp)
{
    g_autoptr(Checkpoint) checkpoint = checkpoint_read(home->image, snapshot,
                                                         errp);
    ERRP_GUARD();

    if (!checkpoint || !checkpoint_check_images(checkpoint, false, errp) ||
        !checkpoint_revert_images(false, errp)) {
        error_prepend(errp, "the VM was being reverted to '%s' of pcow image "
                      "'%s' when QEMU ended, which cannot be finished. Remove "
                      "the cause, or rename that snapshot to start with images "
                      "as they are (pcow-img snapshot --rename): ",
                      snapshot->name, pcow_path(home->image));
        return false;
    }
    if (!rename_part(home, snapshot, checkpoint->name, errp)) {
        return false;
    }
    info_report("the VM was being reverted to checkpoint '%s' when QEMU ended: "
                "its images are there now, RAM is as after a restart",
                checkpoint->name);
    return true;
}

static bool finish(HostMemPcow *home, const struct pcow_snapshot *snapshot,
                   Error **errp)
{
    CheckpointMark mark = checkpoint_parse_mark(snapshot->name);
    g_autofree char *name = NULL;

    if (mark == CHECKPOINT_MARKS) {
        return true;
    }
    /* It says in which image it is, and of when: else it is none */
    name = checkpoint_mark_name(mark, home, snapshot->date_seconds,
                                snapshot->date_nanoseconds);
    if (strcmp(name, snapshot->name)) {
        return true;
    }
    switch (mark) {
    case CHECKPOINT_TAKING:
        return finish_taking(home, snapshot, errp);
    case CHECKPOINT_DELETING:
        return delete_all(home, snapshot, errp);
    case CHECKPOINT_REVERTING:
        return finish_reverting(home, snapshot, errp);
    default:
        return true;
    }
}

/*
 * Parts that were made before that of the home was: nothing counts yet.  One
 * with the UUID of another home is another VM's.
 */
static bool take_back_strays(HostMemPcow *pcow, void *opaque, Error **errp)
{
    HostMemPcow *home = opaque;
    struct pcow_snapshot *list;
    size_t count;

    if (pcow->readonly || pcow == home ||
        pcow_snapshot_list(pcow->image, &list, &count, NULL) < 0) {
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        g_autofree char *mark =
            checkpoint_mark_name(CHECKPOINT_TAKING, home, list[i].date_seconds,
                                 list[i].date_nanoseconds);
        struct pcow_snapshot of;
        struct pcow_error error;

        if (strcmp(list[i].name, mark) ||
            !checkpoint_find_part(home, &list[i], &of, NULL) || of.id) {
            continue;
        }
        if (pcow_snapshot_delete(pcow->image, mark, NULL, &error) < 0) {
            warn_report("%s", error.message);
        }
    }
    free(list);
    return true;
}

void checkpoint_recover(bool at_start)
{
    HostMemPcow *home = checkpoint_find_home();
    struct pcow_snapshot *list;
    size_t count;

    if (under_way || !home || hostmem_pcow_is_arriving() ||
        pcow_snapshot_list(home->image, &list, &count, NULL) < 0) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        bool reverts = checkpoint_parse_mark(list[i].name) ==
                       CHECKPOINT_REVERTING;
        Error *err = NULL;

        /* One of this process that failed is for who lets the VM run */
        if ((reverts && !at_start) || finish(home, &list[i], &err)) {
            continue;
        }
        if (reverts) {
            /* Images of different times: nobody must run that */
            error_report_err(err);
            exit(1);
        }
        warn_report_err(err);
    }
    free(list);
    hostmem_pcow_foreach(take_back_strays, home, NULL);
}
