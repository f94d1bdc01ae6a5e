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
    if (!hostmem_pcow_check_settled(errp)) {
        return false;
    }
    hostmem_pcow_all_recover();
    if (!hostmem_pcow_all_check_name(name, errp) ||
        !hostmem_pcow_check_new_on_disks(name, has_devices, devices, errp)) {
        return false;
    }
    /* The VM stands soon; savevm of the monitor has flushed nothing yet */
    hostmem_pcow_all_flush_ahead();
    return true;
}

static bool create_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const HostMemPcowMark *mark = opaque;
    g_autofree char *name = hostmem_pcow_mark_name(mark);
    struct pcow_snapshot created;
    struct pcow_error error;

    pcow->snapshot_id = 0;
    if (pcow->readonly) {
        return true;
    }
    if (pcow_snapshot_create_at(pcow->image, name, mark->date_sec,
                                mark->date_nsec, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, name, 0, &created, errp)) {
        return false;
    }
    pcow->snapshot_id = created.id;
    return true;
}

static bool forget_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    pcow->snapshot_id = 0;
    return true;
}

/* Give the snapshot that is being worked on another name. */
static bool rename_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_snapshot found;
    struct pcow_error error;

    if (!pcow->snapshot_id) {
        return true;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, NULL, pcow->snapshot_id,
                                    &found, errp)) {
        return false;
    }
    if (pcow_snapshot_rename(pcow->image, found.name, opaque, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    return true;
}

/* Delete the snapshot that is being worked on. */
static bool delete_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_snapshot found;
    struct pcow_error error;

    if (!pcow->snapshot_id) {
        return true;
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, NULL, pcow->snapshot_id,
                                    &found, errp)) {
        return false;
    }
    if (found.id &&
        pcow_snapshot_delete(pcow->image, found.name, NULL, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    pcow->snapshot_id = 0;
    return true;
}

static bool take_back(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Error *err = NULL;

    if (!delete_snapshot(pcow, opaque, &err)) {
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
    hostmem_pcow_foreach(forget_snapshot, NULL, NULL);
    if (!hostmem_pcow_check_no_stores(errp) ||
        !hostmem_pcow_count_disks(has_devices, devices, NULL, &mark.disks,
                                  errp)) {
        return false;
    }
    if (!hostmem_pcow_hold_guest(errp)) {
        return false;
    }
    ok = hostmem_pcow_foreach(create_snapshot, &mark, errp);
    hostmem_pcow_release_guest();
    return ok;
}

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
    g_autofree char *mark_name = NULL;
    struct pcow_snapshot found;
    struct pcow_error error;
    HostMemPcowMark mark = {};
    int ret;

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
    ret = pcow_snapshot_rename(pcow->image, args->name, mark_name, &error);
    if (ret < 0 && ret != -ENOSPC) {
        pcow->snapshot_id = 0;
        error_setg(errp, "%s", error.message);
        return false;
    }
    return true;
}

bool hostmem_pcow_all_begin_delete(const char *name, bool has_devices,
                                   strList *devices, Error **errp)
{
    DeleteArgs args = { name, has_devices, devices };

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
