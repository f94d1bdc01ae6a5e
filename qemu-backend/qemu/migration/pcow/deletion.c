/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The deletion of a checkpoint, image by image, in a worker: the guest and the
 * main loop go on.  The snapshots are noted first, as images may go meanwhile.
 * What a crash leaves of it: see the table in migration/pcow/checkpoint.h.
 */
#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "migration/pcow/checkpoint.h"

typedef struct Deletion {
    const char *name;
    HostMemPcow *home;
    struct pcow_snapshot snapshot;
    GPtrArray *images, *names;      /* of the parts, that of the home last */
} Deletion;

static bool check_delete(HostMemPcow *pcow, const struct pcow_snapshot *part,
                         void *opaque, Error **errp)
{
    struct pcow_error error;
    int ret = pcow_snapshot_check_delete(pcow->image, part->name, &error);

    return hostmem_pcow_propagate(ret, &error, errp);
}

static void note(Deletion *deletion, HostMemPcow *pcow, const char *name)
{
    object_ref(OBJECT(pcow->backend));
    g_ptr_array_add(deletion->images, pcow);
    g_ptr_array_add(deletion->names, g_strdup(name));
}

static bool note_part(HostMemPcow *pcow, const struct pcow_snapshot *part,
                      void *opaque, Error **errp)
{
    note(opaque, pcow, part->name);
    return true;
}

static bool begin_deletion(void *opaque, Error **errp)
{
    Deletion *deletion = opaque;
    HostMemPcow *home = deletion->home;
    const struct pcow_snapshot *of = &deletion->snapshot;

    if (!checkpoint_check_alone(errp) || !checkpoint_may_begin(errp)) {
        return false;
    }
    checkpoint_recover(false);
    if (!hostmem_pcow_check_not_loading(NULL, errp) ||
        !checkpoint_find(home, deletion->name, &deletion->snapshot, errp) ||
        !checkpoint_foreach_part(home, of, check_delete, NULL, errp) ||
        !check_delete(home, of, NULL, errp) ||
        !checkpoint_foreach_part(home, of, note_part, deletion, errp)) {
        return false;
    }
    checkpoint_begin();
    return true;
}

/* That of the home is what the others are found by: it goes last. */
static bool coroutine_fn delete_noted(Deletion *deletion, uint64_t *freed,
                                      Error **errp)
{
    for (guint i = 0; i < deletion->images->len; i++) {
        HostMemPcowDeletion part = {
            .name = g_ptr_array_index(deletion->names, i),
        };

        if (!hostmem_pcow_co_change(g_ptr_array_index(deletion->images, i),
                                    hostmem_pcow_delete_snapshot, &part,
                                    errp)) {
            return false;
        }
        *freed += part.freed;
    }
    return true;
}

static bool coroutine_fn delete_marked(Deletion *deletion, uint64_t *freed,
                                       Error **errp)
{
    HostMemPcow *home = deletion->home;
    HostMemPcowRenaming renaming = { .name = deletion->name };
    g_autofree char *mark =
        checkpoint_mark_name(CHECKPOINT_DELETING, home,
                             deletion->snapshot.date_seconds,
                             deletion->snapshot.date_nanoseconds);
    Error *err = NULL;
    bool is_marked;

    /* From here on it is none. */
    renaming.new_name = mark;
    is_marked = hostmem_pcow_co_change(home, hostmem_pcow_rename_snapshot,
                                       &renaming, &err);
    /* Without space for the mark it goes without, as this gives space */
    if (!is_marked && renaming.ret != -ENOSPC) {
        error_propagate(errp, err);
        return false;
    }
    error_free(err);
    note(deletion, home, is_marked ? mark : deletion->name);
    return delete_noted(deletion, freed, errp);
}

PcowCheckpointDeleted *coroutine_fn
qmp_pcow_checkpoint_delete(const char *name, Error **errp)
{
    g_autoptr(GPtrArray) images = g_ptr_array_new();
    g_autoptr(GPtrArray) names = g_ptr_array_new_with_free_func(g_free);
    Deletion deletion = { .name = name, .images = images, .names = names };
    PcowCheckpointDeleted *result = NULL;
    uint64_t freed = 0;

    hostmem_pcow_await_changes();
    deletion.home = checkpoint_home(errp);
    if (!deletion.home) {
        return NULL;
    }
    if (checkpoint_co_call(begin_deletion, &deletion, errp)) {
        if (delete_marked(&deletion, &freed, errp)) {
            result = g_new0(PcowCheckpointDeleted, 1);
            result->freed = freed;
        }
        checkpoint_end();
    }
    for (guint i = 0; i < images->len; i++) {
        HostMemPcow *pcow = g_ptr_array_index(images, i);

        object_unref(OBJECT(pcow->backend));
    }
    return result;
}
