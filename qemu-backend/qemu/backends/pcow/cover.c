/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * An access of QEMU itself, by a pointer, to a page of an image that cannot be
 * served, where there is no way back: memory of our own is put over the page
 * for a moment, and the VM is stopped.
 *
 * A guest decides how many pages that are: a buffer of a device is as large as
 * it likes, and its pool is full when another tenant wants it to be.  So no
 * more than MAX_COVERED are covered; who needs another one uncovers those
 * before, which at most costs somebody who is at one of them another signal.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/virtio/vhost.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/thread.h"
#include "system/hostmem-pcow.h"
#include "system/runstate.h"
#include "report.h"

#define PAGE ((uintptr_t)PCOW_PAGE_SIZE)
#define MAX_COVERED 64

typedef struct Covered {
    HostMemPcow *pcow;
    uint64_t offset;
} Covered;

/* Of the process, as is the handler of SIGBUS */
static struct {
    Covered page[MAX_COVERED];
    unsigned count;
    bool failed;                /* to uncover one */
    bool lost;                  /* the kernel has lost one */
    bool unmarked;              /* ... and may show something else there */
} covers;

/* False: there is no room. */
static bool add(const Covered *page)
{
    sigset_t before;
    bool added;

    hostmem_pcow_lock_reports(&before);
    added = covers.count < MAX_COVERED;
    if (added) {
        covers.page[covers.count++] = *page;
    }
    hostmem_pcow_unlock_reports(&before);
    return added;
}

static bool pop(Covered *page)
{
    sigset_t before;
    bool popped;

    hostmem_pcow_lock_reports(&before);
    popped = covers.count > 0;
    if (popped) {
        *page = covers.page[--covers.count];
    }
    hostmem_pcow_unlock_reports(&before);
    return popped;
}

/*
 * All of them.  In the handler, too: who accesses guest memory by a pointer
 * holds none of the locks that this takes.
 */
static void uncover(void)
{
    Covered page, last = { NULL };

    hostmem_pcow_lock_images();
    while (pop(&page)) {
        /* A slab is mapped anew as a whole. */
        if (page.pcow == last.pcow &&
            page.offset / PCOW_SLAB_SIZE == last.offset / PCOW_SLAB_SIZE) {
            continue;
        }
        last = page;
        if (pcow_map_restore(page.pcow->map, page.offset & -PAGE, PAGE,
                             NULL) < 0) {
            qatomic_set(&covers.failed, true);
        }
    }
    hostmem_pcow_unlock_images();
}

/* A page that only could not be copied goes on to read what it holds. */
static bool put_over(void *page, int error)
{
    void *instead = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (instead == MAP_FAILED) {
        return false;
    }
    if (error == -ENOSPC && hostmem_pcow_can_load(page)) {
        memcpy(instead, page, PAGE);
    }
    if (mremap(instead, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) ==
        MAP_FAILED) {
        munmap(instead, PAGE);
        return false;
    }
    return true;
}

bool hostmem_pcow_cover_page(HostMemPcow *pcow, uint64_t offset, void *address,
                             int error)
{
    HostMemPcowLost *lost = &pcow->lost[error == -ENOSPC];
    void *page = (void *)((uintptr_t)address & -PAGE);
    Covered covered = { pcow, offset };

    if (error == -EHWPOISON) {
        /* before it can be uncovered: the kernel may forget it */
        if (hostmem_pcow_mark_lost(pcow, offset, NULL) < 0) {
            qatomic_set(&covers.unmarked, true);
        }
        qatomic_set(&covers.lost, true);
    }
    if (qatomic_read(&covers.count) >= MAX_COVERED) {
        uncover();              /* now, as it may uncover what lies beside */
    }
    if (!put_over(page, error)) {
        /* perhaps for want of mappings, of which the others have some */
        uncover();
        if (!put_over(page, error)) {
            return false;
        }
    }
    while (!add(&covered)) {
        uncover();
    }
    qatomic_set(&lost->offset, offset);
    qatomic_set(&lost->error, error);
    qatomic_inc(&lost->count);
    hostmem_pcow_wake();
    return true;
}

static bool tell_lost(HostMemPcow *pcow, void *opaque, Error **errp)
{
    bool *any = opaque;

    for (unsigned i = 0; i < ARRAY_SIZE(pcow->lost); i++) {
        HostMemPcowLost *lost = &pcow->lost[i];
        unsigned count = qatomic_xchg(&lost->count, 0);

        if (count) {
            *any = true;
            hostmem_pcow_tell_errors(
                pcow, qatomic_read(&lost->offset), qatomic_read(&lost->error),
                count, qatomic_read(&lost->error) == -ENOSPC ?
                "the VM is stopped, as the store of a device is lost, and "
                "what vCPUs stored to the page since" :
                "the VM is stopped, as a device saw zeros instead");
        }
    }
    return true;
}

void hostmem_pcow_serve_covers(void)
{
    bool any = false;

    hostmem_pcow_foreach(tell_lost, &any, NULL);
    if (any) {
        vm_stop(RUN_STATE_IO_ERROR);
    }
    uncover();
    if (qatomic_xchg(&covers.lost, false)) {
        vhost_forget_memory();
    }
    if (qatomic_xchg(&covers.unmarked, false)) {
        error_report("more memory of a pcow image is lost than can be noted: "
                     "end the VM, or it may see something else there");
    }
    if (qatomic_xchg(&covers.failed, false)) {
        error_report("memory of a pcow image that could not be accessed "
                     "cannot be mapped again, and is mapped when the guest "
                     "accesses it");
    }
}

void hostmem_pcow_forget_covers(const HostMemPcow *pcow)
{
    unsigned kept = 0;
    sigset_t before;

    hostmem_pcow_lock_reports(&before);
    for (unsigned i = 0; i < covers.count; i++) {
        if (covers.page[i].pcow != pcow) {
            covers.page[kept++] = covers.page[i];
        }
    }
    covers.count = kept;
    hostmem_pcow_unlock_reports(&before);
}
