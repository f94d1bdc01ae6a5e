/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Making what the guest has stored in images durable: when somebody asks for
 * it, and what belongs to a snapshot.
 *
 * A snapshot that is told of as taken is on the medium.  One of a single image
 * flushes while the guest runs, before and after the moment in which it is
 * taken (snapshot.c).  With one of the whole VM the guest stands until the
 * disks have it, so most of what is dirty is written before.  In class pmem
 * taking it leaves lines in the caches of the CPUs, as the guest flushes what it
 * means to keep; nobody does that for guest RAM.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "block/aio-wait.h"
#include "block/thread-pool.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/timer.h"
#include "system/hostmem-pcow.h"

/* Flushes before a snapshot: what one of them takes so long is little. */
#define LITTLE_NS (10 * SCALE_MS)
#define MOST_ROUNDS 4

static int flush_map(HostMemPcow *pcow, Error **errp)
{
    struct pcow_error error;
    int ret = pcow_map_flush(pcow->map, 0, pcow_size(pcow->image), &error);

    if (ret < 0) {
        error_setg(errp, "%s", error.message);
    }
    return ret;
}

/*
 * The kernel tells one flush that data was lost, and the library one: the next
 * is another matter.  If it was not the guest's, his next one has to say it.
 */
int hostmem_pcow_flush(HostMemPcow *pcow, Error **errp)
{
    int ret = flush_map(pcow, errp);

    if (ret < 0) {
        qatomic_set(&pcow->untold_to_guest, true);
    }
    return ret;
}

void hostmem_pcow_begin_flush(HostMemPcow *pcow)
{
    qatomic_inc(&pcow->flushes);
}

static void end_flush(HostMemPcow *pcow)
{
    qatomic_dec(&pcow->flushes);
    aio_wait_kick();
}

int hostmem_pcow_end_flush(HostMemPcow *pcow, Error **errp)
{
    int ret = flush_map(pcow, errp);

    if (qatomic_xchg(&pcow->untold_to_guest, false) && ret == 0) {
        error_setg(errp, "what was stored to pcow image '%s' could not be "
                   "written when it was flushed last",
                   pcow_path(pcow->image));
        ret = -EIO;
    }
    end_flush(pcow);
    return ret;
}

/* By polling, as a thread for the job may still have to be made. */
void hostmem_pcow_await_flushes(HostMemPcow *pcow)
{
    AIO_WAIT_WHILE(NULL, qatomic_read(&pcow->flushes) > 0);
}

typedef struct FlushArgs {
    HostMemPcow *pcow;
    Error *err;
} FlushArgs;

static int flush_worker(void *opaque)
{
    FlushArgs *args = opaque;
    int ret = hostmem_pcow_flush(args->pcow, &args->err);

    end_flush(args->pcow);
    return ret;
}

int coroutine_fn hostmem_pcow_co_flush(HostMemPcow *pcow, Error **errp)
{
    FlushArgs args = { .pcow = pcow };
    int ret;

    object_ref(OBJECT(pcow->backend));
    hostmem_pcow_begin_flush(pcow);
    ret = thread_pool_submit_co(flush_worker, &args);
    error_propagate(errp, args.err);
    object_unref(OBJECT(pcow->backend));
    return ret;
}

void coroutine_fn qmp_pcow_flush(const char *id, Error **errp)
{
    HostMemPcow *pcow = hostmem_pcow_by_id(id, errp);

    if (pcow) {
        hostmem_pcow_co_flush(pcow, errp);
    }
}

static void coroutine_mixed_fn
flush_ahead(HostMemPcow *pcow, int (*flush)(HostMemPcow *pcow, Error **errp))
{
    for (unsigned round = 0; !pcow->readonly && round < MOST_ROUNDS; round++) {
        int64_t start = get_clock();

        if (flush(pcow, NULL) < 0) {
            qatomic_set(&pcow->untold_to_snapshot, true);
            return;
        }
        if (get_clock() - start < LITTLE_NS) {
            return;
        }
    }
}

static bool add(HostMemPcow *pcow, void *opaque, Error **errp)
{
    g_ptr_array_add(opaque, pcow);
    object_ref(OBJECT(pcow->backend));
    return true;
}

static void coroutine_mixed_fn
all_flush_ahead(int (*flush)(HostMemPcow *pcow, Error **errp))
{
    g_autoptr(GPtrArray) images = g_ptr_array_new();

    hostmem_pcow_foreach(add, images, NULL);
    for (guint i = 0; i < images->len; i++) {
        HostMemPcow *pcow = g_ptr_array_index(images, i);

        flush_ahead(pcow, flush);
        object_unref(OBJECT(pcow->backend));
    }
}

void coroutine_fn hostmem_pcow_co_all_flush_ahead(void)
{
    all_flush_ahead(hostmem_pcow_co_flush);
}

static int flush_unlocked(HostMemPcow *pcow, Error **errp)
{
    int ret;

    hostmem_pcow_begin_flush(pcow);
    bql_unlock();
    ret = hostmem_pcow_flush(pcow, errp);
    bql_lock();
    end_flush(pcow);
    return ret;
}

void hostmem_pcow_all_flush_ahead(void)
{
    all_flush_ahead(flush_unlocked);
}

static bool check_told(HostMemPcow *pcow, void *opaque, Error **errp)
{
    if (qatomic_xchg(&pcow->untold_to_snapshot, false)) {
        error_setg(errp, "what the guest had stored to pcow image '%s' before "
                   "the snapshot could not be written", pcow_path(pcow->image));
        return false;
    }
    return true;
}

bool hostmem_pcow_all_flushed_ahead(Error **errp)
{
    return hostmem_pcow_foreach(check_told, NULL, errp);
}
