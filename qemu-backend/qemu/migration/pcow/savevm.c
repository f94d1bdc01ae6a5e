/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * pcow images in snapshots of a whole VM (savevm, snapshot-save, virsh
 * snapshot-create).
 *
 * The contents of an image never travel through the VM state.  Each image
 * takes a snapshot of the same name and date inside itself, and the VM state
 * records which one (migration/pcow/identity.c).  Loading a state
 * (migration/pcow/loadvm.c) compares name and date before anything is changed,
 * and the rest when the state has been read.
 *
 * While the disks (migration/pcow/carrier.c) take or delete their part, the
 * snapshot inside the image has a name that says so: a QEMU that is killed
 * meanwhile leaves a mark, by which the next one goes forth or back.
 *
 *   guest   what is done                              a crash here leaves
 *   ------  ----------------------------------------  ----------------------
 *   runs    flush what it has stored, prepare a       nothing
 *           snapshot in each image
 *   stands  freeze each image; the devices are saved  layers that are merged
 *   stands  flush what is frozen: each image has its  snapshots with the name
 *           snapshot                                  of a mark: taken back
 *   stands  each disk takes its part                  a mark: taken back, or
 *                                                     kept if all disks have it
 *   runs    give all of them the name                 a mark: kept
 *
 * The flush in the pause is for what the guest has stored since the last one
 * before it, as the disks' part must not be there before the images'.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "system/hostmem-pcow.h"

bool hostmem_pcow_find_snapshot(struct pcow_image *image, const char *name,
                                uint32_t id, struct pcow_snapshot *found,
                                Error **errp)
{
    struct pcow_snapshot *list;
    struct pcow_error error;
    size_t count;

    found->id = 0;
    if (pcow_snapshot_list(image, &list, &count, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        if (name ? !strcmp(list[i].name, name) : list[i].id == id) {
            *found = list[i];
        }
    }
    free(list);
    return true;
}

static bool refuse_disk_only(HostMemPcow *pcow, void *opaque, Error **errp)
{
    error_setg(errp, "a snapshot of disks alone would leave out the pcow image "
               "'%s' (memory backend '%s'), whose contents stay in the image. "
               "Use snapshot-save (virsh snapshot-create without --disk-only), "
               "or pcowctl snapshot create for the image alone",
               pcow_path(pcow->image), pcow->id);
    return false;
}

bool hostmem_pcow_check_disk_only(Error **errp)
{
    return hostmem_pcow_foreach(refuse_disk_only, NULL, errp);
}

/* ---- taking a snapshot --------------------------------------------------- */

static bool check_new(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_snapshot found;

    if (!hostmem_pcow_find_snapshot(pcow->image, opaque, 0, &found, errp)) {
        return false;
    }
    if (found.id) {
        error_setg(errp, "pcow image '%s' has a snapshot '%s' already: choose "
                   "another name, or delete that one first (virsh "
                   "snapshot-delete, or pcowctl snapshot delete if the disks "
                   "have none of that name)", pcow_path(pcow->image),
                   (const char *)opaque);
        return false;
    }
    return true;
}

bool hostmem_pcow_all_check_name(const char *name, Error **errp)
{
    if (!hostmem_pcow_check_not_loading(NULL, errp)) {
        return false;
    }
    if (strlen(name) >= PCOW_SNAPSHOT_NAME_SIZE ||
        hostmem_pcow_is_mark(name)) {
        error_setg(errp, "'%s' cannot be the name of a snapshot of a VM with "
                   "pcow images: at most %d bytes, and not like those that "
                   "mark an unfinished one", name, PCOW_SNAPSHOT_NAME_SIZE - 1);
        return false;
    }
    return hostmem_pcow_foreach(check_new, (void *)name, errp);
}

bool hostmem_pcow_all_check_new(const char *name, bool has_devices,
                                strList *devices, Error **errp)
{
    if (!hostmem_pcow_present()) {
        return true;
    }
    hostmem_pcow_await_changes();
    if (!hostmem_pcow_check_settled(errp)) {
        return false;
    }
    hostmem_pcow_all_recover();
    return hostmem_pcow_all_check_name(name, errp) &&
           hostmem_pcow_check_new_on_disks(name, has_devices, devices, errp);
}

/* ---- before the VM is stopped -------------------------------------------- */

struct HostMemPcowSaving {
    HostMemPcowMaking making;
    char *name;                 /* of a mark */
};

static void forget_saving(HostMemPcow *pcow)
{
    if (pcow->saving) {
        g_free(pcow->saving->name);
    }
    g_clear_pointer(&pcow->saving, g_free);
}

static bool forget_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    forget_saving(pcow);
    pcow->snapshot_id = 0;
    return true;
}

static bool prepare_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const HostMemPcowMark *mark = opaque;

    if (pcow->readonly) {
        return true;
    }
    pcow->saving = g_new0(struct HostMemPcowSaving, 1);
    pcow->saving->name = hostmem_pcow_mark_name(mark);
    pcow->saving->making = (HostMemPcowMaking) {
        .name = pcow->saving->name,
        .date_sec = mark->date_sec,
        .date_nsec = mark->date_nsec,
    };
    return hostmem_pcow_change_unlocked(pcow, hostmem_pcow_prepare_snapshot,
                                        &pcow->saving->making, errp);
}

bool hostmem_pcow_all_prepare_snapshot(GDateTime *date, bool has_devices,
                                       strList *devices, Error **errp)
{
    HostMemPcowMark mark = {
        .date_sec = g_date_time_to_unix(date),
        .date_nsec = g_date_time_get_microsecond(date) * 1000,
    };

    if (!hostmem_pcow_present()) {
        return true;
    }
    hostmem_pcow_foreach(forget_snapshot, NULL, NULL);
    /* Those of the monitor's savevm are the first */
    hostmem_pcow_all_flush_ahead();
    if (!hostmem_pcow_all_flushed_ahead(errp) ||
        !hostmem_pcow_count_disks(has_devices, devices, NULL, &mark.disks,
                                  errp) ||
        !hostmem_pcow_foreach(prepare_snapshot, &mark, errp)) {
        hostmem_pcow_all_undo_snapshot();
        return false;
    }
    return true;
}

/* ---- while it stands ----------------------------------------------------- */

static bool freeze(HostMemPcow *pcow, void *opaque, Error **errp)
{
    g_autofree char *name = hostmem_pcow_mark_name(opaque);
    struct pcow_error error;
    struct pcow_info info;
    int ret;

    if (pcow->readonly) {
        return true;
    }
    if (!pcow->saving || strcmp(pcow->saving->name, name)) {
        error_setg(errp, "images or disks of the VM were plugged or unplugged "
                   "while the snapshot was prepared: try again");
        return false;
    }
    /* The layer that stores go to is what becomes the snapshot */
    pcow_get_info(pcow->image, &info);
    pcow->snapshot_id = info.active_layer;
    ret = pcow_snapshot_freeze(pcow->image, pcow->saving->making.token,
                               &error);
    return hostmem_pcow_propagate(ret, &error, errp);
}

/* Give the snapshot that is being worked on another name. */
static bool rename_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    HostMemPcowRenaming renaming = { .new_name = opaque };
    struct pcow_snapshot found;

    if (!pcow->snapshot_id) {
        return true;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, NULL, pcow->snapshot_id,
                                    &found, errp)) {
        return false;
    }
    renaming.name = found.name;
    return hostmem_pcow_change_unlocked(pcow, hostmem_pcow_rename_snapshot,
                                        &renaming, errp);
}

/* Delete the snapshot that is being worked on. */
static bool delete_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    HostMemPcowDeletion deletion = {};
    struct pcow_snapshot found;

    if (!pcow->snapshot_id) {
        return true;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, NULL, pcow->snapshot_id,
                                    &found, errp)) {
        return false;
    }
    deletion.name = found.name;
    if (found.id &&
        !hostmem_pcow_change_unlocked(pcow, hostmem_pcow_delete_snapshot,
                                      &deletion, errp)) {
        return false;
    }
    pcow->snapshot_id = 0;
    return true;
}

static bool take_back(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Error *err = NULL;

    if (pcow->saving) {
        /* What fails here is done by the next operation */
        hostmem_pcow_change_unlocked(pcow, hostmem_pcow_abandon_snapshot,
                                     &pcow->saving->making, NULL);
        forget_snapshot(pcow, NULL, NULL);
    } else if (!delete_snapshot(pcow, opaque, &err)) {
        warn_report_err(err);
    }
    return true;
}

bool hostmem_pcow_all_create_snapshot(const QEMUSnapshotInfo *sn,
                                      bool has_devices, strList *devices,
                                      Error **errp)
{
    HostMemPcowMark mark = {
        .date_sec = sn->date_sec,
        .date_nsec = sn->date_nsec,
    };
    bool ok;

    if (!hostmem_pcow_present()) {
        return true;
    }
    if (!hostmem_pcow_check_no_stores(errp) ||
        !hostmem_pcow_count_disks(has_devices, devices, NULL, &mark.disks,
                                  errp)) {
        return false;
    }
    /* Another monitor may have begun one since the VM was stopped */
    hostmem_pcow_await_changes();
    if (!hostmem_pcow_hold_guest(errp)) {
        return false;
    }
    ok = hostmem_pcow_foreach(freeze, &mark, errp);
    hostmem_pcow_release_guest();
    return ok;
}

/* The disks take their part next, which makes it count. */
static bool finish(HostMemPcow *pcow, void *opaque, Error **errp)
{
    if (pcow->readonly) {
        return true;
    }
    if (!hostmem_pcow_finish_snapshot(pcow, &pcow->saving->making, errp)) {
        return false;
    }
    forget_saving(pcow);
    return true;
}

bool hostmem_pcow_all_flush(Error **errp)
{
    return hostmem_pcow_all_flushed_ahead(errp) &&
           hostmem_pcow_foreach(finish, NULL, errp);
}

/* ---- when it runs again -------------------------------------------------- */

bool hostmem_pcow_all_finish_snapshot(const char *name, Error **errp)
{
    return hostmem_pcow_foreach(rename_snapshot, (void *)name, errp);
}

void hostmem_pcow_all_undo_snapshot(void)
{
    hostmem_pcow_foreach(take_back, NULL, NULL);
}

/* ---- deleting one -------------------------------------------------------- */

typedef struct DeleteArgs {
    const char *name;
    bool has_devices;
    strList *devices;
} DeleteArgs;

/*
 * Mark it, if it is one with a part on disks: that of the same name and date.
 * Without space for the mark it goes without, as deleting is the way to get
 * space.
 */
static bool mark_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const DeleteArgs *args = opaque;
    HostMemPcowRenaming renaming = { .name = args->name };
    g_autofree char *mark_name = NULL;
    struct pcow_snapshot found;
    struct pcow_error error;
    HostMemPcowMark mark = {};
    Error *err = NULL;

    if (pcow->readonly) {
        return true;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, args->name, 0, &found,
                                    errp)) {
        return false;
    }
    if (found.id &&
        pcow_snapshot_check_delete(pcow->image, args->name, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    pcow->snapshot_id = found.id;
    mark.date_sec = found.date_seconds;
    mark.date_nsec = found.date_nanoseconds;
    if (!found.id || mark.date_sec != found.date_seconds ||
        !hostmem_pcow_count_disks(args->has_devices, args->devices, &mark,
                                  &mark.disks, NULL) || !mark.disks) {
        return true;
    }
    mark_name = hostmem_pcow_mark_name(&mark);
    renaming.new_name = mark_name;
    if (!hostmem_pcow_change_unlocked(pcow, hostmem_pcow_rename_snapshot,
                                      &renaming, &err) &&
        renaming.ret != -ENOSPC) {
        pcow->snapshot_id = 0;
        error_propagate(errp, err);
        return false;
    }
    error_free(err);
    return true;
}

bool hostmem_pcow_all_begin_delete(const char *name, bool has_devices,
                                   strList *devices, Error **errp)
{
    DeleteArgs args = { name, has_devices, devices };

    hostmem_pcow_await_changes();
    if (hostmem_pcow_present() && !hostmem_pcow_check_settled(errp)) {
        return false;
    }
    hostmem_pcow_all_recover();
    if (!hostmem_pcow_check_not_loading(NULL, errp)) {
        return false;
    }
    hostmem_pcow_foreach(forget_snapshot, NULL, NULL);
    if (!hostmem_pcow_foreach(mark_snapshot, &args, errp)) {
        hostmem_pcow_all_recover();
        return false;
    }
    return true;
}

bool hostmem_pcow_all_end_delete(Error **errp)
{
    return hostmem_pcow_foreach(delete_snapshot, NULL, errp);
}
