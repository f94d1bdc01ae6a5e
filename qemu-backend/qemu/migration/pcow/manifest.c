/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The VM state that a checkpoint keeps with the snapshot of RAM.  Integers are
 * little-endian.
 *
 *   offset  bytes
 *        0      8  "pcow-vm", NUL
 *        8      4  version, 1
 *       12      4  number of images
 *       16      8  bytes of device state
 *       24      8  0
 *       32     32  SHA-256 of all that follows
 *       64    128  name of the checkpoint, NULs behind it
 *      192    192  for each image: UUID (16), size (8), generation (8), id of
 *                  its snapshot (4), 0 (4), hash of its bases (32), id of its
 *                  memory backend (120)
 *        ?         device state
 *
 * It is judged by its checksum before anything is changed for it, and the
 * stream of the devices by QEMU as it is loaded.
 */
#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/bswap.h"
#include "qemu/cutils.h"
#include "qemu/units.h"
#include "migration/pcow/checkpoint.h"

#define MAGIC "pcow-vm"
#define VERSION 1
#define MOST_IMAGES 4096
#define MOST_STATE (512 * MiB)  /* an image may say anything */
#define HASH_SIZE 32

typedef struct QEMU_PACKED Header {
    char magic[8];
    uint32_t version, count;
    uint64_t state_size, unused;
    uint8_t hash[HASH_SIZE];
    char name[PCOW_SNAPSHOT_NAME_SIZE];
} Header;

typedef struct QEMU_PACKED Record {
    uint8_t uuid[16];
    uint64_t size, generation;
    uint32_t snapshot_id, unused;
    uint8_t bases[PCOW_BASES_SIZE];
    char id[CHECKPOINT_ID_SIZE];
} Record;

QEMU_BUILD_BUG_ON(sizeof(Header) != 192 || sizeof(Record) != 192);

void checkpoint_free(Checkpoint *checkpoint)
{
    if (checkpoint) {
        g_free(checkpoint->member);
        g_free(checkpoint->state);
        g_free(checkpoint);
    }
}

static bool describe(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Checkpoint *checkpoint = opaque;
    CheckpointMember *member;

    if (strlen(pcow->id) >= sizeof(member->id)) {
        error_setg(errp, "the id of memory backend '%s' has more than %zu "
                   "bytes", pcow->id, sizeof(member->id) - 1);
        return false;
    }
    checkpoint->member = g_renew(CheckpointMember, checkpoint->member,
                                 checkpoint->count + 1);
    member = &checkpoint->member[checkpoint->count++];
    memset(member, 0, sizeof(*member));
    pstrcpy(member->id, sizeof(member->id), pcow->id);
    return hostmem_pcow_get_identity(pcow, pcow->snapshot_id,
                                     &member->identity, errp);
}

Checkpoint *checkpoint_describe(const char *name, Error **errp)
{
    g_autoptr(Checkpoint) checkpoint = g_new0(Checkpoint, 1);

    pstrcpy(checkpoint->name, sizeof(checkpoint->name), name);
    return hostmem_pcow_foreach(describe, checkpoint, errp) ?
           g_steal_pointer(&checkpoint) : NULL;
}

static void get_hash(const Header *header, uint64_t length,
                     uint8_t hash[HASH_SIZE])
{
    g_autoptr(GChecksum) sum = g_checksum_new(G_CHECKSUM_SHA256);
    const size_t skipped = offsetof(Header, name);
    gsize size = HASH_SIZE;

    g_checksum_update(sum, (const guchar *)header + skipped, length - skipped);
    g_checksum_get_digest(sum, hash, &size);
}

void *checkpoint_encode(const Checkpoint *checkpoint, uint64_t *size)
{
    uint64_t begin = sizeof(Header) + checkpoint->count * sizeof(Record);
    uint64_t length = begin + checkpoint->state_size;
    Header *header = length <= MOST_STATE ? g_try_malloc0(length) : NULL;
    Record *record;

    if (!header) {
        return NULL;
    }
    record = (Record *)(header + 1);
    memcpy(header->magic, MAGIC, sizeof(header->magic));
    header->version = cpu_to_le32(VERSION);
    header->count = cpu_to_le32(checkpoint->count);
    header->state_size = cpu_to_le64(checkpoint->state_size);
    strpadcpy(header->name, sizeof(header->name), checkpoint->name, '\0');
    for (unsigned i = 0; i < checkpoint->count; i++) {
        const CheckpointMember *member = &checkpoint->member[i];

        memcpy(record[i].uuid, member->identity.uuid, sizeof(record[i].uuid));
        record[i].size = cpu_to_le64(member->identity.size);
        record[i].generation = cpu_to_le64(member->identity.generation);
        record[i].snapshot_id = cpu_to_le32(member->identity.snapshot_id);
        memcpy(record[i].bases, member->identity.bases,
               sizeof(record[i].bases));
        strpadcpy(record[i].id, sizeof(record[i].id), member->id, '\0');
    }
    memcpy((char *)header + begin, checkpoint->state, checkpoint->state_size);
    get_hash(header, length, header->hash);
    *size = length;
    return header;
}

/* Nothing in it is believed before this; a name or an id ends in it. */
static bool is_sound(const Header *header, uint64_t length)
{
    const Record *record = (const Record *)(header + 1);
    uint8_t hash[HASH_SIZE];
    uint64_t count;

    if (length < sizeof(*header) ||
        memcmp(header->magic, MAGIC, sizeof(header->magic)) ||
        le32_to_cpu(header->version) != VERSION) {
        return false;
    }
    count = le32_to_cpu(header->count);
    if (count > MOST_IMAGES || length < sizeof(*header) + count * sizeof(*record)
        || length - sizeof(*header) - count * sizeof(*record) !=
           le64_to_cpu(header->state_size)) {
        return false;
    }
    get_hash(header, length, hash);
    if (memcmp(hash, header->hash, sizeof(hash)) ||
        !memchr(header->name, '\0', sizeof(header->name))) {
        return false;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (!memchr(record[i].id, '\0', sizeof(record[i].id))) {
            return false;
        }
    }
    return true;
}

static Checkpoint *decode(const Header *header)
{
    Checkpoint *checkpoint = g_new0(Checkpoint, 1);
    const Record *record = (const Record *)(header + 1);

    pstrcpy(checkpoint->name, sizeof(checkpoint->name), header->name);
    checkpoint->count = le32_to_cpu(header->count);
    checkpoint->member = g_new0(CheckpointMember, checkpoint->count);
    for (unsigned i = 0; i < checkpoint->count; i++) {
        CheckpointMember *member = &checkpoint->member[i];

        memcpy(member->identity.uuid, record[i].uuid, sizeof(record[i].uuid));
        member->identity.size = le64_to_cpu(record[i].size);
        member->identity.generation = le64_to_cpu(record[i].generation);
        member->identity.snapshot_id = le32_to_cpu(record[i].snapshot_id);
        memcpy(member->identity.bases, record[i].bases,
               sizeof(record[i].bases));
        pstrcpy(member->id, sizeof(member->id), record[i].id);
    }
    checkpoint->state_size = le64_to_cpu(header->state_size);
    checkpoint->state = g_memdup2(&record[checkpoint->count],
                                  checkpoint->state_size);
    return checkpoint;
}

Checkpoint *checkpoint_read(struct pcow_image *image,
                            const struct pcow_snapshot *snapshot, Error **errp)
{
    uint64_t length = snapshot->state_size;
    g_autofree Header *header = NULL;
    struct pcow_error error;

    header = length <= MOST_STATE ? g_try_malloc(MAX(length, sizeof(*header)))
                                  : NULL;
    if (!header) {
        error_setg(errp, "the VM state of snapshot '%s' of pcow image '%s' has "
                   "%" PRIu64 " bytes, more than can be loaded",
                   snapshot->name, pcow_path(image), length);
        return NULL;
    }
    if (pcow_snapshot_read_state(image, snapshot->name, 0, header,
                                 length, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return NULL;
    }
    if (!is_sound(header, length)) {
        error_setg(errp, "the VM state of snapshot '%s' of pcow image '%s' is "
                   "damaged, or not that of a checkpoint, so nothing was "
                   "changed: revert the images alone while the VM is off "
                   "(pcowctl snapshot revert --image-only), or delete it",
                   snapshot->name, pcow_path(image));
        return NULL;
    }
    return decode(header);
}

/* ---- do they fit --------------------------------------------------------- */

static const CheckpointMember *find_member(const Checkpoint *checkpoint,
                                           const HostMemPcow *pcow)
{
    for (unsigned i = 0; i < checkpoint->count; i++) {
        if (!strcmp(checkpoint->member[i].id, pcow->id)) {
            return &checkpoint->member[i];
        }
    }
    return NULL;
}

typedef struct CheckArgs {
    const Checkpoint *checkpoint;
    bool forking;
    unsigned found;
} CheckArgs;

/* A child's image is what its parent's was: empty, on the parent's part. */
static bool check_child(HostMemPcow *pcow, const CheckArgs *args, Error **errp)
{
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    if (!info.snapshots && (pcow == checkpoint_find_home() || !info.data_size)) {
        return true;
    }
    error_setg(errp, "pcow image '%s' is not empty, so it does not go on from "
               "checkpoint '%s' of what it stands on; nothing was changed: make "
               "a new one for each fork", pcow_path(pcow->image),
               args->checkpoint->name);
    return false;
}

static bool check_part(HostMemPcow *pcow, const CheckArgs *args,
                       const CheckpointMember *member, Error **errp)
{
    const char *path = pcow_path(pcow->image);
    struct pcow_snapshot part;

    if (!hostmem_pcow_find_snapshot(pcow->image, NULL,
                                    member->identity.snapshot_id, &part, errp)) {
        return false;
    }
    if (!part.id) {
        error_setg(errp, "pcow image '%s' has lost its part of checkpoint "
                   "'%s': somebody deleted that snapshot, so nothing was "
                   "changed", path, args->checkpoint->name);
        return false;
    }
    pcow->snapshot_id = part.id;
    return true;
}

static bool check_identity(HostMemPcow *pcow, const CheckArgs *args,
                           const HostMemPcowIdentity *then,
                           const HostMemPcowIdentity *now, Error **errp)
{
    const char *path = pcow_path(pcow->image), *name = args->checkpoint->name;

    if (memcmp(now->uuid, then->uuid, sizeof(now->uuid))) {
        error_setg(errp, "checkpoint '%s' belongs to another pcow image than "
                   "'%s' %s (UUIDs differ), so nothing was changed: put the "
                   "right one back", name, path,
                   args->forking ? "stands on" : "is");
        return false;
    }
    if (now->size != then->size || pcow_size(pcow->image) != then->size) {
        error_setg(errp, "pcow image '%s' had %" PRIu64 " bytes when "
                   "checkpoint '%s' was taken, and has %" PRIu64 " now, so "
                   "nothing was changed: define the VM with the old size", path,
                   then->size, name, pcow_size(pcow->image));
        return false;
    }
    if (now->generation != then->generation ||
        now->snapshot_id != then->snapshot_id ||
        memcmp(now->bases, then->bases, sizeof(now->bases))) {
        error_setg(errp, "pcow image '%s' was changed, stands on another "
                   "snapshot or other bases, or is read-only and was not, or "
                   "the other way round, since checkpoint '%s' was taken; "
                   "nothing was changed now", path, name);
        return false;
    }
    return true;
}

static bool check_image(HostMemPcow *pcow, void *opaque, Error **errp)
{
    CheckArgs *args = opaque;
    const CheckpointMember *member = find_member(args->checkpoint, pcow);
    bool is_child = args->forking && !pcow->readonly;
    HostMemPcowIdentity now;

    if (!member) {
        error_setg(errp, "the pcow image '%s' (memory backend '%s') was not "
                   "part of the VM when checkpoint '%s' was taken, so nothing "
                   "was changed: unplug it first", pcow_path(pcow->image),
                   pcow->id, args->checkpoint->name);
        return false;
    }
    args->found++;
    return (is_child ? hostmem_pcow_get_base_identity(pcow, &now, errp) :
            hostmem_pcow_get_identity(pcow, member->identity.snapshot_id, &now,
                                      errp)) &&
           check_identity(pcow, args, &member->identity, &now, errp) &&
           (pcow->readonly ||
            (is_child ? check_child(pcow, args, errp) :
             check_part(pcow, args, member, errp)));
}

bool checkpoint_check_images(const Checkpoint *checkpoint, bool forking,
                             Error **errp)
{
    CheckArgs args = { .checkpoint = checkpoint, .forking = forking };

    if (!hostmem_pcow_foreach(check_image, &args, errp)) {
        return false;
    }
    if (args.found < checkpoint->count) {
        error_setg(errp, "the VM had %u pcow image(s) when checkpoint '%s' was "
                   "taken, and has %u of them now, so nothing was changed: "
                   "start it with all", checkpoint->count, checkpoint->name,
                   args.found);
        return false;
    }
    return true;
}
