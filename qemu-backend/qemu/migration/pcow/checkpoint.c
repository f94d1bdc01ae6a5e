/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Taking a checkpoint, see migration/pcow/checkpoint.h.
 *
 *   guest   what is done                              a crash here leaves
 *   ------  ----------------------------------------  ----------------------
 *   runs    flush what it has stored, prepare a       nothing
 *           snapshot in each image; wait for disks
 *   stands  freeze each image, serialise the devices  layers that are merged
 *   runs    flush what is frozen; each image has its  snapshots with the name
 *           snapshot; store manifest and devices      of a mark: taken back
 *   runs    commit: one word                          a mark that counts: it
 *                                                     gets its name
 *   runs    give all of them the name
 *
 * What takes long for it waits in a worker: the guest stands for what does not
 * depend on the size of RAM, nor on how much of it was written to.
 */
#include "qemu/osdep.h"
#include "block/thread-pool.h"
#include "io/channel-buffer.h"
#include "migration/global_state.h"
#include "migration/migration.h"
#include "migration/misc.h"
#include "migration/qemu-file.h"
#include "migration/savevm.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "migration/pcow/checkpoint.h"
#include "system/runstate.h"
#include "system/system.h"

#define STATE_CAPACITY (1 * MiB)        /* of a usual VM; it grows */
#define PIECE (2 * MiB)                 /* of what is stored at a time */

typedef struct Part {
    HostMemPcow *pcow;
    HostMemPcowMaking making;
    bool made;                  /* a snapshot, with the name of the mark */
} Part;

typedef struct Taking {
    HostMemPcow *home;
    const char *name;
    uint32_t limit;             /* ms that disks are waited for */
    char *mark;                 /* the name until it is committed */
    int64_t seconds;
    uint32_t nanoseconds;
    GArray *parts;              /* of Part; the home is the last one */
    unsigned seen;              /* of them, when they were looked for again */
    Checkpoint *checkpoint;
    uint64_t pause;             /* ns */
    uint8_t *encoded;           /* manifest and state, */
    uint64_t size;              /* so many bytes */
} Taking;

static bool add_part(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Taking *taking = opaque;
    Part part = { .pcow = pcow };

    pcow->snapshot_id = 0;
    if (!pcow->readonly && pcow != taking->home) {
        object_ref(OBJECT(pcow->backend));
        g_array_append_val(taking->parts, part);
    }
    return true;
}

static bool coroutine_fn prepare_all(Taking *taking, Error **errp)
{
    for (guint i = 0; i < taking->parts->len; i++) {
        Part *part = &g_array_index(taking->parts, Part, i);

        part->making = (HostMemPcowMaking) {
            .name = taking->mark,
            .date_sec = taking->seconds,
            .date_nsec = taking->nanoseconds,
        };
        if (!hostmem_pcow_co_change(part->pcow, hostmem_pcow_prepare_snapshot,
                                    &part->making, errp)) {
            return false;
        }
    }
    return true;
}

/* ---- the guest stands ---------------------------------------------------- */

static bool freeze_all(Taking *taking, Error **errp)
{
    struct pcow_error error;
    struct pcow_info info;
    bool ok = true;
    int ret;

    if (!hostmem_pcow_hold_guest(errp)) {
        return false;
    }
    for (guint i = 0; i < taking->parts->len && ok; i++) {
        Part *part = &g_array_index(taking->parts, Part, i);

        /* The layer that stores go to is what becomes the snapshot */
        pcow_get_info(part->pcow->image, &info);
        part->pcow->snapshot_id = info.active_layer;
        ret = pcow_snapshot_freeze(part->pcow->image, part->making.token,
                                   &error);
        ok = hostmem_pcow_propagate(ret, &error, errp);
    }
    hostmem_pcow_release_guest();
    return ok;
}

static bool serialise(Checkpoint *checkpoint, Error **errp)
{
    g_autoptr(QIOChannelBuffer) buffer = qio_channel_buffer_new(STATE_CAPACITY);
    QEMUFile *file = qemu_file_new_output(QIO_CHANNEL(buffer));
    bool ok = qemu_savevm_state(file, errp) >= 0;

    if (ok && qemu_fflush(file) < 0) {
        error_setg(errp, "the state of the devices cannot be stored");
        ok = false;
    }
    if (ok) {
        checkpoint->state_size = buffer->usage;
        checkpoint->state = g_steal_pointer(&buffer->data);
        buffer->usage = buffer->capacity = 0;
    }
    qemu_fclose(file);
    return ok;
}

/* Nothing that was asked before has been plugged or begun meanwhile. */
static bool may_create(Taking *taking, Error **errp)
{
    if (runstate_check(RUN_STATE_SHUTDOWN)) {
        error_setg(errp, "the guest has powered off: there is nothing to take "
                   "a checkpoint of");
        return false;
    }
    return checkpoint_may_begin(errp) && checkpoint_is_whole(errp) &&
           !migration_is_blocked(errp) && checkpoint_check_ram(errp) &&
           checkpoint_check_capabilities(errp) &&
           hostmem_pcow_check_no_disks(errp);
}

static bool is_part(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Taking *taking = opaque;

    for (guint i = 0; i < taking->parts->len; i++) {
        if (g_array_index(taking->parts, Part, i).pcow == pcow) {
            taking->seen++;
            return true;
        }
    }
    if (pcow->readonly) {
        return true;
    }
    error_setg(errp, "the pcow image '%s' was plugged while the checkpoint was "
               "prepared: try again", pcow_path(pcow->image));
    return false;
}

static bool has_same_images(Taking *taking, Error **errp)
{
    taking->seen = 0;
    if (!hostmem_pcow_foreach(is_part, taking, errp)) {
        return false;
    }
    if (taking->seen != taking->parts->len) {
        error_setg(errp, "a pcow image was unplugged while the checkpoint was "
                   "prepared: try again");
        return false;
    }
    return true;
}

static bool are_disks_busy(void *opaque, Error **errp)
{
    Taking *taking = opaque;
    return checkpoint_disks_are_busy();
}

/* For a moment in which nothing is asked of them, which may never come. */
static void coroutine_fn await_idle_disks(Taking *taking)
{
    int64_t limit = get_clock() + (int64_t)taking->limit * SCALE_MS;

    while (checkpoint_co_call(are_disks_busy, taking, NULL) && get_clock() < limit) {
        qemu_co_sleep_ns(QEMU_CLOCK_REALTIME, SCALE_MS);
    }
}

static bool take(void *opaque, Error **errp)
{
    Taking *taking = opaque;
    RunState before = runstate_get(), asked;
    int64_t start = get_clock();
    bool ok, stops;

    if (!may_create(taking, errp) || !has_same_images(taking, errp)) {
        return false;
    }
    if (!checkpoint_await_disks(taking->limit, errp)) {
        return false;
    }
    global_state_store();
    vm_stop(RUN_STATE_SAVE_VM);
    ok = hostmem_pcow_check_no_stores(errp) && freeze_all(taking, errp);
    if (ok) {
        taking->checkpoint = checkpoint_describe(taking->name, errp);
        ok = taking->checkpoint && serialise(taking->checkpoint, errp);
    }
    /* Somebody may have wanted to stop it meanwhile, and that is not over */
    stops = qemu_vmstop_requested(&asked);
    vm_resume(before);
    taking->pause = get_clock() - start;
    if (stops) {
        qemu_system_vmstop_request_prepare();
        qemu_system_vmstop_request(asked);
    }
    return ok;
}

/* ---- it runs again ------------------------------------------------------- */

static bool coroutine_fn finish_all(Taking *taking, Error **errp)
{
    for (guint i = 0; i < taking->parts->len; i++) {
        Part *part = &g_array_index(taking->parts, Part, i);

        part->made = hostmem_pcow_co_change(part->pcow,
                                            hostmem_pcow_finish_snapshot,
                                            &part->making, errp);
        if (!part->made) {
            return false;
        }
    }
    return true;
}

static int encode_worker(void *opaque)
{
    Taking *taking = opaque;

    taking->encoded = checkpoint_encode(taking->checkpoint, &taking->size);
    return 0;
}

/* In a worker, in pieces: between them others come to the image's tables */
static bool write_state(HostMemPcow *home, void *opaque, Error **errp)
{
    const Taking *taking = opaque;
    struct pcow_error error;

    for (uint64_t at = 0; at < taking->size; at += PIECE) {
        int ret = pcow_snapshot_write_state(home->image, taking->mark, at,
                                            taking->encoded + at,
                                            MIN(PIECE, taking->size - at),
                                            &error);

        if (!hostmem_pcow_propagate(ret, &error, errp)) {
            return false;
        }
    }
    return true;
}

static bool set_state_size(HostMemPcow *home, void *opaque, Error **errp)
{
    const Taking *taking = opaque;
    struct pcow_error error;
    int ret = pcow_snapshot_set_state_size(home->image, taking->mark,
                                           taking->size, &error);

    return hostmem_pcow_propagate(ret, &error, errp);
}

static bool coroutine_fn commit(Taking *taking, Error **errp)
{
    thread_pool_submit_co(encode_worker, taking);
    if (!taking->encoded) {
        error_setg(errp, "the state of the devices is too large to be kept");
        return false;
    }
    /* The second flush is so that the commit has little to wait for */
    return hostmem_pcow_co_change(taking->home, write_state, taking, errp) &&
           hostmem_pcow_all_flushed_ahead(errp) &&
           hostmem_pcow_co_flush(taking->home, errp) >= 0 &&
           hostmem_pcow_co_change(taking->home, set_state_size, taking, errp);
}

/* What fails here the next operation does, or the next start. */
static void coroutine_fn give_names(Taking *taking)
{
    HostMemPcowRenaming renaming = { taking->mark, taking->name };
    Error *err = NULL;

    for (guint i = 0; i < taking->parts->len; i++) {
        Part *part = &g_array_index(taking->parts, Part, i);

        if (!hostmem_pcow_co_change(part->pcow, hostmem_pcow_rename_snapshot,
                                    &renaming, &err)) {
            warn_report("checkpoint '%s' is durable, and bears the name '%s' "
                        "still: %s", taking->name, taking->mark,
                        error_get_pretty(err));
            error_free(err);
            return;
        }
    }
}

/*
 * The home first: after an error behind the commit it may count already, and
 * what is left then is for recovery.
 */
static void coroutine_fn take_back(Taking *taking)
{
    HostMemPcowDeletion deletion = { .name = taking->mark };

    for (guint i = taking->parts->len; i-- > 0;) {
        Part *part = &g_array_index(taking->parts, Part, i);
        Error *err = NULL;

        if (!part->made) {
            hostmem_pcow_co_change(part->pcow, hostmem_pcow_abandon_snapshot,
                                   &part->making, NULL);
            continue;
        }
        if (hostmem_pcow_co_change(part->pcow, hostmem_pcow_delete_snapshot,
                                   &deletion, &err)) {
            continue;
        }
        warn_report_err(err);
        if (part->pcow == taking->home) {
            return;             /* it may count: all of it or nothing goes */
        }
    }
}

static PcowCheckpointCreated *coroutine_fn create(Taking *taking, Error **errp)
{
    int64_t start = get_clock();
    PcowCheckpointCreated *result;

    hostmem_pcow_co_all_flush_ahead();
    if (!checkpoint_may_begin(errp) || !hostmem_pcow_all_flushed_ahead(errp) ||
        !prepare_all(taking, errp)) {
        take_back(taking);
        return NULL;
    }
    await_idle_disks(taking);
    if (!checkpoint_co_call(take, taking, errp) || !finish_all(taking, errp) ||
        !commit(taking, errp)) {
        take_back(taking);
        return NULL;
    }
    result = g_new0(PcowCheckpointCreated, 1);
    result->pause = taking->pause;
    result->durable = get_clock() - start;
    result->state_size = taking->size;
    give_names(taking);
    return result;
}

/* What is asked and what is set here nobody comes between. */
static bool begin(void *opaque, Error **errp)
{
    Taking *taking = opaque;
    if (!checkpoint_check_alone(errp)) {
        return false;
    }
    checkpoint_recover(false);
    if (!may_create(taking, errp) ||
        !hostmem_pcow_all_check_name(taking->name, errp)) {
        return false;
    }
    checkpoint_begin();
    return true;
}

PcowCheckpointCreated *coroutine_fn
qmp_pcow_checkpoint_create(const char *name, bool has_max_wait,
                           uint32_t max_wait, Error **errp)
{
    const int64_t now = g_get_real_time();
    Taking taking = {
        .name = name,
        .limit = has_max_wait ? max_wait : HOSTMEM_PCOW_LIMIT_MS,
        .seconds = now / G_USEC_PER_SEC,
        .nanoseconds = now % G_USEC_PER_SEC * 1000,
    };
    PcowCheckpointCreated *result = NULL;
    Part last = {};
    bool is_last;

    hostmem_pcow_await_changes();
    taking.home = last.pcow = checkpoint_home(errp);
    if (!taking.home) {
        return NULL;
    }
    if (checkpoint_co_call(begin, &taking, errp)) {
        taking.mark = checkpoint_mark_name(CHECKPOINT_TAKING, taking.home,
                                           taking.seconds, taking.nanoseconds);
        taking.parts = g_array_new(false, true, sizeof(Part));
        hostmem_pcow_foreach(add_part, &taking, NULL);
        object_ref(OBJECT(taking.home->backend));
        g_array_append_val(taking.parts, last);

        is_last = checkpoint_is_last(name);
        hostmem_pcow_use_spare(is_last);
        result = create(&taking, errp);
        hostmem_pcow_use_spare(false);
        checkpoint_end();
        if (taking.size) {
            checkpoint_note_size(taking.size);
        }

        for (guint i = 0; i < taking.parts->len; i++) {
            Part *part = &g_array_index(taking.parts, Part, i);

            object_unref(OBJECT(part->pcow->backend));
        }
        g_array_unref(taking.parts);
        checkpoint_free(taking.checkpoint);
        g_free(taking.encoded);
        g_free(taking.mark);
    }
    return result;
}
