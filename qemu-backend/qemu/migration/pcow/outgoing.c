/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The source of a live migration; see migration/pcow/stream.h.
 *
 * Snapshots are taken in the main loop, as they are for everybody else; what
 * waits for the medium is done in a worker while the guest runs, and the guest
 * is held for what is left.  The migration thread only reads what is frozen,
 * through handles of its own, so that it shares no lock with the guest.  The
 * phase says whose turn it is.
 *
 * When the guest has stopped nothing is frozen, nor made durable: nobody stores
 * any more, so what the guest sees is what is to be sent.  If the migration
 * fails then, the guest goes on with it as it was.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "io/channel-socket.h"
#include "io/channel-tls.h"
#include "qapi/error.h"
#include "qemu/coroutine.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "migration/migration.h"
#include "migration/misc.h"
#include "migration/options.h"
#include "migration/qemu-file.h"
#include "migration/register.h"
#include "stream.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"

#define NAME ".migrating-"

/* Each round holds the guest for a moment: not too often, nor for little. */
#define ROUND_PAGES 256
#define ROUND_NS (250 * 1000 * 1000)

typedef enum Phase {
    SENDING,                    /* the migration thread */
    SENT,                       /* it again: a round may begin */
    FREEZING,                   /* the main loop, and workers: a snapshot */
} Phase;

/* Of a snapshot; no image: there is none.  A name alone is one to be deleted */
typedef struct Frozen {
    pcow_image *image;
    char name[PCOW_SNAPSHOT_NAME_SIZE];
} Frozen;

struct HostMemPcowOutgoing {
    Phase phase;
    QEMUBH *freeze;
    QemuSemaphore frozen;       /* posted when FREEZING ends */
    Frozen older, newer;        /* that of a round is what they differ in */
    HostMemPcowDifference difference;
    unsigned rounds;
    uint64_t pages_at;          /* of the monitor's count, at that snapshot */
    int64_t frozen_at;          /* get_clock() */
    Error *error;               /* of FREEZING */
    bool freezing;              /* of the main loop */
};

typedef struct HostMemPcowOutgoing Outgoing;

bool hostmem_pcow_is_migration_name(const char *name)
{
    return g_str_has_prefix(name, NAME);
}

/* ---- before it begins ---------------------------------------------------- */

static const char *unfit_mode(void)
{
    if (migrate_mode() != MIG_MODE_NORMAL) {
        return "a migration in another mode than 'normal'";
    }
    if (migrate_postcopy_ram()) {
        return "postcopy (virsh migrate --postcopy)";
    }
    if (migrate_mapped_ram() || migrate_background_snapshot()) {
        return "a snapshot to a file";
    }
    return migrate_colo() ? "COLO" : NULL;
}

/* Where a stream is kept, nobody would take the contents from it again. */
static void refuse_file(const HostMemPcow *pcow, Error **errp)
{
    error_setg(errp, "the VM cannot be migrated or saved to a file: that would "
               "leave out the pcow image '%s' (memory backend '%s'), whose "
               "contents stay in the image. Use snapshot-save (virsh "
               "snapshot-create), or migrate to another host over a socket",
               pcow_path(pcow->image), pcow->id);
}

static bool check_image(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const char *path = pcow_path(pcow->image), *mode = unfit_mode();
    const MigrationAddress *addr = opaque;
    struct pcow_info info;

    /* Nothing of it travels, and the state tells which file it is. */
    if (pcow->readonly) {
        return true;
    }
    if (addr->transport != MIGRATION_ADDRESS_TYPE_SOCKET) {
        refuse_file(pcow, errp);
        return false;
    }
    if (mode) {
        error_setg(errp, "%s does not take the pcow image '%s' (memory backend "
                   "'%s') along: use a plain live migration over a socket",
                   mode, path, pcow->id);
        return false;
    }
    pcow_get_info(pcow->image, &info);
    if (!pcow->outgoing && info.snapshots &&
        !runstate_check(RUN_STATE_INMIGRATE)) {
        error_setg(errp, "the VM cannot be migrated: the pcow image '%s' has "
                   "%u snapshot(s), which would stay behind. Delete them "
                   "(virsh snapshot-delete, pcowctl snapshot delete), or shut "
                   "the VM down and copy the image with its bases", path,
                   info.snapshots);
        return false;
    }
    return true;
}

bool hostmem_pcow_check_migration(MigrationAddress *addr, Error **errp)
{
    hostmem_pcow_await_changes();
    return hostmem_pcow_foreach(check_image, addr, errp);
}

static bool is_socket(QIOChannel *channel)
{
    return object_dynamic_cast(OBJECT(channel), TYPE_QIO_CHANNEL_SOCKET) ||
           object_dynamic_cast(OBJECT(channel), TYPE_QIO_CHANNEL_TLS);
}

/* ---- snapshots ----------------------------------------------------------- */

/* Monotonic; the background copies of hot slabs count as stores. */
static uint64_t changed_pages(HostMemPcow *pcow)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(pcow->map, &stats);
    return stats.pages_copied + stats.pages_zeroed;
}

/* What is open first, as a snapshot that is read stays. */
static void drop(HostMemPcow *pcow, Frozen *frozen)
{
    struct pcow_error error;

    pcow_close(frozen->image);
    frozen->image = NULL;
    if (*frozen->name &&
        pcow_snapshot_delete(pcow->image, frozen->name, NULL, &error) < 0) {
        warn_report("snapshot '%s' of pcow image '%s' stays until the VM is "
                    "started again: %s", frozen->name, pcow_path(pcow->image),
                    error.message);
    }
    *frozen->name = '\0';
}

/* By its descriptor: the file may have been renamed since it was opened. */
static bool open_snapshot(HostMemPcow *pcow, const char *name,
                          pcow_image **image, Error **errp)
{
    g_autofree char *path = g_strdup_printf("/proc/self/fd/%d",
                                            pcow_fd(pcow->image));
    struct pcow_error error;

    if (pcow_open(path, 0, name, image, &error) < 0) {
        *image = NULL;
        error_setg(errp, "%s", error.message);
        return false;
    }
    return true;
}

static bool has_begun(const Outgoing *out)
{
    return out->newer.image;
}

/* The guest runs.  All of the last round has been sent. */
static bool before_freeze(HostMemPcow *pcow, void *opaque, Error **errp)
{
    Outgoing *out = pcow->outgoing;

    out->difference.last = NULL;    /* the older one's image */
    drop(pcow, &out->older);
    return hostmem_pcow_prepare_snapshot(pcow, opaque, errp);
}

/* With the BQL, and nobody stores. */
static bool freeze(HostMemPcow *pcow, const HostMemPcowMaking *making,
                   Error **errp)
{
    Outgoing *out = pcow->outgoing;
    struct pcow_error error;
    int ret = pcow_snapshot_freeze(pcow->image, making->token, &error);

    out->pages_at = changed_pages(pcow);
    out->frozen_at = get_clock();
    return hostmem_pcow_propagate(ret, &error, errp);
}

/* The guest runs again.  What is no snapshot on the medium is not opened. */
static bool after_freeze(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const HostMemPcowMaking *making = opaque;
    Outgoing *out = pcow->outgoing;

    if (!hostmem_pcow_finish_snapshot(pcow, opaque, errp)) {
        return false;
    }
    out->older = out->newer;
    out->newer = (Frozen) {};
    pstrcpy(out->newer.name, sizeof(out->newer.name), making->name);
    return open_snapshot(pcow, making->name, &out->newer.image, errp);
}

static void begin_difference(Outgoing *out, pcow_image *last, pcow_image *next)
{
    out->difference.last = last;
    out->difference.next = next;
    out->difference.offset = 0;
}

/*
 * False: not now, and *@err, if that failed.  It is not the guest's fault if a
 * disk is slow: then the round comes later.
 */
static bool coroutine_fn make_round(HostMemPcow *pcow, Error **err)
{
    g_autofree char *name = g_strdup_printf(NAME "%u", pcow->outgoing->rounds);
    Outgoing *out = pcow->outgoing;
    HostMemPcowMaking making = {
        .name = name,
        .date_sec = g_get_real_time() / G_USEC_PER_SEC,
    };
    bool held = false, ok = false;

    if (hostmem_pcow_co_change(pcow, before_freeze, &making, err) &&
        !pcow->migration_ends) {
        held = hostmem_pcow_co_hold_guest(HOSTMEM_PCOW_LIMIT_MS, NULL);
    }
    if (held) {
        ok = pcow->migration_ends || freeze(pcow, &making, err);
        hostmem_pcow_release_guest();
        ok = ok && !pcow->migration_ends &&
             hostmem_pcow_co_change(pcow, after_freeze, &making, err);
    }
    if (!ok) {
        out->frozen_at = get_clock();
        hostmem_pcow_co_change(pcow, hostmem_pcow_abandon_snapshot, &making,
                               NULL);
        return false;
    }
    out->rounds++;
    begin_difference(out, out->older.image, out->newer.image);
    return true;
}

static void coroutine_fn co_end(HostMemPcow *pcow);

static void coroutine_fn freeze_co(void *opaque)
{
    HostMemPcow *pcow = opaque;
    Outgoing *out = pcow->outgoing;
    bool ok = make_round(pcow, &out->error);

    out->freezing = false;
    if (pcow->migration_ends) {
        co_end(pcow);
        return;
    }
    qatomic_store_release(&out->phase, ok || out->error ? SENDING : SENT);
    qemu_sem_post(&out->frozen);
}

static void freeze_in_main_loop(void *opaque)
{
    HostMemPcow *pcow = opaque;

    pcow->outgoing->freezing = true;
    qemu_coroutine_enter(qemu_coroutine_create(freeze_co, pcow));
}

/* The first snapshot is that of the first round. */
static void begin(HostMemPcow *pcow)
{
    Outgoing *out = g_new0(Outgoing, 1);

    pcow->outgoing = out;
    out->phase = SENT;
    /* Without a device it may be deleted (object-del): not under the thread. */
    object_ref(OBJECT(pcow->backend));
    qemu_sem_init(&out->frozen, 0);
    out->freeze = aio_bh_new(iohandler_get_aio_context(), freeze_in_main_loop,
                             pcow);
}

/*
 * Of a QEMU that migrated and was killed: the VM runs on here, or nowhere.  Or
 * what could not be deleted, or taken note of, before.
 */
static void delete_remains(HostMemPcow *pcow)
{
    char name[PCOW_SNAPSHOT_NAME_SIZE];
    struct pcow_error error;

    while (pcow_snapshot_find_prefix(pcow->image, NAME, name)) {
        if (pcow_snapshot_delete(pcow->image, name, NULL, &error) < 0) {
            warn_report("%s", error.message);
            return;
        }
        info_report("pcow image '%s': deleted '%s' of a migration that ended "
                    "without it", pcow_path(pcow->image), name);
    }
}

static bool drop_all(HostMemPcow *pcow, void *opaque, Error **errp)
{
    drop(pcow, &pcow->outgoing->older);
    drop(pcow, &pcow->outgoing->newer);
    delete_remains(pcow);
    return true;
}

static void forget(HostMemPcow *pcow)
{
    Outgoing *out = pcow->outgoing;

    error_free(out->error);
    qemu_sem_destroy(&out->frozen);
    g_free(out);
    pcow->outgoing = NULL;
    pcow->migration_ends = false;
    hostmem_pcow_tell_at_rest();
    /* Perhaps the last one: *pcow is gone then. */
    object_unref(OBJECT(pcow->backend));
}

static void coroutine_fn co_end(HostMemPcow *pcow)
{
    hostmem_pcow_co_change(pcow, drop_all, NULL, NULL);
    forget(pcow);
}

static void coroutine_fn end_entry(void *opaque)
{
    co_end(opaque);
}

/*
 * A guest that goes on here does not stand for it.  If it does not, whoever
 * hears that the migration has ended finds the snapshots gone.
 */
static void end(HostMemPcow *pcow)
{
    Outgoing *out = pcow->outgoing;

    if (!out || pcow->migration_ends) {
        return;
    }
    pcow->migration_ends = true;
    /* A round that was asked for, and has not begun, never does */
    qemu_bh_delete(out->freeze);
    if (out->freezing) {
        /* In the midst of that: when it is over */
        return;
    }
    if (runstate_is_running()) {
        qemu_coroutine_enter(qemu_coroutine_create(end_entry, pcow));
        return;
    }
    drop_all(pcow, NULL, NULL);
    forget(pcow);
}

/* Main loop; the migration thread has not begun, or has ended. */
static int migration_event(NotifierWithReturn *notifier, MigrationEvent *event,
                           Error **errp)
{
    HostMemPcow *pcow = container_of(notifier, HostMemPcow, migration);
    QEMUFile *f = migrate_get_current()->to_dst_file;

    if (pcow->readonly) {
        return 0;
    }
    if (event->type != MIG_EVENT_PRECOPY_SETUP) {
        end(pcow);
        return 0;
    }
    if (!is_socket(qemu_file_get_ioc(f))) {
        refuse_file(pcow, errp);
        return -ENOTSUP;
    }
    begin(pcow);
    return 0;
}

/* ---- the stream ---------------------------------------------------------- */

static bool is_active(void *opaque)
{
    HostMemPcow *pcow = opaque;

    return pcow->outgoing;
}

static int save_setup(QEMUFile *f, void *opaque, Error **errp)
{
    HostMemPcowIdentity identity;
    HostMemPcow *pcow = opaque;

    if (!hostmem_pcow_get_identity(pcow, 0, &identity, errp)) {
        return -EIO;
    }
    hostmem_pcow_put_record(f, 0, HOSTMEM_PCOW_HEADER);
    qemu_put_be32(f, HOSTMEM_PCOW_STREAM_VERSION);
    qemu_put_be64(f, identity.size);
    qemu_put_buffer(f, identity.bases, sizeof(identity.bases));
    hostmem_pcow_put_record(f, 0, HOSTMEM_PCOW_END);
    return 0;
}

static int send_some(QEMUFile *f, HostMemPcow *pcow, bool all)
{
    Outgoing *out = pcow->outgoing;
    Error *err = NULL;
    int ret = hostmem_pcow_send_difference(f, &out->difference, all, &err);

    if (err) {
        migration_file_set_error(ret, err);
    } else if (ret > 0) {
        qatomic_set(&out->phase, SENT);
        ret = 0;
    }
    return ret;
}

static uint64_t pages_since(HostMemPcow *pcow)
{
    return changed_pages(pcow) - pcow->outgoing->pages_at;
}

static bool wants_round(HostMemPcow *pcow)
{
    uint64_t pages = pages_since(pcow);
    int64_t age = get_clock() - pcow->outgoing->frozen_at;

    if (!has_begun(pcow->outgoing)) {
        return !pcow->outgoing->frozen_at || age >= ROUND_NS;
    }
    return age >= ROUND_NS && (pages >= ROUND_PAGES ||
                               (pages && age >= 4 * ROUND_NS));
}

static int save_iterate(QEMUFile *f, void *opaque)
{
    HostMemPcow *pcow = opaque;
    Outgoing *out = pcow->outgoing;
    int ret = 0;

    if (qatomic_load_acquire(&out->phase) == FREEZING) {
        qemu_sem_timedwait(&out->frozen, 10);
    }
    if (qatomic_load_acquire(&out->phase) == SENT && wants_round(pcow)) {
        qatomic_set(&out->phase, FREEZING);
        qemu_bh_schedule(out->freeze);
    }
    if (qatomic_load_acquire(&out->phase) == SENDING) {
        if (out->error) {
            migration_file_set_error(-EIO, g_steal_pointer(&out->error));
            ret = -EIO;
        } else {
            ret = send_some(f, pcow, false);
        }
    }
    if (qatomic_read(&out->phase) == SENT && pages_since(pcow)) {
        /* What has changed is not much, or new: the stream waits for RAM */
        g_usleep(1000);
    }
    hostmem_pcow_put_record(f, 0, HOSTMEM_PCOW_END);
    return ret ?: qatomic_read(&out->phase) == SENT;
}

/* What is left of the round, and what has changed since it was frozen. */
static void pending_estimate(void *opaque, uint64_t *must_precopy,
                             uint64_t *can_postcopy)
{
    HostMemPcow *pcow = opaque;
    Outgoing *out = pcow->outgoing;
    uint64_t rest = 0;

    switch (qatomic_load_acquire(&out->phase)) {
    case SENDING:
        rest = out->error ? 1 : pcow_size(pcow->image) - out->difference.offset;
        break;
    case FREEZING:
        rest = 1;               /* the guest must not be stopped now */
        break;
    case SENT:
        /* Nothing has been sent yet */
        rest = has_begun(out) ? 0 : pcow_size(pcow->image);
        break;
    }
    *must_precopy += rest + pages_since(pcow) * HOSTMEM_PCOW_STREAM_PAGE;
}

/* The main loop has to be through with its part before the guest is stopped. */
static void pending_exact(void *opaque, uint64_t *must_precopy,
                          uint64_t *can_postcopy)
{
    HostMemPcow *pcow = opaque;

    while (qatomic_load_acquire(&pcow->outgoing->phase) == FREEZING) {
        qemu_sem_wait(&pcow->outgoing->frozen);
    }
    pending_estimate(opaque, must_precopy, can_postcopy);
}

/* With the BQL; the guest has stopped, and so have block requests. */
static int save_complete(QEMUFile *f, void *opaque)
{
    HostMemPcow *pcow = opaque;
    Outgoing *out = pcow->outgoing;
    Error *err = g_steal_pointer(&out->error);
    int ret = 0;

    if (err || !hostmem_pcow_check_no_stores(&err)) {
        migration_file_set_error(-EIO, err);
        return -EIO;
    }
    if (has_begun(out)) {
        ret = send_some(f, pcow, true);
    }
    if (ret == 0) {
        begin_difference(out, out->newer.image, pcow->image);
        ret = send_some(f, pcow, true);
    }
    if (ret == 0) {
        hostmem_pcow_put_record(f, 0, HOSTMEM_PCOW_FINISH);
    }
    return ret;
}

static const SaveVMHandlers handlers = {
    .is_active = is_active,
    .save_setup = save_setup,
    .save_live_iterate = save_iterate,
    .state_pending_estimate = pending_estimate,
    .state_pending_exact = pending_exact,
    .save_live_complete_precopy = save_complete,
    .load_state = hostmem_pcow_incoming_load,
};

/* ---- with the backend ---------------------------------------------------- */

void hostmem_pcow_migration_register(HostMemPcow *pcow)
{
    g_autofree char *name = g_strdup_printf("pcow-image/%s", pcow->id);

    if (!pcow->readonly) {
        delete_remains(pcow);
    }
    hostmem_pcow_incoming_register(pcow);
    migration_add_notifier(&pcow->migration, migration_event);
    register_savevm_live(name, 0, HOSTMEM_PCOW_STREAM_VERSION, &handlers, pcow);
}

void hostmem_pcow_migration_unregister(HostMemPcow *pcow)
{
    g_autofree char *name = g_strdup_printf("pcow-image/%s", pcow->id);

    unregister_savevm(NULL, name, pcow);
    migration_remove_notifier(&pcow->migration);
    hostmem_pcow_incoming_unregister(pcow);
    end(pcow);
}
