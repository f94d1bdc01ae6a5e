/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A checkpoint of a whole VM whose RAM is a pcow image: RAM, devices and
 * persistent memory of one instant, without a disk that would carry the state.
 *
 * Each writable image of the VM has a snapshot of the same date.  With that of
 * the image that is the guest's RAM, the *home*, lies a VM state: a manifest,
 * which tells what every image was then, and the state of the devices.
 *
 *   name in the home             VM state  what it is
 *   ---------------------------  --------  ---------------------------------
 *   .checkpoint-DATE-ID          none      being taken: does not count, is
 *                                          taken back
 *   .checkpoint-DATE-ID          there     taken and durable: gets its name
 *   its own                      there     a checkpoint
 *   .deleting-DATE-ID            there     being deleted: the rest of it is
 *   .loading-checkpoint-DATE-ID  there     being reverted to: all images are
 *
 * A VM goes on from the checkpoint of another one, as a fork of it, if each of
 * its images is a new one that stands on the part of the other's.
 *
 * So one word commits it, the length of the VM state (see
 * pcow_snapshot_set_state_size()), and what a QEMU leaves that is killed is
 * finished or taken back by the next one: migration/pcow/recovery.c.  DATE is
 * that of the snapshots, to the nanosecond, and ID the UUID of the home, by
 * which an image knows a mark of another VM.
 */
#ifndef MIGRATION_PCOW_CHECKPOINT_H
#define MIGRATION_PCOW_CHECKPOINT_H

#include <pcow.h>
#include "system/hostmem-pcow.h"

/* ---- migration/pcow/manifest.c ---- */

#define CHECKPOINT_ID_SIZE 120  /* of a memory backend's id, with the NUL */

typedef struct CheckpointMember {
    char id[CHECKPOINT_ID_SIZE];
    HostMemPcowIdentity identity;
} CheckpointMember;

typedef struct Checkpoint {
    char name[PCOW_SNAPSHOT_NAME_SIZE];
    unsigned count;
    CheckpointMember *member;
    void *state;                /* of the devices: a stream of savevm */
    size_t state_size;          /* bytes */
} Checkpoint;

void checkpoint_free(Checkpoint *checkpoint);
G_DEFINE_AUTOPTR_CLEANUP_FUNC(Checkpoint, checkpoint_free)

/* What every image is, the writable ones by their HostMemPcow.snapshot_id. */
Checkpoint *checkpoint_describe(const char *name, Error **errp);
/*
 * As it is stored with the snapshot of the home.  NULL: too much.  In any
 * thread; to be freed with g_free().
 */
void *checkpoint_encode(const Checkpoint *checkpoint, uint64_t *size);
/* All of it, by its checksum; NULL if it is damaged, or of another kind. */
Checkpoint *checkpoint_read(struct pcow_image *image,
                            const struct pcow_snapshot *snapshot, Error **errp);
/*
 * Fails unless the images of this VM are those of the checkpoint, and the
 * writable ones still have their part.  Else their snapshot_id is set.
 * @forking: they are empty instead, each on the part of such an image.
 */
bool checkpoint_check_images(const Checkpoint *checkpoint, bool forking,
                             Error **errp);

/* ---- migration/pcow/parts.c ---- */

/* The image that is the guest's RAM; fails if that is none. */
HostMemPcow *checkpoint_home(Error **errp);
/* Fails if much of the guest's RAM is no image. */
bool checkpoint_check_ram(Error **errp);
/* Bytes of RAM that are none, and so part of the state. */
uint64_t checkpoint_other_ram(void);
/* As checkpoint_home(); NULL without a word. */
HostMemPcow *checkpoint_find_home(void);

typedef enum CheckpointMark {
    CHECKPOINT_TAKING,
    CHECKPOINT_DELETING,
    CHECKPOINT_REVERTING,
    CHECKPOINT_MARKS
} CheckpointMark;

char *checkpoint_mark_name(CheckpointMark mark, const HostMemPcow *home,
                           int64_t seconds, uint32_t nanoseconds);
/* Which of them @name is; CHECKPOINT_MARKS: none. */
CheckpointMark checkpoint_parse_mark(const char *name);
/* That of @name, which must be a checkpoint, whole and none in the making. */
bool checkpoint_find(HostMemPcow *home, const char *name,
                     struct pcow_snapshot *found, Error **errp);
/* The part of an image; its id is 0 if it has none. */
bool checkpoint_find_part(HostMemPcow *pcow, const struct pcow_snapshot *home,
                          struct pcow_snapshot *found, Error **errp);
/* Nothing else that concerns the whole VM is under way, nor its end. */
bool checkpoint_may_begin(Error **errp);
/* Set around what must not end halfway; until it has, or the VM runs. */
void checkpoint_set_half_loaded(bool is_half_loaded);
bool checkpoint_is_whole(Error **errp);
/* No capability is on that is about another way to send RAM. */
bool checkpoint_check_capabilities(Error **errp);

/* ---- migration/pcow/disks.c ---- */

/* Has anything been asked of a disk that it has not answered? Main loop. */
bool checkpoint_disks_are_busy(void);
/*
 * Wait for that, with the vCPUs stopped, and they stay so: vm_stop() has not to
 * wait then.  False: the time is over, and they run on.
 */
bool checkpoint_await_disks(uint32_t limit_ms, Error **errp);

/* ---- migration/pcow/recovery.c ---- */

/*
 * Around the taking or the deletion of one, whose marks recovery leaves alone.
 * Main loop.
 */
void checkpoint_begin(void);
void checkpoint_end(void);
bool checkpoint_is_under_way(void);
/* Fails if one is. */
bool checkpoint_check_alone(Error **errp);

/* Calls @fn for the part of each writable image but the home, till it fails. */
typedef bool CheckpointPartFn(HostMemPcow *pcow,
                              const struct pcow_snapshot *part, void *opaque,
                              Error **errp);
bool checkpoint_foreach_part(HostMemPcow *home, const struct pcow_snapshot *of,
                             CheckpointPartFn *fn, void *opaque, Error **errp);

/* What polls, or looks at the disks, may not be done in a coroutine. */
typedef bool CheckpointFn(void *opaque, Error **errp);
bool coroutine_fn checkpoint_co_call(CheckpointFn *fn, void *opaque,
                                     Error **errp);

/* ---- migration/pcow/last.c ---- */

/*
 * Room is kept for the last moment of the VM, whose checkpoint has a name that
 * begins so; NULL: there is none.
 */
void checkpoint_set_last(const char *prefix);
const char *checkpoint_last_prefix(void);
/* Is it that, and the VM stopped? */
bool checkpoint_is_last(const char *name);
/* So many bytes has the manifest and state of a checkpoint. */
void checkpoint_note_size(uint64_t size);

/* ---- migration/pcow/at_signal.c ---- */

/* QEMU was told to end; returns when the checkpoint is durable, or failed. */
void checkpoint_take_at_signal(void);

/* ---- migration/pcow/rollback.c ---- */

/*
 * Every writable image, to the part that is its snapshot_id, or, @forking, to
 * what it stands on.
 */
bool checkpoint_revert_images(bool forking, Error **errp);

#endif
