/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * QMP commands for the snapshots of a single pcow image.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/core/cpu.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/timer.h"
#include "system/hostmem-pcow.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"
#include "system/system.h"
#include "system/tcg.h"

/* As hostmem_pcow_by_id(), to change the image. */
static HostMemPcow *find_settled_pcow(const char *id, Error **errp)
{
    HostMemPcow *pcow = hostmem_pcow_by_id(id, errp);

    return pcow && hostmem_pcow_check_settled(errp) ? pcow : NULL;
}

static bool check_new_name(const char *name, Error **errp)
{
    if (hostmem_pcow_is_mark(name)) {
        error_setg(errp, "'%s' is like the names of snapshots that are "
                   "unfinished: choose another", name);
        return false;
    }
    return true;
}

/* A load that failed halfway is another matter: who gives up on it may. */
static bool check_old_name(const char *name, Error **errp)
{
    if (hostmem_pcow_is_migration_name(name) ||
        hostmem_pcow_is_arrival_name(name)) {
        error_setg(errp, "the snapshot '%s' belongs to a live migration, which "
                   "deletes it itself, or the next start of the VM does", name);
        return false;
    }
    return true;
}

/* Also after others may have done something */
static HostMemPcow *find_to_create(const char *id, const char *name,
                                   Error **errp)
{
    HostMemPcow *pcow = find_settled_pcow(id, errp);

    if (!pcow || !check_new_name(name, errp) ||
        !hostmem_pcow_check_not_loading(NULL, errp)) {
        return NULL;
    }
    if (runstate_check(RUN_STATE_SAVE_VM) ||
        runstate_check(RUN_STATE_RESTORE_VM)) {
        error_setg(errp, "a snapshot of the whole VM is being taken, or "
                   "reverted to: wait until that has ended");
        return NULL;
    }
    return pcow;
}

/*
 * A snapshot is made in steps, see pcow_snapshot_prepare(): what waits for the
 * medium does so in a worker, while the guest and the main loop go on.  No
 * other one of these commands meanwhile: QMP serves one at a time, of all
 * monitors.  Between the steps others may do something to the image.
 */
typedef struct Creation {
    HostMemPcow *pcow;
    const char *id;
    HostMemPcowMaking making;
} Creation;

static bool may_go_on(const Creation *creation, Error **errp)
{
    HostMemPcow *found = find_to_create(creation->id, creation->making.name,
                                        errp);

    if (found && found != creation->pcow) {
        error_setg(errp, "the memory backend '%s' was removed meanwhile",
                   creation->id);
        return false;
    }
    return found;
}

bool hostmem_pcow_propagate(int ret, const struct pcow_error *error,
                            Error **errp)
{
    if (ret < 0) {
        error_setg(errp, "%s", error->message);
    }
    return ret >= 0;
}

/* The guest is held. */
static bool freeze(const Creation *creation, Error **errp)
{
    struct pcow_error error;

    return may_go_on(creation, errp) &&
           hostmem_pcow_propagate(pcow_snapshot_freeze(creation->pcow->image,
                                                       creation->making.token,
                                                       &error),
                                  &error, errp);
}

static bool coroutine_fn create(Creation *creation, uint32_t limit,
                                uint64_t *pause, Error **errp)
{
    bool ok = hostmem_pcow_co_change(creation->pcow,
                                     hostmem_pcow_prepare_snapshot,
                                     &creation->making, errp);

    if (!ok || !hostmem_pcow_co_hold_guest(limit, errp)) {
        return false;
    }
    ok = freeze(creation, errp);
    *pause = hostmem_pcow_release_guest();
    return ok && hostmem_pcow_co_change(creation->pcow,
                                        hostmem_pcow_finish_snapshot,
                                        &creation->making, errp);
}

PcowSnapshotCreated *coroutine_fn
qmp_pcow_snapshot_create(const char *id, const char *name, bool has_max_wait,
                         uint32_t max_wait, Error **errp)
{
    const int64_t now = g_get_real_time();
    Creation creation = {
        .id = id,
        .making = {
            .name = name,
            .date_sec = now / G_USEC_PER_SEC,
            .date_nsec = now % G_USEC_PER_SEC * 1000,
        },
    };
    PcowSnapshotCreated *result = NULL;
    uint64_t pause;

    hostmem_pcow_await_changes();
    creation.pcow = find_to_create(id, name, errp);
    if (!creation.pcow) {
        return NULL;
    }
    object_ref(OBJECT(creation.pcow->backend));
    if (create(&creation, has_max_wait ? max_wait : HOSTMEM_PCOW_LIMIT_MS,
               &pause, errp)) {
        result = g_new0(PcowSnapshotCreated, 1);
        result->pause = pause;
    } else {
        /* What fails here is done by the next operation */
        hostmem_pcow_co_change(creation.pcow, hostmem_pcow_abandon_snapshot,
                               &creation.making, NULL);
    }
    object_unref(OBJECT(creation.pcow->backend));
    return result;
}

bool hostmem_pcow_revert(HostMemPcow *pcow, const char *name, Error **errp)
{
    struct pcow_error error;
    int ret;

    /* A flush walks the chain of images, which this exchanges */
    hostmem_pcow_await_flushes(pcow);
    if (!hostmem_pcow_hold_guest(errp)) {
        return false;
    }
    ret = pcow_snapshot_revert(pcow->image, name, &error);
    hostmem_pcow_release_guest();
    /*
     * Code that the guest ran straight from the image may differ now, also
     * after an error: that may be one behind the commit.  A machine without a
     * CPU has none.
     */
    if (tcg_enabled() && first_cpu) {
        tb_flush(first_cpu);
    }
    if (ret < 0) {
        error_setg(errp, "%s", error.message);
    }
    return ret == 0;
}

static uint32_t active_layer(const HostMemPcow *pcow)
{
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    return info.active_layer;
}

void qmp_pcow_snapshot_revert(const char *id, const char *name, Error **errp)
{
    HostMemPcow *pcow;
    uint32_t before;

    hostmem_pcow_await_changes();
    pcow = find_settled_pcow(id, errp);
    /* That would be undone by the next QEMU, which finishes the load. */
    if (!pcow || !check_old_name(name, errp) ||
        !hostmem_pcow_check_not_loading(NULL, errp)) {
        return;
    }
    if (runstate_is_running()) {
        error_setg(errp, "the VM is running: stop it before reverting the "
                   "pcow image '%s'", pcow_path(pcow->image));
        return;
    }
    before = active_layer(pcow);
    hostmem_pcow_revert(pcow, name, errp);
    /* What fails behind the commit leaves other memory to the guest as well */
    if (active_layer(pcow) != before) {
        qemu_system_reset(SHUTDOWN_CAUSE_HOST_QMP_SYSTEM_RESET);
    }
}

PcowSnapshotDeleted *coroutine_fn
qmp_pcow_snapshot_delete(const char *id, const char *name, Error **errp)
{
    HostMemPcowDeletion deletion = { .name = name };
    PcowSnapshotDeleted *result;
    HostMemPcow *pcow;

    hostmem_pcow_await_changes();
    pcow = find_settled_pcow(id, errp);
    if (!pcow || !check_old_name(name, errp) ||
        !hostmem_pcow_co_change(pcow, hostmem_pcow_delete_snapshot, &deletion,
                                errp)) {
        return NULL;
    }
    result = g_new0(PcowSnapshotDeleted, 1);
    result->freed = deletion.freed;
    return result;
}

void coroutine_fn qmp_pcow_snapshot_rename(const char *id, const char *name,
                                           const char *new_name, Error **errp)
{
    HostMemPcowRenaming renaming = { name, new_name };
    HostMemPcow *pcow;

    hostmem_pcow_await_changes();
    pcow = find_settled_pcow(id, errp);
    if (pcow && check_old_name(name, errp) && check_new_name(new_name, errp)) {
        hostmem_pcow_co_change(pcow, hostmem_pcow_rename_snapshot, &renaming,
                               errp);
    }
}
