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

static enum pcow_persistence persistence(const HostMemPcow *pcow)
{
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    return info.persistence;
}

/* The guest is held. */
static bool create(HostMemPcow *pcow, const char *id, const char *name,
                   Error **errp)
{
    HostMemPcow *found = find_to_create(id, name, errp);
    struct pcow_error error;

    if (!found) {
        return false;
    }
    if (found != pcow) {
        error_setg(errp, "the memory backend '%s' was removed meanwhile", id);
        return false;
    }
    if (pcow_snapshot_create(pcow->image, name, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    return true;
}

/* What the guest has not flushed is part of it, too. */
static bool coroutine_fn make_durable(HostMemPcow *pcow, const char *name,
                                      Error **errp)
{
    if (persistence(pcow) != PCOW_PERSISTENCE_PMEM ||
        hostmem_pcow_co_flush(pcow, errp) == 0) {
        return true;
    }
    pcow_snapshot_delete(pcow->image, name, NULL, NULL);
    return false;
}

PcowSnapshotCreated *coroutine_fn
qmp_pcow_snapshot_create(const char *id, const char *name, bool has_max_wait,
                         uint32_t max_wait, Error **errp)
{
    HostMemPcow *pcow = find_to_create(id, name, errp);
    uint32_t limit = has_max_wait ? max_wait : HOSTMEM_PCOW_LIMIT_MS;
    PcowSnapshotCreated *result = NULL;
    uint64_t pause;
    bool ok;

    if (!pcow) {
        return NULL;
    }
    object_ref(OBJECT(pcow->backend));
    ok = (persistence(pcow) != PCOW_PERSISTENCE_PAGE_CACHE ||
          hostmem_pcow_co_flush_ahead(pcow, errp) == 0) &&
         hostmem_pcow_co_hold_guest(limit, errp);
    if (ok) {
        ok = create(pcow, id, name, errp);
        pause = hostmem_pcow_release_guest();
    }
    if (ok && make_durable(pcow, name, errp)) {
        result = g_new0(PcowSnapshotCreated, 1);
        result->pause = pause;
    }
    object_unref(OBJECT(pcow->backend));
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
    if (ret < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    /*
     * Code that the guest ran straight from the image may differ now.  A
     * machine without a CPU has none.
     */
    if (tcg_enabled() && first_cpu) {
        tb_flush(first_cpu);
    }
    return true;
}

void qmp_pcow_snapshot_revert(const char *id, const char *name, Error **errp)
{
    HostMemPcow *pcow = find_settled_pcow(id, errp);

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
    if (hostmem_pcow_revert(pcow, name, errp)) {
        qemu_system_reset(SHUTDOWN_CAUSE_HOST_QMP_SYSTEM_RESET);
    }
}

PcowSnapshotDeleted *qmp_pcow_snapshot_delete(const char *id, const char *name,
                                              Error **errp)
{
    HostMemPcow *pcow = find_settled_pcow(id, errp);
    PcowSnapshotDeleted *result;
    struct pcow_error error;
    uint64_t freed;

    if (!pcow || !check_old_name(name, errp)) {
        return NULL;
    }
    if (pcow_snapshot_delete(pcow->image, name, &freed, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return NULL;
    }
    result = g_new0(PcowSnapshotDeleted, 1);
    result->freed = freed;
    return result;
}

void qmp_pcow_snapshot_rename(const char *id, const char *name,
                              const char *new_name, Error **errp)
{
    HostMemPcow *pcow = find_settled_pcow(id, errp);
    struct pcow_error error;

    if (pcow && check_old_name(name, errp) && check_new_name(new_name, errp) &&
        pcow_snapshot_rename(pcow->image, name, new_name, &error) < 0) {
        error_setg(errp, "%s", error.message);
    }
}
