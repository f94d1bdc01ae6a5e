/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Going back to a checkpoint, in place: the devices are reset, the images
 * reverted, the state of the devices is loaded.  No page of RAM is read that
 * the guest does not touch.
 *
 * What can be judged is judged before the VM is stopped.  A failure behind that
 * leaves it paused, with a mark in the home: to be tried again, or given up by
 * letting the VM run.  A QEMU that is killed meanwhile leaves the mark, and the
 * next one reverts all images before anything runs.
 */
#include "qemu/osdep.h"
#include "block/block-global-state.h"
#include "hw/acpi/vmgenid.h"
#include "io/channel-buffer.h"
#include "migration/migration.h"
#include "migration/misc.h"
#include "migration/qemu-file.h"
#include "migration/snapshot.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/timer.h"
#include "qemu/yank.h"
#include "migration/pcow/checkpoint.h"
#include "migration/yank_functions.h"
#include "system/cpus.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"
#include "system/system.h"

static bool revert_image(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const bool *forking = opaque;
    struct pcow_snapshot part;

    pcow->verified = false;
    g_clear_pointer(&pcow->mismatch, g_free);
    if (pcow->readonly) {
        return true;
    }
    if (*forking) {
        return hostmem_pcow_revert(pcow, NULL, errp);
    }
    if (!hostmem_pcow_find_snapshot(pcow->image, NULL, pcow->snapshot_id, &part,
                                    errp)) {
        return false;
    }
    if (!part.id) {
        error_setg(errp, "pcow image '%s' has lost its part of the checkpoint",
                   pcow_path(pcow->image));
        return false;
    }
    return hostmem_pcow_revert(pcow, part.name, errp);
}

bool checkpoint_revert_images(bool forking, Error **errp)
{
    return hostmem_pcow_foreach(revert_image, &forking, errp);
}

/* Without space for the mark it goes without, as reverting may give space. */
static bool mark_home(HostMemPcow *home, const struct pcow_snapshot *snapshot,
                      Error **errp)
{
    g_autofree char *mark =
        checkpoint_mark_name(CHECKPOINT_REVERTING, home, snapshot->date_seconds,
                             snapshot->date_nanoseconds);
    struct pcow_error error;
    int ret;

    if (home->loading_mark) {
        return true;
    }
    ret = pcow_snapshot_rename(home->image, snapshot->name, mark, &error);
    if (ret < 0 && ret != -ENOSPC) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    if (ret == 0) {
        home->loading_mark = g_steal_pointer(&mark);
        home->loading_name = g_strdup(snapshot->name);
    }
    return true;
}

/*
 * Who goes on from a moment twice is another machine each time: a guest with a
 * generation id sees a new one when the state has been loaded, and Linux seeds
 * its random numbers anew.  False: it has none.
 */
static bool renew_generation(void)
{
    Object *device = find_vmgenid_dev();

    if (device) {
        qemu_uuid_generate(&VMGENID(device)->guid);
    }
    return device;
}

static bool load_devices(const Checkpoint *checkpoint, Error **errp)
{
    MigrationIncomingState *incoming = migration_incoming_get_current();
    g_autoptr(QIOChannelBuffer) buffer = NULL;
    Error *err = NULL;
    int ret;
    ERRP_GUARD();

    if (!yank_register_instance(MIGRATION_YANK_INSTANCE, errp)) {
        return false;
    }
    buffer = qio_channel_buffer_new(checkpoint->state_size);
    memcpy(buffer->data, checkpoint->state, checkpoint->state_size);
    buffer->usage = checkpoint->state_size;
    incoming->from_src_file = qemu_file_new_input(QIO_CHANNEL(buffer));
    ret = hostmem_pcow_loadvm(incoming->from_src_file, &err);
    migration_incoming_state_destroy();
    /* What it says of an image tells more than that it was refused */
    if (!hostmem_pcow_all_verified(ret >= 0, errp)) {
        error_free(err);
        return false;
    }
    if (ret < 0) {
        error_setg(errp, "the state of the devices cannot be loaded: %s",
                   err ? error_get_pretty(err) : strerror(-ret));
        error_free(err);
        return false;
    }
    return true;
}

/* The images are those of a fork, or not any more. */
static bool set_forking(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const bool *forking = opaque;

    pcow->forking = *forking && !pcow->readonly;
    return true;
}

typedef struct Target {
    HostMemPcow *home;
    bool forking;
    struct pcow_image *image;   /* the home, or what that stands on */
    struct pcow_snapshot snapshot;
    Checkpoint *checkpoint;
} Target;

static bool go_back(Target *target, Error **errp)
{
    bool ok;

    hostmem_pcow_foreach(set_forking, &target->forking, NULL);
    /* No request interferes with what is loaded */
    bdrv_drain_all_begin();
    qemu_system_reset(SHUTDOWN_CAUSE_SNAPSHOT_LOAD);
    /* The reset writes ROMs to RAM, which the images must not keep */
    ok = checkpoint_revert_images(target->forking, errp) &&
         load_devices(target->checkpoint, errp);
    bdrv_drain_all_end();
    hostmem_pcow_foreach(set_forking, &(bool){ false }, NULL);
    return ok && hostmem_pcow_all_end_load(errp);
}

/* What the images of a VM stand on that has not run. */
static bool find_parent(Target *target, Error **errp)
{
    struct pcow_info info;
    ERRP_GUARD();

    target->forking = true;
    target->image = pcow_base(target->home->image);
    pcow_get_info(target->home->image, &info);
    if (runstate_has_left_prelaunch()) {
        error_setg(errp, "the VM has run, so it goes on from no checkpoint of "
                   "another one: start it stopped (-S), with new images");
        return false;
    }
    if (!target->image || !*info.base_snapshot ||
        !hostmem_pcow_find_snapshot(target->image, info.base_snapshot, 0,
                                    &target->snapshot, errp) ||
        !target->snapshot.id || !target->snapshot.state_size) {
        if (!*errp) {
            error_setg(errp, "pcow image '%s', the RAM of the VM, does not "
                       "stand on a checkpoint of another VM",
                       pcow_path(target->home->image));
        }
        return false;
    }
    return true;
}

static bool find_target(Target *target, const char *name, Error **errp)
{
    hostmem_pcow_await_changes();
    target->home = checkpoint_home(errp);
    if (!target->home || !checkpoint_may_begin(errp)) {
        return false;
    }
    checkpoint_recover(false);
    if (!hostmem_pcow_check_not_loading(name, errp) ||
        !checkpoint_check_capabilities(errp) ||
        !hostmem_pcow_check_no_disks(errp)) {
        return false;
    }
    if (name) {
        target->image = target->home->image;
        if (!checkpoint_find(target->home, name, &target->snapshot, errp)) {
            return false;
        }
    } else if (!find_parent(target, errp)) {
        return false;
    }
    target->checkpoint = checkpoint_read(target->image, &target->snapshot,
                                         errp);
    return target->checkpoint &&
           checkpoint_check_images(target->checkpoint, target->forking, errp);
}

/*
 * As it was before.  A guest that had crashed, or that an earlier try has left
 * halfway, is as one that has not begun to run: who asked lets it.
 */
static void go_on(RunState before)
{
    switch (before) {
    case RUN_STATE_RUNNING:
    case RUN_STATE_SUSPENDED:
    case RUN_STATE_PAUSED:
    case RUN_STATE_PRELAUNCH:
        load_snapshot_resume(before);
        break;
    default:
        runstate_set(RUN_STATE_PRELAUNCH);
    }
}

PcowCheckpointReverted *
qmp_pcow_checkpoint_revert(const char *name, bool has_max_wait,
                           uint32_t max_wait, Error **errp)
{
    const int64_t start = get_clock();
    PcowCheckpointReverted *result;
    Target target = {};
    RunState before;
    bool renewed;
    ERRP_GUARD();

    if (!find_target(&target, name, errp) ||
        !checkpoint_await_disks(has_max_wait ? max_wait : HOSTMEM_PCOW_LIMIT_MS,
                                errp)) {
        checkpoint_free(target.checkpoint);
        return NULL;
    }
    /* An image that is to be empty afterwards is so now: nothing is to mark */
    if (!target.forking && !mark_home(target.home, &target.snapshot, errp)) {
        if (runstate_is_running()) {
            resume_all_vcpus();
        }
        checkpoint_free(target.checkpoint);
        return NULL;
    }
    before = runstate_get();
    vm_stop(RUN_STATE_RESTORE_VM);
    renewed = renew_generation();
    checkpoint_set_half_loaded(true);
    if (!go_back(&target, errp)) {
        error_prepend(errp, "the VM is paused, and not at checkpoint '%s': "
                      "revert to it again: ", target.checkpoint->name);
        checkpoint_free(target.checkpoint);
        return NULL;
    }
    checkpoint_free(target.checkpoint);
    checkpoint_set_half_loaded(false);
    go_on(before);
    result = g_new0(PcowCheckpointReverted, 1);
    result->time = get_clock() - start;
    result->new_generation = renewed;
    return result;
}
