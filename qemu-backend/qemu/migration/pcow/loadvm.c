/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * loadvm with pcow images (snapshot-load, virsh snapshot-revert): the disks
 * are reverted first, then the images; see migration/pcow/savevm.c.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "system/hostmem-pcow.h"
#include "system/runstate.h"
#include "system/system.h"

static bool end_load(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_error error;
    int ret;

    if (!pcow->loading_mark) {
        return true;
    }
    ret = pcow_snapshot_rename(pcow->image, pcow->loading_mark,
                               pcow->loading_name, &error);
    /* Somebody may have deleted it, or renamed it himself. */
    if (ret < 0 && ret != -ENOENT) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    g_clear_pointer(&pcow->loading_mark, g_free);
    g_clear_pointer(&pcow->loading_name, g_free);
    return true;
}

/*
 * After a load that failed halfway. Whoever lets the VM run has been told, and
 * takes disks and memory as they are; reverting them at the next start would
 * cost him what he has written by then.
 */
static void vm_state_changed(void *opaque, bool running, RunState state)
{
    Error *err = NULL;

    if (running) {
        checkpoint_note_running();
    }
    if (running && !hostmem_pcow_foreach(end_load, NULL, &err)) {
        /* cont has been refused before; this is for gdb, for one */
        error_reportf_err(err, "the VM is paused again, as the load of a "
                          "snapshot that failed halfway cannot be ended: ");
        qemu_system_vmstop_request_prepare();
        qemu_system_vmstop_request(RUN_STATE_PAUSED);
    }
}

/*
 * The disks are there, and nothing has been loaded or run.  QEMU calls this for
 * an image that comes later as well, whatever the VM has done by then.
 */
static void machine_ready(Notifier *notifier, void *data)
{
    HostMemPcow *pcow = container_of(notifier, HostMemPcow, machine_ready);

    if (!pcow->plugged) {
        hostmem_pcow_recover_at_start();
    }
}

void hostmem_pcow_loadvm_register(HostMemPcow *pcow)
{
    hostmem_pcow_note_foreign_marks(pcow);
    checkpoint_init();
    pcow->machine_ready.notify = machine_ready;
    qemu_add_machine_init_done_notifier(&pcow->machine_ready);
    pcow->state_changed = qemu_add_vm_change_state_handler(vm_state_changed,
                                                           pcow);
}

void hostmem_pcow_loadvm_unregister(HostMemPcow *pcow)
{
    qemu_del_vm_change_state_handler(pcow->state_changed);
    qemu_remove_machine_init_done_notifier(&pcow->machine_ready);
    g_free(pcow->loading_mark);
    g_free(pcow->loading_name);
    g_clear_pointer(&pcow->foreign_marks, g_ptr_array_unref);
}

/* The load was that of a snapshot that has another name now, or is gone. */
static bool forget_lost_mark(HostMemPcow *pcow, Error **errp)
{
    struct pcow_snapshot found;

    if (!hostmem_pcow_find_snapshot(pcow->image, pcow->loading_mark, 0, &found,
                                    errp)) {
        return false;
    }
    if (!found.id) {
        g_clear_pointer(&pcow->loading_mark, g_free);
        g_clear_pointer(&pcow->loading_name, g_free);
    }
    return true;
}

static bool check_not_loading(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const char *name = opaque;

    if (pcow->loading_mark && !forget_lost_mark(pcow, errp)) {
        return false;
    }
    if (!pcow->loading_mark || (name && !strcmp(name, pcow->loading_name))) {
        return true;
    }
    error_setg(errp, "a load of the snapshot '%s' failed halfway, so disks and "
               "the pcow image '%s' may be of different times: load it again, "
               "or let the VM go on with both as they are (cont, virsh resume)",
               pcow->loading_name, pcow_path(pcow->image));
    return false;
}

bool hostmem_pcow_check_not_loading(const char *name, Error **errp)
{
    return hostmem_pcow_foreach(check_not_loading, (void *)name, errp);
}

static char *format_date(int64_t sec, uint32_t nsec)
{
    g_autoptr(GDateTime) date = g_date_time_new_from_unix_utc(sec);
    g_autofree char *text = date ? g_date_time_format(date, "%F %T") : NULL;

    return g_strdup_printf("%s.%06" PRIu32, text ?: "?", nsec / 1000);
}

static bool check_load(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const QEMUSnapshotInfo *sn = opaque;
    const char *path = pcow_path(pcow->image);
    struct pcow_snapshot found;

    if (pcow->readonly) {
        return true;
    }
    /* a load that failed has left its mark, and this one is to finish it */
    if (!hostmem_pcow_find_snapshot(pcow->image, pcow->loading_mark ?: sn->name,
                                    0, &found, errp)) {
        return false;
    }
    if (!found.id) {
        error_setg(errp, "pcow image '%s' has no snapshot '%s': it was not "
                   "part of the VM when that was taken, or lost it since; "
                   "query-pcow lists what it has", path, sn->name);
        return false;
    }
    if (found.date_seconds != sn->date_sec ||
        found.date_nanoseconds != sn->date_nsec) {
        g_autofree char *ours = format_date(found.date_seconds,
                                            found.date_nanoseconds);
        g_autofree char *theirs = format_date(sn->date_sec, sn->date_nsec);

        error_setg(errp, "snapshot '%s' of pcow image '%s' is of %s, the VM "
                   "state of that name of %s (UTC): they do not belong "
                   "together, so nothing was changed; put the right image "
                   "back, or revert the image alone while the VM is off "
                   "(pcowctl snapshot revert --image-only)",
                   sn->name, path, ours, theirs);
        return false;
    }
    if (found.virtual_size != pcow_size(pcow->image)) {
        error_setg(errp, "snapshot '%s' of pcow image '%s' is of %" PRIu64
                   " bytes, the VM has %" PRIu64 " now: define the VM with "
                   "the old size to load it", sn->name, path,
                   found.virtual_size, pcow_size(pcow->image));
        return false;
    }
    pcow->snapshot_id = found.id;
    return true;
}

typedef struct LoadArgs {
    const QEMUSnapshotInfo *sn;
    bool has_devices;
    strList *devices;
} LoadArgs;

/* Without space for the mark it goes without, as reverting may give space. */
static bool mark_load(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const LoadArgs *args = opaque;
    const QEMUSnapshotInfo *sn = args->sn;
    HostMemPcowMark mark = {
        .loading = true,
        .date_sec = sn->date_sec,
        .date_nsec = sn->date_nsec,
    };
    g_autofree char *mark_name = NULL;
    struct pcow_error error;
    int ret;

    if (pcow->readonly || pcow->loading_mark) {
        return true;
    }
    if (!hostmem_pcow_count_disks(args->has_devices, args->devices, &mark,
                                  &mark.disks, errp)) {
        return false;
    }
    if (!mark.disks) {
        return true;
    }
    mark_name = hostmem_pcow_mark_name(&mark);
    ret = pcow_snapshot_rename(pcow->image, sn->name, mark_name, &error);
    if (ret < 0 && ret != -ENOSPC) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    if (ret == 0) {
        pcow->loading_mark = g_steal_pointer(&mark_name);
        pcow->loading_name = g_strdup(sn->name);
    }
    return true;
}

static bool is_not_marked(HostMemPcow *pcow, void *opaque, Error **errp)
{
    return !pcow->loading_mark;
}

bool hostmem_pcow_all_end_load(Error **errp)
{
    return hostmem_pcow_foreach(is_not_marked, NULL, NULL) ||
           hostmem_pcow_foreach(end_load, NULL, errp);
}

bool hostmem_pcow_all_check_load(const QEMUSnapshotInfo *sn, bool has_devices,
                                 strList *devices, Error **errp)
{
    LoadArgs args = { sn, has_devices, devices };
    bool again;

    if (!hostmem_pcow_present()) {
        return true;
    }
    hostmem_pcow_await_changes();
    if (!hostmem_pcow_check_settled(errp)) {
        return false;
    }
    hostmem_pcow_all_recover();
    if (!hostmem_pcow_check_not_loading(sn->name, errp) ||
        !hostmem_pcow_foreach(check_load, (void *)sn, errp) ||
        !hostmem_pcow_check_load_on_disks(sn, has_devices, devices, errp)) {
        return false;
    }
    again = !hostmem_pcow_foreach(is_not_marked, NULL, NULL);
    if (!hostmem_pcow_foreach(mark_load, &args, errp)) {
        /* The disks may be there since the first time: then it stays marked */
        if (!again) {
            hostmem_pcow_all_end_load(NULL);
        }
        return false;
    }
    return true;
}

static bool revert_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const char *name = pcow->loading_mark ?: opaque;

    pcow->verified = false;
    g_free(pcow->mismatch);
    pcow->mismatch = NULL;
    return pcow->readonly || hostmem_pcow_revert(pcow, name, errp);
}

bool hostmem_pcow_all_revert_snapshot(const char *name, Error **errp)
{
    return hostmem_pcow_foreach(revert_snapshot, (void *)name, errp) &&
           hostmem_pcow_all_end_load(errp);
}
