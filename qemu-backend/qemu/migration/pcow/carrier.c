/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The disks' part of VM snapshots with pcow images: which disks there are,
 * which of them have it, and what becomes of a snapshot that was being taken
 * or deleted when QEMU was killed.
 *
 * A snapshot of a VM is valid when all of its disks have it.  Until they do,
 * and from when one may have lost it, the snapshot inside the pcow image bears
 * a mark instead of its name: the date, which is the same on disks and image,
 * and the number of disks.  Whoever finds a mark compares: all disks have a
 * snapshot of that date, so the image gets the name that it has there; or one
 * has not, so it is deleted everywhere.
 *
 * A snapshot that is being reverted to bears another mark: whoever finds it
 * reverts disks and image to it once more, as some of them may be there and
 * others not.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "block/block-global-state.h"
#include "block/block_int.h"
#include "block/graph-lock.h"
#include "qapi/error.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "system/block-backend.h"
#include "system/hostmem-pcow.h"

#define MARK ".incomplete-"
#define LOADING ".loading-"

char *hostmem_pcow_mark_name(const HostMemPcowMark *mark)
{
    return g_strdup_printf("%s%" PRIu32 ".%09" PRIu32 "-%u",
                           mark->loading ? LOADING : MARK,
                           mark->date_sec, mark->date_nsec, mark->disks);
}

bool hostmem_pcow_is_mark(const char *name)
{
    return g_str_has_prefix(name, MARK) || g_str_has_prefix(name, LOADING) ||
           hostmem_pcow_is_migration_name(name) ||
           hostmem_pcow_is_arrival_name(name) ||
           hostmem_pcow_is_checkpoint_mark(name);
}

static bool parse_mark(const char *name, HostMemPcowMark *mark)
{
    int end = -1;

    mark->loading = g_str_has_prefix(name, LOADING);
    if (!mark->loading && !g_str_has_prefix(name, MARK)) {
        return false;
    }
    name += strlen(mark->loading ? LOADING : MARK);
    return sscanf(name, "%" SCNu32 ".%" SCNu32 "-%u%n", &mark->date_sec,
                  &mark->date_nsec, &mark->disks, &end) == 3 &&
           !name[end] && mark->disks;
}

static bool notice(HostMemPcow *pcow, void *opaque, Error **errp)
{
    return false;
}

bool hostmem_pcow_present(void)
{
    return !hostmem_pcow_foreach(notice, NULL, NULL);
}

/* As savevm chooses: what is writable and in use, or the monitor's own. */
static bool GRAPH_RDLOCK takes_part(BlockDriverState *bs, bool has_devices,
                                    strList *devices)
{
    if (has_devices) {
        for (; devices; devices = devices->next) {
            if (bdrv_find_node(devices->value) == bs) {
                return true;
            }
        }
        return false;
    }
    return bdrv_is_inserted(bs) && !bdrv_is_read_only(bs) &&
           (bdrv_has_blk(bs) || QLIST_EMPTY(&bs->parents));
}

/* Calls @fn for each snapshot of a disk until it returns false. */
typedef bool SnapshotFn(BlockDriverState *bs, const QEMUSnapshotInfo *sn,
                        void *opaque, Error **errp);

static bool GRAPH_RDLOCK foreach_snapshot(BlockDriverState *bs, SnapshotFn *fn,
                                          void *opaque, Error **errp)
{
    g_autofree QEMUSnapshotInfo *list = NULL;
    int count = bdrv_snapshot_list(bs, &list);

    for (int i = 0; i < count; i++) {
        if (!fn(bs, &list[i], opaque, errp)) {
            return false;
        }
    }
    return true;
}

/*
 * The same for all disks that take part; counts them.  A filter and the disk
 * below it may both be in use, and are one.
 */
static bool foreach_disk(bool has_devices, strList *devices, SnapshotFn *fn,
                         void *opaque, unsigned *disks, Error **errp)
{
    g_autoptr(GHashTable) seen = g_hash_table_new(NULL, NULL);
    BlockDriverState *bs;
    BdrvNextIterator it;

    GRAPH_RDLOCK_GUARD_MAINLOOP();
    *disks = 0;
    for (bs = bdrv_first(&it); bs; bs = bdrv_next(&it)) {
        if (!takes_part(bs, has_devices, devices) || !bdrv_can_snapshot(bs) ||
            !g_hash_table_add(seen, bdrv_skip_filters(bs))) {
            continue;
        }
        ++*disks;
        if (!foreach_snapshot(bs, fn, opaque, errp)) {
            bdrv_next_cleanup(&it);
            return false;
        }
    }
    return true;
}

bool hostmem_pcow_check_no_disks(Error **errp)
{
    BlockDriverState *bs;
    BdrvNextIterator it;

    GRAPH_RDLOCK_GUARD_MAINLOOP();
    for (bs = bdrv_first(&it); bs; bs = bdrv_next(&it)) {
        if (takes_part(bs, false, NULL)) {
            error_setg(errp, "disk '%s' can be written to, and would not be "
                       "part of a checkpoint, which has pcow images only: take "
                       "a snapshot of the VM (snapshot-save, virsh "
                       "snapshot-create), or make the disk read-only",
                       bdrv_get_device_or_node_name(bs));
            bdrv_next_cleanup(&it);
            return false;
        }
    }
    return true;
}

typedef struct Found {
    const HostMemPcowMark *mark;
    const BlockDriverState *last;
    unsigned disks;
    char name[sizeof_field(QEMUSnapshotInfo, name)];
} Found;

static bool has_date(const QEMUSnapshotInfo *sn, const HostMemPcowMark *mark)
{
    return sn->date_sec == mark->date_sec && sn->date_nsec == mark->date_nsec;
}

static bool match_date(BlockDriverState *bs, const QEMUSnapshotInfo *sn,
                       void *opaque, Error **errp)
{
    Found *found = opaque;

    if (found->mark && has_date(sn, found->mark)) {
        found->disks += bs != found->last;
        found->last = bs;
        pstrcpy(found->name, sizeof(found->name), sn->name);
    }
    return true;
}

bool hostmem_pcow_count_disks(bool has_devices, strList *devices,
                              const HostMemPcowMark *mark, unsigned *count,
                              Error **errp)
{
    Found found = { .mark = mark };
    unsigned disks;

    if (!foreach_disk(has_devices, devices, match_date, &found, &disks, errp)) {
        return false;
    }
    *count = mark ? found.disks : disks;
    return true;
}

static bool refuse_name(BlockDriverState *bs, const QEMUSnapshotInfo *sn,
                        void *opaque, Error **errp)
{
    if (strcmp(sn->name, opaque)) {
        return true;
    }
    error_setg(errp, "disk '%s' has a snapshot '%s' already: choose another "
               "name, or delete that one first (virsh snapshot-delete, "
               "delvm). A VM with pcow images does not overwrite one",
               bdrv_get_device_or_node_name(bs), sn->name);
    return false;
}

bool hostmem_pcow_check_new_on_disks(const char *name, bool has_devices,
                                     strList *devices, Error **errp)
{
    unsigned disks;

    return foreach_disk(has_devices, devices, refuse_name, (void *)name,
                        &disks, errp);
}

typedef struct LoadArgs {
    const char *name;
    HostMemPcowMark mark;
    const BlockDriverState *checked; /* loadvm takes the first of the name */
} LoadArgs;

static bool check_load(BlockDriverState *bs, const QEMUSnapshotInfo *sn,
                       void *opaque, Error **errp)
{
    LoadArgs *args = opaque;

    if (bs == args->checked || strcmp(sn->name, args->name)) {
        return true;
    }
    args->checked = bs;
    if (!has_date(sn, &args->mark)) {
        error_setg(errp, "snapshot '%s' of disk '%s' is of another time than "
                   "the VM state of that name, so nothing was changed: put the "
                   "right disk back", sn->name,
                   bdrv_get_device_or_node_name(bs));
        return false;
    }
    if (!QLIST_EMPTY(&bs->dirty_bitmaps)) {
        error_setg(errp, "disk '%s' has dirty bitmaps and cannot be reverted, "
                   "so nothing was changed: remove them first (virsh "
                   "checkpoint-delete)", bdrv_get_device_or_node_name(bs));
        return false;
    }
    return true;
}

bool hostmem_pcow_check_load_on_disks(const QEMUSnapshotInfo *sn,
                                      bool has_devices, strList *devices,
                                      Error **errp)
{
    LoadArgs args = {
        .name = sn->name,
        .mark = { .date_sec = sn->date_sec, .date_nsec = sn->date_nsec },
    };
    unsigned disks;

    return foreach_disk(has_devices, devices, check_load, &args, &disks, errp);
}

/* ---- recovery ------------------------------------------------------------ */

static bool delete_on_disk(BlockDriverState *bs, const QEMUSnapshotInfo *sn,
                           void *opaque, Error **errp)
{
    GRAPH_RDLOCK_GUARD_MAINLOOP();
    return !has_date(sn, opaque) ||
           bdrv_snapshot_delete(bs, sn->id_str, sn->name, errp) >= 0;
}

static bool revert_disk(BlockDriverState *bs, const QEMUSnapshotInfo *sn,
                        void *opaque, Error **errp)
{
    ERRP_GUARD();

    if (has_date(sn, opaque) && bdrv_snapshot_goto(bs, sn->id_str, errp) < 0) {
        error_prepend(errp, "disk '%s': ", bdrv_get_device_or_node_name(bs));
        return false;
    }
    return true;
}

/* A QEMU ended while it reverted: do all of it. Its RAM is lost either way. */
static bool recover_load(HostMemPcow *pcow, const char *mark_name,
                         const HostMemPcowMark *mark, Error **errp)
{
    Found found = { .mark = mark };
    struct pcow_error error;
    unsigned disks;
    ERRP_GUARD();

    if (!foreach_disk(false, NULL, match_date, &found, &disks, errp)) {
        return false;
    }
    if (found.disks < mark->disks) {
        error_setg(errp, "the VM was being reverted to a snapshot when QEMU "
                   "ended: the pcow image '%s' has it as '%s', but %u of %u "
                   "disk(s) with a part of it are not there. Start the VM with "
                   "all of them to have it finished; or, to start with images "
                   "and disks as they are, rename it first (pcow-img snapshot "
                   "--rename)", pcow_path(pcow->image), mark_name,
                   mark->disks - found.disks, mark->disks);
        return false;
    }
    if (!foreach_disk(false, NULL, revert_disk, (void *)mark, &disks, errp) ||
        !hostmem_pcow_revert(pcow, mark_name, errp)) {
        error_prepend(errp, "the VM was being reverted to '%s' of pcow image "
                      "'%s' when QEMU ended, which cannot be finished. Remove "
                      "the cause, or rename that snapshot to start with images "
                      "and disks as they are (pcow-img snapshot --rename): ",
                      mark_name, pcow_path(pcow->image));
        return false;
    }
    if (pcow_snapshot_rename(pcow->image, mark_name, found.name, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    info_report("pcow image '%s': the VM was being reverted to '%s' when QEMU "
                "ended: disks and image are there now, RAM is as after a "
                "restart", pcow_path(pcow->image), found.name);
    return true;
}

static bool recover_mark(HostMemPcow *pcow, const char *mark_name,
                         const HostMemPcowMark *mark, Error **errp)
{
    Found found = { .mark = mark };
    struct pcow_error error;
    unsigned disks;
    int ret;

    if (!foreach_disk(false, NULL, match_date, &found, &disks, errp)) {
        return false;
    }
    if (disks < mark->disks) {
        error_setg(errp, "snapshot '%s' of pcow image '%s' was being taken or "
                   "deleted when a QEMU with %u disk(s) ended, and this one "
                   "has %u: start the VM with all of them to have it finished "
                   "or taken back", mark_name, pcow_path(pcow->image),
                   mark->disks, disks);
        return false;
    }
    if (found.disks >= mark->disks) {
        ret = pcow_snapshot_rename(pcow->image, mark_name, found.name, &error);
    } else if (foreach_disk(false, NULL, delete_on_disk, (void *)mark, &disks,
                            errp)) {
        ret = pcow_snapshot_delete(pcow->image, mark_name, NULL, &error);
    } else {
        return false;
    }
    if (ret < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    info_report("pcow image '%s': a snapshot was being taken or deleted when "
                "QEMU ended: %s %s", pcow_path(pcow->image),
                found.disks >= mark->disks ? "kept as" : "there is none now",
                found.disks >= mark->disks ? found.name : "");
    return true;
}

bool hostmem_pcow_check_plug(HostMemPcow *pcow, Error **errp)
{
    struct pcow_snapshot *list;
    HostMemPcowMark mark;
    bool ok = true;
    size_t count;

    if (!pcow->plugged || pcow->readonly ||
        pcow_snapshot_list(pcow->image, &list, &count, NULL) < 0) {
        return true;
    }
    for (size_t i = 0; i < count && ok; i++) {
        if (parse_mark(list[i].name, &mark) && mark.loading) {
            error_setg(errp, "a VM with the pcow image '%s' was being reverted "
                       "to its snapshot '%s' when QEMU ended: start a VM with "
                       "the image and its disks to have that finished; or, to "
                       "use the image as it is, rename the snapshot first "
                       "(pcow-img snapshot --rename)",
                       pcow_path(pcow->image), list[i].name);
            ok = false;
        }
    }
    free(list);
    return ok;
}

void hostmem_pcow_note_foreign_marks(HostMemPcow *pcow)
{
    struct pcow_snapshot *list;
    HostMemPcowMark mark;
    size_t count;

    if (!pcow->plugged || pcow->readonly ||
        pcow_snapshot_list(pcow->image, &list, &count, NULL) < 0) {
        return;
    }
    pcow->foreign_marks = g_ptr_array_new_with_free_func(g_free);
    for (size_t i = 0; i < count; i++) {
        if (parse_mark(list[i].name, &mark)) {
            g_ptr_array_add(pcow->foreign_marks, g_strdup(list[i].name));
            warn_report("snapshot '%s' of pcow image '%s' was being taken or "
                        "deleted when the QEMU of another VM ended: it stays "
                        "so until that VM is started with the image and its "
                        "disks, or somebody deletes it (pcow-img snapshot -d)",
                        list[i].name, pcow_path(pcow->image));
        }
    }
    free(list);
}

static bool is_foreign(const HostMemPcow *pcow, const char *mark_name)
{
    return pcow->foreign_marks &&
           g_ptr_array_find_with_equal_func(pcow->foreign_marks, mark_name,
                                            g_str_equal, NULL);
}

static bool recover(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const bool *at_start = opaque;
    struct pcow_snapshot *list;
    HostMemPcowMark mark;
    Error *err = NULL;
    size_t count;

    if (pcow->readonly ||
        pcow_snapshot_list(pcow->image, &list, &count, NULL) < 0) {
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        /*
         * A load is finished before anything has run, when nobody's disks
         * change beneath him; one of this process that failed is for who lets
         * the VM run.
         */
        if (!parse_mark(list[i].name, &mark) ||
            is_foreign(pcow, list[i].name) || (mark.loading && !*at_start) ||
            (mark.loading ? recover_load : recover_mark)(pcow, list[i].name,
                                                         &mark, &err)) {
            continue;
        }
        if (mark.loading) {
            /* Memory and disks of different times: nobody must run that */
            error_report_err(err);
            exit(1);
        }
        warn_report_err(err);
        err = NULL;
    }
    free(list);
    return true;
}

static void recover_all(bool at_start)
{
    hostmem_pcow_foreach(recover, &at_start, NULL);
    checkpoint_recover(at_start);
}

void hostmem_pcow_all_recover(void)
{
    recover_all(false);
}

void hostmem_pcow_recover_at_start(void)
{
    recover_all(true);
}
