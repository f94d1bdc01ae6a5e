/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Making what the guest has stored in images durable: when somebody asks for
 * it, and what belongs to a snapshot.
 *
 * A snapshot that is told of as taken is on the medium.  In class page-cache
 * taking it writes everything that is dirty, so most of that is written before,
 * while the guest runs.  In class pmem taking it leaves lines in the caches of
 * the CPUs, as the guest flushes what it means to keep; nobody does that for
 * guest RAM.  They are flushed after it, as nobody stores to them any more.
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

int hostmem_pcow_flush(HostMemPcow *pcow, Error **errp)
{
    struct pcow_error error;
    int ret = pcow_map_flush(pcow->map, 0, pcow_size(pcow->image), &error);

    if (ret < 0) {
        error_setg(errp, "%s", error.message);
    }
    return ret;
}

void hostmem_pcow_begin_flush(HostMemPcow *pcow)
{
    qatomic_inc(&pcow->flushes);
}

int hostmem_pcow_end_flush(HostMemPcow *pcow, Error **errp)
{
    int ret = hostmem_pcow_flush(pcow, errp);

    qatomic_dec(&pcow->flushes);
    aio_wait_kick();
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

    return hostmem_pcow_end_flush(args->pcow, &args->err);
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

int coroutine_fn hostmem_pcow_co_flush_ahead(HostMemPcow *pcow, Error **errp)
{
    int64_t start;
    int ret;

    if (pcow->readonly) {
        return 0;
    }
    for (unsigned round = 0; round < MOST_ROUNDS; round++) {
        start = get_clock();
        ret = hostmem_pcow_co_flush(pcow, errp);
        if (ret < 0 || get_clock() - start < LITTLE_NS) {
            return ret;
        }
    }
    return 0;
}

static bool add(HostMemPcow *pcow, void *opaque, Error **errp)
{
    g_ptr_array_add(opaque, pcow);
    object_ref(OBJECT(pcow->backend));
    return true;
}

void coroutine_fn hostmem_pcow_co_all_flush_ahead(void)
{
    g_autoptr(GPtrArray) images = g_ptr_array_new();

    hostmem_pcow_foreach(add, images, NULL);
    for (guint i = 0; i < images->len; i++) {
        HostMemPcow *pcow = g_ptr_array_index(images, i);

        /* An error comes again, when it counts */
        hostmem_pcow_co_flush_ahead(pcow, NULL);
        object_unref(OBJECT(pcow->backend));
    }
}

static bool flush(HostMemPcow *pcow, void *opaque, Error **errp)
{
    return pcow->readonly || hostmem_pcow_flush(pcow, errp) == 0;
}

bool hostmem_pcow_all_flush(Error **errp)
{
    return hostmem_pcow_foreach(flush, NULL, errp);
}
