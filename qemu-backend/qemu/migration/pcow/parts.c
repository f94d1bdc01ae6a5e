/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Of what a checkpoint consists, and how it is found: see
 * migration/pcow/checkpoint.h.
 */
#include "qemu/osdep.h"
#include "hw/boards.h"
#include "qapi/qapi-types-migration.h"
#include "migration/options.h"
#include "qapi/error.h"
#include "qemu/notify.h"
#include "qemu/units.h"
#include "qemu/uuid.h"
#include "migration/pcow/checkpoint.h"
#include "system/numa.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"

/* Of RAM that is no image, as video memory: it is copied in the pause. */
#define MOST_OTHER_RAM (64 * MiB)

static HostMemPcow *as_pcow(HostMemoryBackend *backend)
{
    HostMemPcow *pcow;

    if (!backend ||
        !object_dynamic_cast(OBJECT(backend), TYPE_MEMORY_BACKEND_FILE)) {
        return NULL;
    }
    pcow = hostmem_file_get_pcow(OBJECT(backend));
    return pcow->map && !pcow->readonly ? pcow : NULL;
}

HostMemPcow *checkpoint_find_home(void)
{
    MachineState *machine = current_machine;

    if (machine->memdev) {
        return as_pcow(machine->memdev);
    }
    return machine->numa_state && machine->numa_state->num_nodes ?
           as_pcow(machine->numa_state->nodes[0].node_memdev) : NULL;
}

static bool add_up(RAMBlock *block, uint64_t *other, Error **errp)
{
    if (block->pcow || !qemu_ram_is_migratable(block)) {
        return true;
    }
    *other += block->used_length;
    if (*other > MOST_OTHER_RAM) {
        error_setg(errp, "RAM '%s' of the VM is no pcow image, and would be "
                   "copied while the VM stands: use an image for it as well, "
                   "or snapshot-save (virsh snapshot-create)", block->idstr);
        return false;
    }
    return true;
}

HostMemPcow *checkpoint_home(Error **errp)
{
    HostMemPcow *home = checkpoint_find_home();

    if (!home) {
        error_setg(errp, "the RAM of the VM is no pcow image that it may write "
                   "to, so there are no checkpoints of the VM: give it one "
                   "(-machine memory-backend=ID, pcowctl domain-xml --ram)");
    }
    return home;
}

uint64_t checkpoint_other_ram(void)
{
    uint64_t other = 0;
    RAMBlock *block;

    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH(block) {
        if (!add_up(block, &other, NULL)) {
            break;
        }
    }
    return other;
}

bool checkpoint_check_ram(Error **errp)
{
    uint64_t other = 0;
    RAMBlock *block;

    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH(block) {
        if (!add_up(block, &other, errp)) {
            return false;
        }
    }
    return true;
}

/* ---- names --------------------------------------------------------------- */

static const char *const prefixes[] = {
    [CHECKPOINT_TAKING] = ".checkpoint-",
    [CHECKPOINT_DELETING] = ".deleting-",
    [CHECKPOINT_REVERTING] = ".loading-checkpoint-",
};

char *checkpoint_mark_name(CheckpointMark mark, const HostMemPcow *home,
                           int64_t seconds, uint32_t nanoseconds)
{
    g_autofree char *uuid = NULL;
    struct pcow_info info;
    QemuUUID id;

    pcow_get_info(home->image, &info);
    memcpy(id.data, info.uuid, sizeof(id.data));
    uuid = qemu_uuid_unparse_strdup(&id);
    return g_strdup_printf("%s%" PRId64 ".%09" PRIu32 "-%s", prefixes[mark],
                           seconds, nanoseconds, uuid);
}

CheckpointMark checkpoint_parse_mark(const char *name)
{
    CheckpointMark mark = 0;

    while (mark < CHECKPOINT_MARKS && !g_str_has_prefix(name, prefixes[mark])) {
        mark++;
    }
    return mark;
}

bool hostmem_pcow_is_checkpoint_mark(const char *name)
{
    return checkpoint_parse_mark(name) != CHECKPOINT_MARKS;
}

/* ---- parts --------------------------------------------------------------- */

bool checkpoint_find(HostMemPcow *home, const char *name,
                     struct pcow_snapshot *found, Error **errp)
{
    /* A revert that failed has left its mark, and this one is to finish it */
    if (home->loading_mark && !strcmp(name, home->loading_name)) {
        name = home->loading_mark;
    } else if (hostmem_pcow_is_checkpoint_mark(name)) {
        error_setg(errp, "'%s' is a checkpoint that is unfinished", name);
        return false;
    }
    if (!hostmem_pcow_find_snapshot(home->image, name, 0, found, errp)) {
        return false;
    }
    if (!found->id) {
        error_setg(errp, "the VM has no checkpoint '%s': "
                   "query-pcow-checkpoints (pcowctl vm tree) lists them", name);
        return false;
    }
    if (!found->state_size) {
        error_setg(errp, "'%s' is a snapshot of pcow image '%s' alone, or one "
                   "whose state lies on a disk (snapshot-load loads that), and "
                   "no checkpoint of the VM", name, pcow_path(home->image));
        return false;
    }
    return true;
}

bool checkpoint_find_part(HostMemPcow *pcow, const struct pcow_snapshot *home,
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
        if (list[i].date_seconds == home->date_seconds &&
            list[i].date_nanoseconds == home->date_nanoseconds) {
            *found = list[i];
        }
    }
    free(list);
    return true;
}

/* ---- what is under way --------------------------------------------------- */

/*
 * QEMU takes itself apart, the state of migrations with it, while it lets a
 * coroutine go on; or the guest has powered off.
 */
static bool ends;
/* A revert has failed between reset and load. */
static bool half_loaded;

static void note_shutdown(Notifier *notifier, void *data)
{
    if (!ends && *(ShutdownCause *)data == SHUTDOWN_CAUSE_HOST_SIGNAL) {
        checkpoint_take_at_signal();
    }
    ends = true;
}

void checkpoint_init(void)
{
    static Notifier shutdown = { .notify = note_shutdown };

    if (!shutdown.node.le_prev) {
        qemu_register_shutdown_notifier(&shutdown);
    }
}

void checkpoint_note_running(void)
{
    ends = half_loaded = false;
}

void checkpoint_set_half_loaded(bool is_half_loaded)
{
    half_loaded = is_half_loaded;
}

bool checkpoint_is_whole(Error **errp)
{
    if (half_loaded || runstate_check(RUN_STATE_RESTORE_VM)) {
        error_setg(errp, "a revert of the VM has failed halfway: repeat it, or "
                   "let the VM go on as it is (cont, virsh resume)");
        return false;
    }
    return true;
}

bool checkpoint_may_begin(Error **errp)
{
    if (ends) {
        error_setg(errp, "the VM has been shut down");
        return false;
    }
    if (!hostmem_pcow_check_settled(errp)) {
        return false;
    }
    /* Not of a revert: that does not let go before its end, or has failed */
    if (runstate_check(RUN_STATE_SAVE_VM)) {
        error_setg(errp, "a snapshot of the whole VM is being taken: wait "
                   "until that has ended");
        return false;
    }
    return true;
}

bool checkpoint_check_capabilities(Error **errp)
{
    if (migrate_multifd() || migrate_mapped_ram()) {
        error_setg(errp, "the capabilities multifd and mapped-ram are for "
                   "migrations to elsewhere: switch them off for checkpoints "
                   "(migrate-set-capabilities)");
        return false;
    }
    return true;
}
