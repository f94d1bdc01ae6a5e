/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * pcow images in snapshots of a whole VM (savevm, snapshot-save, virsh
 * snapshot-create).
 *
 * The contents of an image never travel through the VM state.  Each image
 * takes a snapshot of the same name and date inside itself, and the VM state
 * records which one.  Loading a state compares name and date before anything
 * is changed, and the rest when the state has been read.
 *
 * While the disks (hostmem-pcow-carrier.c) take or delete their part, the
 * snapshot inside the image has a name that says so: a QEMU that is killed
 * meanwhile leaves a mark, by which the next one goes forth or back.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "system/hostmem-pcow.h"
#include "system/runstate.h"
#include "system/system.h"

static void get_identity(HostMemPcow *pcow, uint32_t snapshot_id,
                         HostMemPcowIdentity *identity)
{
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    QEMU_BUILD_BUG_ON(sizeof(identity->uuid) != PCOW_UUID_SIZE);
    memcpy(identity->uuid, info.uuid, sizeof(identity->uuid));
    identity->size = info.virtual_size;
    identity->generation = pcow->readonly ? info.generation : 0;
    identity->snapshot_id = pcow->readonly ? 0 : snapshot_id;
}

/* The snapshot @name, or @id without a name; its id is 0 if there is none. */
static bool find_snapshot(HostMemPcow *pcow, const char *name, uint32_t id,
                          struct pcow_snapshot *found, Error **errp)
{
    struct pcow_snapshot *list;
    struct pcow_error error;
    size_t count;

    found->id = 0;
    if (pcow_snapshot_list(pcow->image, &list, &count, &error) < 0) {
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

/* What keeps the VM state from fitting the image, or NULL. */
static char *find_mismatch(HostMemPcow *pcow)
{
    const HostMemPcowIdentity *then = &pcow->identity;
    const char *path = pcow_path(pcow->image);
    HostMemPcowIdentity now;

    /* what hostmem_pcow_all_revert_snapshot() reverted to is in force */
    get_identity(pcow, pcow->snapshot_id, &now);
    if (memcmp(now.uuid, then->uuid, sizeof(now.uuid))) {
        return g_strdup_printf("the VM state belongs to another pcow image "
                               "than '%s' (UUIDs differ)", path);
    }
    if (now.size != then->size) {
        return g_strdup_printf("the VM state belongs to a pcow image of "
                               "%" PRIu64 " bytes, '%s' has %" PRIu64,
                               then->size, path, now.size);
    }
    if (now.snapshot_id != then->snapshot_id) {
        return g_strdup_printf("the VM state belongs to snapshot %" PRIu32
                               " of pcow image '%s', but %" PRIu32 " has that "
                               "name now", then->snapshot_id, path,
                               now.snapshot_id);
    }
    if (now.generation != then->generation) {
        return g_strdup_printf("the read-only pcow image '%s' was changed "
                               "after the VM state was saved", path);
    }
    return NULL;
}

static int identity_post_load(void *opaque, int version_id)
{
    HostMemPcow *pcow = opaque;

    g_free(pcow->mismatch);
    pcow->mismatch = find_mismatch(pcow);
    pcow->verified = !pcow->mismatch;
    return pcow->verified ? 0 : -EINVAL;
}

static int identity_pre_save(void *opaque)
{
    HostMemPcow *pcow = opaque;

    get_identity(pcow, pcow->snapshot_id, &pcow->identity);
    return 0;
}

static const VMStateField identity_fields[] = {
    VMSTATE_UINT8_ARRAY(identity.uuid, HostMemPcow, 16),
    VMSTATE_UINT64(identity.size, HostMemPcow),
    VMSTATE_UINT64(identity.generation, HostMemPcow),
    VMSTATE_UINT32(identity.snapshot_id, HostMemPcow),
    VMSTATE_END_OF_LIST()
};

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

    if (running && !hostmem_pcow_foreach(end_load, NULL, &err)) {
        error_report_err(err);
        exit(1);
    }
}

/* The disks are there, and nothing has been loaded or run. */
static void machine_ready(Notifier *notifier, void *data)
{
    hostmem_pcow_all_recover();
}

void hostmem_pcow_vmstate_register(HostMemPcow *pcow)
{
    pcow->vmstate = (VMStateDescription) {
        .name = g_strdup_printf("pcow/%s", pcow->id),
        .version_id = 1,
        .minimum_version_id = 1,
        .pre_save = identity_pre_save,
        .post_load = identity_post_load,
        .fields = identity_fields,
    };
    vmstate_register(NULL, 0, &pcow->vmstate, pcow);
    pcow->machine_ready.notify = machine_ready;
    qemu_add_machine_init_done_notifier(&pcow->machine_ready);
    pcow->state_changed = qemu_add_vm_change_state_handler(vm_state_changed,
                                                           pcow);
}

void hostmem_pcow_vmstate_unregister(HostMemPcow *pcow)
{
    qemu_del_vm_change_state_handler(pcow->state_changed);
    qemu_remove_machine_init_done_notifier(&pcow->machine_ready);
    vmstate_unregister(NULL, &pcow->vmstate, pcow);
    g_free((char *)pcow->vmstate.name);
    g_free(pcow->mismatch);
    g_free(pcow->loading_mark);
    g_free(pcow->loading_name);
}

/* What would leave the contents of an image out, and what to do instead. */
typedef struct Refusal {
    const char *what, *instead;
} Refusal;

static bool refuse(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const Refusal *refusal = opaque;

    error_setg(errp, "%s would leave out the pcow image '%s' (memory backend "
               "'%s'), whose contents stay in the image. Use snapshot-save "
               "(virsh snapshot-create%s", refusal->what,
               pcow_path(pcow->image), pcow->id, refusal->instead);
    return false;
}

bool hostmem_pcow_check_migration(Error **errp)
{
    Refusal refusal = {
        "the VM cannot be migrated or saved to a file: that",
        "), or shut the VM down and copy the image with its bases",
    };

    return hostmem_pcow_foreach(refuse, &refusal, errp);
}

bool hostmem_pcow_check_disk_only(Error **errp)
{
    Refusal refusal = {
        "a snapshot of disks alone",
        " without --disk-only), or pcowctl snapshot create for the image alone",
    };

    return hostmem_pcow_foreach(refuse, &refusal, errp);
}

/* ---- taking a snapshot --------------------------------------------------- */

static bool check_new(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_snapshot found;

    if (!find_snapshot(pcow, opaque, 0, &found, errp)) {
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

bool hostmem_pcow_all_check_new(const char *name, bool has_devices,
                                strList *devices, Error **errp)
{
    hostmem_pcow_all_recover();
    if (!hostmem_pcow_present()) {
        return true;
    }
    if (strlen(name) >= PCOW_SNAPSHOT_NAME_SIZE ||
        hostmem_pcow_is_mark(name)) {
        error_setg(errp, "'%s' cannot be the name of a snapshot of a VM with "
                   "pcow images: at most %d bytes, and not like those that "
                   "mark an unfinished one", name, PCOW_SNAPSHOT_NAME_SIZE - 1);
        return false;
    }
    return hostmem_pcow_foreach(check_new, (void *)name, errp) &&
           hostmem_pcow_check_new_on_disks(name, has_devices, devices, errp);
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
    if (!find_snapshot(pcow, name, 0, &created, errp)) {
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
    if (!find_snapshot(pcow, NULL, pcow->snapshot_id, &found, errp)) {
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
    if (!find_snapshot(pcow, NULL, pcow->snapshot_id, &found, errp)) {
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

static bool held_foreach(HostMemPcowFn *fn, void *opaque, Error **errp)
{
    bool ok;

    if (!hostmem_pcow_present()) {
        return true;
    }
    hostmem_pcow_hold_guest();
    ok = hostmem_pcow_foreach(fn, opaque, errp);
    hostmem_pcow_release_guest();
    return ok;
}

bool hostmem_pcow_all_create_snapshot(const QEMUSnapshotInfo *sn,
                                      bool has_devices, strList *devices,
                                      Error **errp)
{
    HostMemPcowMark mark = {
        .date_sec = sn->date_sec,
        .date_nsec = sn->date_nsec,
    };

    if (!hostmem_pcow_present()) {
        return true;
    }
    hostmem_pcow_foreach(forget_snapshot, NULL, NULL);
    if (!hostmem_pcow_count_disks(has_devices, devices, NULL, &mark.disks,
                                  errp)) {
        return false;
    }
    return held_foreach(create_snapshot, &mark, errp);
}

bool hostmem_pcow_all_finish_snapshot(const char *name, Error **errp)
{
    return held_foreach(rename_snapshot, (void *)name, errp);
}

void hostmem_pcow_all_undo_snapshot(void)
{
    held_foreach(take_back, NULL, NULL);
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
    HostMemPcowMark mark;
    int ret;

    if (pcow->readonly) {
        return true;
    }
    if (!find_snapshot(pcow, args->name, 0, &found, errp)) {
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

    hostmem_pcow_all_recover();
    hostmem_pcow_foreach(forget_snapshot, NULL, NULL);
    if (!held_foreach(mark_snapshot, &args, errp)) {
        hostmem_pcow_all_recover();
        return false;
    }
    return true;
}

bool hostmem_pcow_all_end_delete(Error **errp)
{
    return held_foreach(delete_snapshot, NULL, errp);
}

/* ---- loading one --------------------------------------------------------- */

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
    if (!find_snapshot(pcow, sn->name, 0, &found, errp)) {
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
                   "(pcowctl snapshot revert)", sn->name, path, ours, theirs);
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

/* Without space for the mark it goes without, as reverting may give space. */
static bool mark_load(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const QEMUSnapshotInfo *sn = opaque;
    HostMemPcowMark mark = {
        .loading = true,
        .date_sec = sn->date_sec,
        .date_nsec = sn->date_nsec,
    };
    g_autofree char *mark_name = NULL;
    struct pcow_error error;
    int ret;

    if (pcow->readonly) {
        return true;
    }
    if (!hostmem_pcow_count_disks(false, NULL, &mark, &mark.disks, errp)) {
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

bool hostmem_pcow_all_end_load(Error **errp)
{
    return held_foreach(end_load, NULL, errp);
}

bool hostmem_pcow_all_check_load(const QEMUSnapshotInfo *sn, Error **errp)
{
    hostmem_pcow_all_recover();
    if (!hostmem_pcow_foreach(check_load, (void *)sn, errp)) {
        return false;
    }
    if (!held_foreach(mark_load, (void *)sn, errp)) {
        hostmem_pcow_all_end_load(NULL);
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
    return held_foreach(revert_snapshot, (void *)name, errp) &&
           hostmem_pcow_all_end_load(errp);
}

static bool check_verified(HostMemPcow *pcow, void *opaque, Error **errp)
{
    bool *loaded = opaque;

    if (pcow->mismatch) {
        error_setg(errp, "%s", pcow->mismatch);
        return false;
    }
    if (*loaded && !pcow->verified) {
        error_setg(errp, "the VM state says nothing of the pcow image '%s': "
                   "it was saved without it", pcow_path(pcow->image));
        return false;
    }
    return true;
}

bool hostmem_pcow_all_verified(bool loaded, Error **errp)
{
    return hostmem_pcow_foreach(check_verified, &loaded, errp);
}
