/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Accesses to a pcow image that have to be prepared or served by QEMU: those
 * of the host kernel, and those of a vCPU that must not wait for space.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include <ucontext.h>
#include "block/thread-pool.h"
#include "qapi/error.h"
#include "qemu/rcu.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "system/hostmem-pcow.h"

unsigned hostmem_pcow_kvm_stores;

bool hostmem_pcow_check_no_stores(Error **errp)
{
    if (qatomic_read(&hostmem_pcow_kvm_stores)) {
        error_setg(errp, "a vCPU has a store to do that waits for space in the "
                   "pool of a pcow image, and no VM state would have it: make "
                   "room, and try again");
        return false;
    }
    return true;
}

static int tell_full(HostMemPcow *pcow, uint64_t offset, int ret, bool report)
{
    if (ret == -ENOSPC && report) {
        /* nobody waits, so libpcow does not speak of it */
        hostmem_pcow_send_error(pcow, offset, strerror(ENOSPC));
    }
    return ret;
}

int hostmem_pcow_resolve(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                         bool is_write, bool report)
{
    return tell_full(pcow, offset, pcow_map_resolve(pcow->map, offset, length,
                                                    is_write, NULL), report);
}

int hostmem_pcow_prepare_own_store(HostMemPcow *pcow, uint64_t offset,
                                   uint64_t length, bool report)
{
    return tell_full(pcow, offset, pcow_map_prepare(pcow->map, offset, length,
                                                    true, NULL), report);
}

/*
 * Of a buffer that a device has mapped.  The guest decides how large it is, and
 * how many there are, and the main loop, with the BQL, prepares them.
 *
 * A store of the device by the pointer traps where nothing is prepared: this
 * only saves traps.  Where it is the kernel that stores, that is a request of
 * the block layer, which comes to hostmem_pcow_prepare_buffer().
 */
#define MOST_FOR_STORES (64 * KiB)
#define STORES_INTERVAL_NS (100 * SCALE_MS)
#define STORES_BUDGET_NS (5 * SCALE_MS)
/*
 * Loads of the kernel fail where nothing is mapped.  But for block requests,
 * and what comes to hostmem_pcow_prepare_some_load_at(), they are frames of a
 * network, which are shorter.
 */
#define MOST_FOR_LOADS MiB

/* What this thread has spent on preparing for stores, since when */
static __thread int64_t stores_since, stores_spent;

static void prepare_mapped_stores(HostMemPcow *pcow, uint64_t offset,
                                  uint64_t length)
{
    int64_t now = get_clock();

    if (now - stores_since >= STORES_INTERVAL_NS) {
        stores_since = now;
        stores_spent = 0;
    }
    if (stores_spent < STORES_BUDGET_NS) {
        hostmem_pcow_resolve(pcow, offset, MIN(length, MOST_FOR_STORES), true,
                             false);
        stores_spent += get_clock() - now;
    }
}

void hostmem_pcow_prepare_mapped(HostMemPcow *pcow, uint64_t offset,
                                 uint64_t length, bool is_write)
{
    if (is_write) {
        prepare_mapped_stores(pcow, offset, length);
    } else {
        hostmem_pcow_resolve(pcow, offset, MIN(length, MOST_FOR_LOADS), false,
                             false);
    }
}

static __thread bool is_for_nobody;

void hostmem_pcow_map_for_nobody(bool begins)
{
    is_for_nobody = begins;
}

bool hostmem_pcow_is_for_nobody(void)
{
    return is_for_nobody;
}

int hostmem_pcow_prepare_store_at(void *host, uint64_t length)
{
    HostMemPcow *pcow;
    uint64_t offset;

    RCU_READ_LOCK_GUARD();
    pcow = hostmem_pcow_find(host, &offset);
    return pcow ? hostmem_pcow_prepare_own_store(pcow, offset, length, true) : 0;
}

void hostmem_pcow_prepare_load_at(void *host, uint64_t length)
{
    HostMemPcow *pcow;
    uint64_t offset;

    RCU_READ_LOCK_GUARD();
    pcow = hostmem_pcow_find(host, &offset);
    if (pcow) {
        hostmem_pcow_resolve(pcow, offset, length, false, true);
    }
}

uint64_t hostmem_pcow_prepare_some_load_at(const void *host, uint64_t length)
{
    HostMemPcow *pcow;
    uint64_t offset;

    RCU_READ_LOCK_GUARD();
    pcow = hostmem_pcow_find(host, &offset);
    if (pcow) {
        length = MIN(length, MOST_FOR_LOADS);
        hostmem_pcow_resolve(pcow, offset, length, false, true);
    }
    return length;
}

/*
 * Calls @serve for what lies in an image, until that does not return 0.  Nearly
 * every buffer lies in none.
 */
static int coroutine_mixed_fn
foreach_part(QEMUIOVector *qiov, size_t offset, size_t bytes,
             int (*serve)(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                          void *opaque),
             void *opaque)
{
    for (int i = 0; i < qiov->niov && bytes; i++) {
        size_t length = qiov->iov[i].iov_len;
        HostMemPcow *pcow;
        uint64_t at;
        int ret;

        if (offset >= length) {
            offset -= length;
            continue;
        }
        length = MIN(length - offset, bytes);
        pcow = hostmem_pcow_find(qiov->iov[i].iov_base + offset, &at);
        if (pcow) {
            ret = serve(pcow, at, length, opaque);
            if (ret) {
                return ret;
            }
        }
        bytes -= length;
        offset = 0;
    }
    return 0;
}

/*
 * Of all images: begun is never less than ended, and they are the same while no
 * watch is about to begin.
 */
static unsigned watches_begun, watches_ended;

int hostmem_pcow_watch(HostMemPcow *pcow, struct pcow_error *error)
{
    int ret;

    qatomic_inc(&watches_begun);
    ret = pcow_map_watch(pcow->map, error);
    qatomic_inc(&watches_ended);
    return ret;
}

/*
 * So long a request keeps its thread, which may be the main loop, from all
 * others.  What then is not prepared yet, a worker prepares.
 */
#define REQUEST_BUDGET_NS (5 * SCALE_MS)

typedef struct Preparation {
    HostMemPcow *pcow;
    uint64_t offset, length;    /* to be done */
    bool is_write;
    int64_t begun, budget;
} Preparation;

/* 1: the budget is spent */
static int prepare_pieces(Preparation *p)
{
    while (p->length) {
        uint64_t piece = MIN(p->length,
                             PCOW_SLAB_SIZE - p->offset % PCOW_SLAB_SIZE);
        int ret;

        if (get_clock() - p->begun > p->budget) {
            return 1;
        }
        ret = hostmem_pcow_resolve(p->pcow, p->offset, piece, p->is_write,
                                   true);
        if (ret < 0) {
            return ret;
        }
        p->offset += piece;
        p->length -= piece;
    }
    return 0;
}

static int prepare_worker(void *opaque)
{
    return prepare_pieces(opaque);
}

static int coroutine_fn prepare_part(HostMemPcow *pcow, uint64_t offset,
                                     uint64_t length, void *opaque)
{
    Preparation *p = opaque;
    int ret;

    p->pcow = pcow;
    p->offset = offset;
    p->length = length;
    ret = prepare_pieces(p);
    if (ret > 0) {
        p->budget = INT64_MAX;
        ret = thread_pool_submit_co(prepare_worker, p);
        p->budget = REQUEST_BUDGET_NS;
        p->begun = get_clock();
    }
    return ret;
}

/*
 * The block layer is about to submit a request.  address_space_map() resolved
 * some of the buffer, but since then a snapshot may have write-protected it
 * again: the request may have waited in a drained queue, or be the retry of one
 * that failed.  From here on draining waits for it, and so does who holds the
 * guest, also while a worker prepares it.
 */
int coroutine_fn hostmem_pcow_co_prepare_buffer(QEMUIOVector *qiov,
                                                size_t offset, size_t bytes,
                                                bool is_write)
{
    unsigned ended = qatomic_read(&watches_ended);
    Preparation p = {
        .is_write = is_write,
        .begun = get_clock(),
        .budget = REQUEST_BUDGET_NS,
    };
    int ret = foreach_part(qiov, offset, bytes, prepare_part, &p);

    return ret < 0 ? ret : ended & INT_MAX;
}

/* One of them is enough: if others are not ready yet, we shall be back. */
static int settle_part(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                       void *opaque)
{
    pcow_map_settle(pcow->map, offset, length);
    return 1;
}

/* What a request loads from */
struct part {
    bool any, shown, lost;
};

static int show_holes(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                      void *opaque)
{
    struct part *part = opaque;
    int ret = pcow_map_show_holes(pcow->map, offset, length);

    part->any = true;
    part->shown |= ret > 0;
    part->lost |= ret < 0;
    return part->lost;
}

/* Of requests that find all that they load from, and fail all the same */
#define MOST_TRIES 100
/* If the error may be that of a disk */
#define FEW_TRIES 3

bool hostmem_pcow_may_retry(QEMUIOVector *qiov, size_t offset, size_t bytes,
                            int ended, int error, unsigned tries)
{
    struct part part = { };

    if ((qatomic_read(&watches_begun) & INT_MAX) != ended) {
        return foreach_part(qiov, offset, bytes, settle_part, NULL);
    }
    if (tries >= MOST_TRIES) {
        return false;
    }
    /*
     * It was a hole in a full pool, which shows zeros now; behind the first
     * page the kernel may have called that a short write, and QEMU an error of
     * its own.  Or it had been one, until another access met it, or space came.
     */
    foreach_part(qiov, offset, bytes, show_holes, &part);
    return part.any && !part.lost &&
           (part.shown || error == -EFAULT ||
            (error == -ENOSPC && tries < FEW_TRIES));
}

/* The image for whose space this thread waits */
static __thread HostMemPcow *waits_for;

/*
 * A vCPU comes here every few milliseconds while it waits.  When it stops
 * waiting, nobody may hear of it: another vCPU's trap may have brought its page
 * in, or the guest went elsewhere.  So it is the silence that ends the wait,
 * see hostmem_pcow_handle_silence().
 */
static void note_full(HostMemPcow *pcow, uint64_t offset)
{
    qatomic_set(&pcow->full_at, get_clock());
    if (waits_for != pcow) {
        waits_for = pcow;
        qatomic_inc(&pcow->full_waits);
    }
    if (!qatomic_read(&pcow->waiting) && !qatomic_xchg(&pcow->waiting, true)) {
        qatomic_set(&pcow->full_offset, offset);
        event_notifier_set(&pcow->became_full);
    }
}

typedef int ServePage(pcow_map *map, uint64_t offset, bool is_write);

static int resolve_page(pcow_map *map, uint64_t offset, bool is_write)
{
    return pcow_map_resolve(map, offset, 1, is_write, NULL);
}

static int prepare_page(pcow_map *map, uint64_t offset, bool is_write)
{
    return pcow_map_prepare(map, offset, 1, is_write, NULL);
}

/* *result: the image at @address, or NULL. */
static int serve_access(void *address, bool is_write, ServePage *serve,
                        HostMemPcow **result)
{
    uint64_t offset;
    HostMemPcow *pcow = hostmem_pcow_find(address, &offset);
    int ret;

    *result = pcow;
    if (!pcow) {
        return -EFAULT;
    }
    ret = serve(pcow->map, offset, is_write);
    if (ret == 0) {
        waits_for = NULL;
    } else if (ret == -ENOSPC && pcow->full == HOST_MEM_PCOW_FULL_WAIT) {
        note_full(pcow, offset);
    }
    return ret;
}

bool hostmem_pcow_fails_when_full(const void *address)
{
    uint64_t offset;
    HostMemPcow *pcow = hostmem_pcow_find(address, &offset);

    return pcow && pcow->full == HOST_MEM_PCOW_FULL_FAIL;
}

int hostmem_pcow_trap(void *address, bool is_write)
{
    HostMemPcow *pcow;
    int ret = serve_access(address, is_write, pcow_map_trap, &pcow);

    if (ret == 0) {
        qatomic_inc(is_write ? &pcow->write_traps : &pcow->read_traps);
    }
    return ret;
}

int hostmem_pcow_make_writable(void *address, bool kernel)
{
    HostMemPcow *pcow;
    uint64_t offset;
    int ret;

    /* Most pages are writable already: asked for each store that TCG's TLB has not. */
    if (!kernel) {
        pcow = hostmem_pcow_find(address, &offset);
        if (pcow && pcow_map_can_store(pcow->map, offset)) {
            waits_for = NULL;
            return 0;
        }
    }
    ret = serve_access(address, true, kernel ? resolve_page : prepare_page,
                       &pcow);
    if (ret == 0) {
        struct pcow_map_stats stats;
        uint64_t pages;

        /* A trap it is if one became so. */
        pcow_map_get_stats(pcow->map, &stats);
        pages = stats.pages_copied + stats.pages_zeroed;
        if (qatomic_xchg(&pcow->pages, pages) != pages) {
            qatomic_inc(&pcow->write_traps);
        }
    }
    return ret;
}

/*
 * One load that may fail.  If it gets SIGBUS, the handler lets it continue at
 * the second label.
 */
extern const char hostmem_pcow_trial_load[], hostmem_pcow_trial_failed[];

bool __attribute__((noinline, noclone)) hostmem_pcow_can_load(const void *host)
{
    bool ok;

    asm volatile(".globl hostmem_pcow_trial_load\n"
                 ".globl hostmem_pcow_trial_failed\n"
                 "    movb $1, %0\n"
                 "hostmem_pcow_trial_load:\n"
                 "    testb $0, (%1)\n"
                 "    jmp 1f\n"
                 "hostmem_pcow_trial_failed:\n"
                 "    movb $0, %0\n"
                 "1:\n"
                 : "=&q"(ok) : "r"(host) : "memory", "cc");
    return ok;
}

bool hostmem_pcow_skip_trial(void *context)
{
    greg_t *pc = &((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];

    if (*pc != (greg_t)hostmem_pcow_trial_load) {
        return false;
    }
    *pc = (greg_t)hostmem_pcow_trial_failed;
    return true;
}

bool hostmem_pcow_readable(HostMemPcow *pcow, uint64_t offset, uint64_t length,
                           bool report)
{
    uint8_t *host = pcow_map_address(pcow->map);

    for (uint64_t at = offset & -PCOW_PAGE_SIZE; at < offset + length;
         at += PCOW_PAGE_SIZE) {
        if (!hostmem_pcow_can_load(host + at)) {
            if (report) {
                hostmem_pcow_send_error(pcow, at, strerror(EIO));
            }
            return false;
        }
    }
    return true;
}
