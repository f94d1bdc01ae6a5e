/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Changes of an image that wait for its medium.
 *
 * Deleting a snapshot, or giving it another name, syncs several times, and in
 * class page-cache a sync writes all that the guest has stored since the last
 * one.  With the BQL held it would stand for that.  So they are made in a
 * worker thread, or at least without the BQL.
 *
 * The library takes one such call at a time for an image, beside stores and
 * flushes.  Whoever else has something to do with its snapshots waits until the
 * change is over, at the beginning of what he does: in a coroutine, while the
 * guest and the main loop go on, else by polling.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "block/aio-wait.h"
#include "block/thread-pool.h"
#include "qapi/error.h"
#include "qemu/coroutine.h"
#include "qemu/main-loop.h"
#include "system/hostmem-pcow.h"

/* Coroutines of the main loop */
static CoQueue waiting;

static void __attribute__((constructor)) init(void)
{
    qemu_co_queue_init(&waiting);
}

static bool is_at_rest(HostMemPcow *pcow, void *opaque, Error **errp)
{
    return !pcow->changing && !pcow->migration_ends;
}

bool hostmem_pcow_at_rest(void)
{
    return hostmem_pcow_foreach(is_at_rest, NULL, NULL);
}

void coroutine_mixed_fn hostmem_pcow_await_changes(void)
{
    if (!qemu_in_coroutine()) {
        AIO_WAIT_WHILE(NULL, !hostmem_pcow_at_rest());
        return;
    }
    while (!hostmem_pcow_at_rest()) {
        qemu_co_queue_wait(&waiting, NULL);
    }
}

void hostmem_pcow_tell_at_rest(void)
{
    qemu_co_enter_all(&waiting, NULL);
    aio_wait_kick();
}

static void begin_change(HostMemPcow *pcow)
{
    assert(!pcow->changing);
    pcow->changing = true;
    object_ref(OBJECT(pcow->backend));
}

static void end_change(HostMemPcow *pcow)
{
    pcow->changing = false;
    hostmem_pcow_tell_at_rest();
    object_unref(OBJECT(pcow->backend));
}

typedef struct Change {
    HostMemPcow *pcow;
    HostMemPcowFn *fn;
    void *opaque;
    Error *err;
} Change;

static int change_worker(void *opaque)
{
    Change *change = opaque;

    return change->fn(change->pcow, change->opaque, &change->err);
}

bool coroutine_fn hostmem_pcow_co_change(HostMemPcow *pcow, HostMemPcowFn *fn,
                                         void *opaque, Error **errp)
{
    Change change = { pcow, fn, opaque };
    bool ok;

    while (pcow->changing) {
        qemu_co_queue_wait(&waiting, NULL);
    }
    begin_change(pcow);
    ok = thread_pool_submit_co(change_worker, &change);
    end_change(pcow);
    error_propagate(errp, change.err);
    return ok;
}

bool hostmem_pcow_change_unlocked(HostMemPcow *pcow, HostMemPcowFn *fn,
                                  void *opaque, Error **errp)
{
    bool ok;

    /* Another monitor may have begun one while this one polled */
    AIO_WAIT_WHILE(NULL, pcow->changing);
    begin_change(pcow);
    bql_unlock();
    ok = fn(pcow, opaque, errp);
    bql_lock();
    end_change(pcow);
    return ok;
}

bool hostmem_pcow_delete_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    HostMemPcowDeletion *deletion = opaque;
    struct pcow_error error;
    int ret = pcow_snapshot_delete(pcow->image, deletion->name,
                                   &deletion->freed, &error);

    return hostmem_pcow_propagate(ret, &error, errp);
}

bool hostmem_pcow_rename_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    HostMemPcowRenaming *renaming = opaque;
    struct pcow_error error;

    renaming->ret = pcow_snapshot_rename(pcow->image, renaming->name,
                                         renaming->new_name, &error);
    return hostmem_pcow_propagate(renaming->ret, &error, errp);
}

bool hostmem_pcow_prepare_snapshot(HostMemPcow *pcow, void *opaque,
                                   Error **errp)
{
    HostMemPcowMaking *making = opaque;
    struct pcow_error error;
    int ret;

    do {
        ret = pcow_snapshot_prepare(pcow->image, making->name, making->date_sec,
                                    making->date_nsec, &making->token, &error);
        if (!hostmem_pcow_propagate(ret, &error, errp)) {
            return false;
        }
    } while (ret == PCOW_FLUSH_FIRST && hostmem_pcow_flush(pcow, errp) == 0);
    return ret == 0;
}

bool hostmem_pcow_finish_snapshot(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const HostMemPcowMaking *making = opaque;
    struct pcow_error error;
    int ret;

    do {
        ret = pcow_snapshot_finish(pcow->image, making->token, NULL, &error);
        if (!hostmem_pcow_propagate(ret, &error, errp)) {
            return false;
        }
    } while (ret == PCOW_FLUSH_FIRST && hostmem_pcow_flush(pcow, errp) == 0);
    return ret == 0;
}

bool hostmem_pcow_abandon_snapshot(HostMemPcow *pcow, void *opaque,
                                   Error **errp)
{
    const HostMemPcowMaking *making = opaque;
    struct pcow_error error;
    int ret = pcow_snapshot_abandon(pcow->image, making->token, &error);

    return hostmem_pcow_propagate(ret, &error, errp);
}
