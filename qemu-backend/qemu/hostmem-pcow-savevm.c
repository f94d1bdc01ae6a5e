/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * pcow images in snapshots of a whole VM (savevm, snapshot-save, virsh
 * snapshot-create).
 *
 * The contents of an image never travel through the VM state.  Each image
 * takes a snapshot of the same name inside itself, and the VM state records
 * which one; loading the state checks that it is there again.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "system/hostmem-pcow.h"

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

/* The id of the snapshot @name; 0, which is nobody's, if there is none. */
static bool find_snapshot(HostMemPcow *pcow, const char *name, uint32_t *id,
                          Error **errp)
{
    struct pcow_snapshot *list;
    struct pcow_error error;
    size_t count;

    *id = 0;
    if (pcow_snapshot_list(pcow->image, &list, &count, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        if (!strcmp(list[i].name, name)) {
            *id = list[i].id;
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
}

void hostmem_pcow_vmstate_unregister(HostMemPcow *pcow)
{
    vmstate_unregister(NULL, &pcow->vmstate, pcow);
    g_free((char *)pcow->vmstate.name);
    g_free(pcow->mismatch);
}

static bool refuse_migration(HostMemPcow *pcow, void *opaque, Error **errp)
{
    error_setg(errp, "the pcow image '%s' (memory backend '%s') cannot be "
               "migrated or saved to a file: its contents stay in the image. "
               "Use snapshot-save (virsh snapshot-create), or shut the VM "
               "down and copy the image with its bases",
               pcow_path(pcow->image), pcow->id);
    return false;
}

bool hostmem_pcow_check_migration(Error **errp)
{
    return hostmem_pcow_foreach(refuse_migration, NULL, errp);
}

static bool delete_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_error error;
    uint32_t id;

    if (pcow->readonly) {
        return true;
    }
    if (!find_snapshot(pcow, opaque, &id, errp)) {
        return false;
    }
    if (id && pcow_snapshot_delete(pcow->image, opaque, NULL, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    return true;
}

bool hostmem_pcow_all_delete_snapshot(const char *name, Error **errp)
{
    bool ok;

    hostmem_pcow_hold_guest();
    ok = hostmem_pcow_foreach(delete_snapshot, (void *)name, errp);
    hostmem_pcow_release_guest();
    return ok;
}

static bool create_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_error error;

    if (pcow->readonly) {
        return true;
    }
    if (pcow_snapshot_create(pcow->image, opaque, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    pcow->created = true;
    return find_snapshot(pcow, opaque, &pcow->snapshot_id, errp);
}

static bool forget_created(HostMemPcow *pcow, void *opaque, Error **errp)
{
    pcow->created = false;
    return true;
}

static bool delete_created(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Error *err = NULL;

    if (pcow->created && !delete_snapshot(pcow, opaque, &err)) {
        warn_report_err(err);
    }
    pcow->created = false;
    return true;
}

bool hostmem_pcow_all_create_snapshot(const char *name, Error **errp)
{
    bool ok;

    hostmem_pcow_hold_guest();
    hostmem_pcow_foreach(forget_created, NULL, NULL);
    ok = hostmem_pcow_foreach(create_snapshot, (void *)name, errp);
    if (!ok) {
        hostmem_pcow_foreach(delete_created, (void *)name, NULL);
    }
    hostmem_pcow_release_guest();
    return ok;
}

void hostmem_pcow_all_undo_snapshot(const char *name)
{
    hostmem_pcow_hold_guest();
    hostmem_pcow_foreach(delete_created, (void *)name, NULL);
    hostmem_pcow_release_guest();
}

static bool have_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    if (pcow->readonly) {
        return true;
    }
    if (!find_snapshot(pcow, opaque, &pcow->snapshot_id, errp)) {
        return false;
    }
    if (!pcow->snapshot_id) {
        error_setg(errp, "pcow image '%s' has no snapshot '%s': it was not "
                   "part of the VM when that was taken, or lost it since; "
                   "query-pcow lists what it has",
                   pcow_path(pcow->image), (const char *)opaque);
        return false;
    }
    return true;
}

bool hostmem_pcow_all_have_snapshot(const char *name, Error **errp)
{
    return hostmem_pcow_foreach(have_snapshot, (void *)name, errp);
}

static bool revert_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    pcow->verified = false;
    g_free(pcow->mismatch);
    pcow->mismatch = NULL;
    return pcow->readonly || hostmem_pcow_revert(pcow, opaque, errp);
}

bool hostmem_pcow_all_revert_snapshot(const char *name, Error **errp)
{
    bool ok;

    if (!hostmem_pcow_all_have_snapshot(name, errp)) {
        return false;
    }
    hostmem_pcow_hold_guest();
    ok = hostmem_pcow_foreach(revert_snapshot, (void *)name, errp);
    hostmem_pcow_release_guest();
    return ok;
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
