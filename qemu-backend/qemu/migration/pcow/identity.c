/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What a VM state records of each pcow image: which file, which snapshot of
 * it, and on which bases.  Loading the state compares that with what is there.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/boards.h"
#include "qapi/error.h"
#include "qemu/bswap.h"
#include "qemu/error-report.h"
#include "system/hostmem-pcow.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"

/*
 * The files below the image, each by its UUID and what of it shows: a snapshot
 * that stays as it is, or the whole, which counts its changes.  Zeros without
 * a base.
 */
static bool get_bases(struct pcow_image *image, uint8_t bases[PCOW_BASES_SIZE],
                      Error **errp)
{
    g_autoptr(GChecksum) sum = g_checksum_new(G_CHECKSUM_SHA256);
    gsize length = PCOW_BASES_SIZE;
    struct pcow_info info;

    memset(bases, 0, PCOW_BASES_SIZE);
    if (!pcow_base(image)) {
        return true;
    }
    pcow_get_info(image, &info);
    for (pcow_image *base = pcow_base(image); base;
         base = pcow_base(base)) {
        struct pcow_snapshot shown = {};
        uint64_t version;

        if (*info.base_snapshot &&
            !hostmem_pcow_find_snapshot(base, info.base_snapshot, 0, &shown,
                                        errp)) {
            return false;
        }
        pcow_get_info(base, &info);
        version = cpu_to_le64(shown.id ? shown.id : info.generation);
        g_checksum_update(sum, info.uuid, sizeof(info.uuid));
        g_checksum_update(sum, (const guchar *)(shown.id ? "s" : "g"), 1);
        g_checksum_update(sum, (const guchar *)&version, sizeof(version));
    }
    g_checksum_get_digest(sum, bases, &length);
    return true;
}

static bool get_identity(struct pcow_image *image, bool readonly,
                         uint32_t snapshot_id, HostMemPcowIdentity *identity,
                         Error **errp)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    QEMU_BUILD_BUG_ON(sizeof(identity->uuid) != PCOW_UUID_SIZE);
    memcpy(identity->uuid, info.uuid, sizeof(identity->uuid));
    identity->size = info.virtual_size;
    identity->generation = readonly ? info.generation : 0;
    identity->snapshot_id = readonly ? 0 : snapshot_id;
    return get_bases(image, identity->bases, errp);
}

bool hostmem_pcow_get_identity(HostMemPcow *pcow, uint32_t snapshot_id,
                               HostMemPcowIdentity *identity, Error **errp)
{
    return get_identity(pcow->image, pcow->readonly, snapshot_id, identity,
                        errp);
}

bool hostmem_pcow_get_base_identity(HostMemPcow *pcow,
                                    HostMemPcowIdentity *identity, Error **errp)
{
    struct pcow_image *base = pcow_base(pcow->image);
    struct pcow_snapshot shown = {};
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    if (base && *info.base_snapshot &&
        !hostmem_pcow_find_snapshot(base, info.base_snapshot, 0, &shown, errp)) {
        return false;
    }
    if (!shown.id) {
        error_setg(errp, "pcow image '%s' does not stand on a snapshot of "
                   "another image", pcow_path(pcow->image));
        return false;
    }
    return get_identity(base, false, shown.id, identity, errp);
}

/*
 * Where the guest has the memory device that the image is; 0: it is none.
 * Not by qmp_memory_device_list(), which looks at each object of the machine:
 * the guest stands.
 */
static uint64_t guest_address(const HostMemPcow *pcow)
{
    DeviceMemoryState *devices = MACHINE(qdev_get_machine())->device_memory;
    MemoryRegion *region;

    if (!devices) {
        return 0;
    }
    QTAILQ_FOREACH(region, &devices->mr.subregions, subregions_link) {
        const MemoryRegion *ram = region;

        while (ram->alias) {
            ram = ram->alias;
        }
        if (ram->ram_block == pcow->backend->mr.ram_block) {
            return devices->base + region->addr;
        }
    }
    return 0;
}

/*
 * What keeps the VM state from fitting the image, or NULL.  States of version
 * 1 do not tell of the bases, those up to 2 not where the guest has the image:
 * it goes on with what is mapped there.
 */
static char *find_mismatch(HostMemPcow *pcow, int version)
{
    const HostMemPcowIdentity *then = &pcow->identity;
    const char *path = pcow_path(pcow->image);
    uint64_t address = guest_address(pcow);
    HostMemPcowIdentity now;
    Error *err = NULL;

    if (version >= 3 && pcow->address != address) {
        return g_strdup_printf("the VM state has the pcow image '%s' at "
                               "address 0x%" PRIx64 " of the guest, and it is "
                               "at 0x%" PRIx64 ": give the memory devices "
                               "their old order", path, pcow->address, address);
    }

    if (runstate_check(RUN_STATE_INMIGRATE) && !pcow->readonly) {
        /* A file of its own, whose contents were in the stream before this */
        return pcow->arrival == PCOW_ARRIVED ? NULL :
               g_strdup_printf("the stream has nothing of the pcow image '%s', "
                               "which is writable here", path);
    }
    /* That of its base, which was compared before anything was changed */
    if (pcow->forking) {
        return NULL;
    }
    /* what hostmem_pcow_all_revert_snapshot() reverted to is in force */
    if (!hostmem_pcow_get_identity(pcow, pcow->snapshot_id, &now, &err)) {
        char *reason = g_strdup(error_get_pretty(err));

        error_free(err);
        return reason;
    }
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
    if (version >= 2 && memcmp(now.bases, then->bases, sizeof(now.bases))) {
        return g_strdup_printf("pcow image '%s' stands on other bases than "
                               "when the VM state was saved, so that the "
                               "guest's memory may read differently: put it "
                               "back on those (pcow-img rebase -u), or revert "
                               "the image alone while the VM is off (pcowctl "
                               "snapshot revert --image-only)", path);
    }
    return NULL;
}

static int identity_post_load(void *opaque, int version_id)
{
    HostMemPcow *pcow = opaque;

    g_free(pcow->mismatch);
    pcow->mismatch = find_mismatch(pcow, version_id);
    pcow->verified = !pcow->mismatch;
    if (pcow->mismatch && runstate_check(RUN_STATE_INMIGRATE)) {
        error_report("%s", pcow->mismatch);
    }
    return pcow->verified ? 0 : -EINVAL;
}

static int identity_pre_save(void *opaque)
{
    HostMemPcow *pcow = opaque;
    Error *err = NULL;

    if (!hostmem_pcow_get_identity(pcow, pcow->snapshot_id, &pcow->identity, &err)) {
        error_report_err(err);
        return -EINVAL;
    }
    pcow->address = guest_address(pcow);
    return 0;
}

static const VMStateField identity_fields[] = {
    VMSTATE_UINT8_ARRAY(identity.uuid, HostMemPcow, 16),
    VMSTATE_UINT64(identity.size, HostMemPcow),
    VMSTATE_UINT64(identity.generation, HostMemPcow),
    VMSTATE_UINT32(identity.snapshot_id, HostMemPcow),
    VMSTATE_UINT8_ARRAY_V(identity.bases, HostMemPcow, PCOW_BASES_SIZE, 2),
    VMSTATE_UINT64_V(address, HostMemPcow, 3),
    VMSTATE_END_OF_LIST()
};

void hostmem_pcow_vmstate_register(HostMemPcow *pcow)
{
    pcow->vmstate = (VMStateDescription) {
        .name = g_strdup_printf("pcow/%s", pcow->id),
        .version_id = 3,
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
