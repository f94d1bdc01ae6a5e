/* SPDX-License-Identifier: BSD-3-Clause */
/* Scenarios in which a guest stores to its mapped memory. */
#include "crash_mapped.h"

#include "chain/chain.h"
#include "crash_steps.h"
#include "chain/reclaim.h"

void scenario_first_touch_mapped(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 10);
    step_guest_store(c, 520);
    step_guest_flush(c, 10);
    step_guest_store(c, 11);
    step_guest_store(c, 40);
    step_guest_flush(c, 520);
    step_guest_flush(c, 40);
    step_guest_store(c, 40);
    step_unmap(c);
}

/* Words become valid, and stale once more, beside stores that are flushed and others. */
void scenario_mirror_follows(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 4);
    step_guest_store(c, 640);
    step_guest_flush(c, 4);
    step_follow(c);
    step_guest_store(c, 40);
    step_guest_flush(c, 40);
    step_follow(c);
    step_snapshot(c, "followed");
    step_guest_store(c, 40);
    step_follow(c);
    step_guest_store(c, 601);
    step_unmap(c);
}

void scenario_copy_on_write_mapped(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 4);
    step_guest_store(c, 5);
    step_guest_flush(c, 4);
    step_guest_store(c, 601);
    step_guest_store(c, 640);
    step_guest_flush(c, 601);
    step_guest_store(c, 4);
    step_unmap(c);
}

void scenario_create_mapped(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 4);
    step_guest_store(c, 90);
    step_guest_flush(c, 4);
    step_guest_flush(c, 90);
    step_snapshot(c, "a");
    step_guest_store(c, 4);
    step_guest_flush(c, 4);
    step_snapshot(c, "b");
    step_guest_store(c, 90);
    step_unmap(c);
}

/* The guest stores between the steps. */
void scenario_create_in_steps(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 4);
    step_prepare(c, "a");
    step_guest_store(c, 90);
    step_guest_flush(c, 90);
    step_guest_store(c, 5);
    step_freeze(c, "a");
    step_guest_store(c, 4);
    step_guest_flush(c, 4);
    step_guest_store(c, 91);
    step_finish(c);
    step_guest_store(c, 5);
    step_prepare(c, "b");
    step_freeze(c, "b");
    step_guest_store(c, 520);
    step_guest_flush(c, 520);
    step_finish(c);
    step_guest_store(c, 521);
    step_unmap(c);
}

void scenario_abandon(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 4);
    step_prepare(c, "a");
    step_abandon(c);
    step_prepare(c, "b");
    step_guest_store(c, 90);
    step_freeze(c, "b");
    step_guest_store(c, 4);
    step_guest_flush(c, 4);
    step_guest_store(c, 5);
    step_abandon(c);
    step_guest_flush(c, 5);
    step_guest_store(c, 600);
    step_unmap(c);
}

void scenario_revert_mapped(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 4);
    step_revert(c, "s2");
    step_guest_store(c, 4);
    step_guest_store(c, 50);
    step_guest_flush(c, 4);
    step_revert(c, "s1");
    step_guest_store(c, 50);
    step_guest_flush(c, 50);
    step_unmap(c);
}

struct copier {
    struct crash *crash;
    const unsigned *page;                      /* that come next; 0: no more */
};

static void *copy_page(void *opaque)
{
    const struct copier *copier = opaque;

    MUST(pcow_map_resolve(copier->crash->map, *copier->page * UINT64_C(4096), 4096, true, &error));
    /*
     * As if the pool were full: what the deletion has dropped so far is punched out, whether or not
     * that is on the medium.
     */
    reclaim(copier->crash->image, 0);
    return NULL;
}

/*
 * Another thread of the guest stores to the next page, as far as copying it and making room: that
 * changes nothing which can be read.
 */
static void copy_meanwhile(void *opaque)
{
    struct copier *copier = opaque;
    pthread_t thread;

    /* Who holds the slab would wait for us. */
    if (!*copier->page || copier->crash->image->chain->claim[*copier->page / PAGES_PER_SLAB])
        return;
    assert_int_equal(pthread_create(&thread, NULL, copy_page, copier), 0);
    pthread_join(thread, NULL);
    copier->page++;
}

static void delete_while_copying(struct crash *c, const char *name, const unsigned *pages)
{
    struct copier copier = {c, pages};

    pthread_mutex_lock(&c->recorder.lock);
    c->recorder.opaque = &copier;
    c->recorder.thread = pthread_self();
    c->recorder.meanwhile = copy_meanwhile;
    pthread_mutex_unlock(&c->recorder.lock);
    step_delete(c, name);
    pthread_mutex_lock(&c->recorder.lock);
    c->recorder.meanwhile = NULL;
    pthread_mutex_unlock(&c->recorder.lock);
}

/* The pages that the guest copies are those of the layer that goes. */
void scenario_delete_while_copying(struct crash *c)
{
    static const unsigned of_second[] = {5, 700, 6, 702, 0},
                          of_first[] = {3, 600, 4, 604, 608, 612, 0};

    step_map(c);
    delete_while_copying(c, "s2", of_second);
    step_guest_store(c, 701);
    delete_while_copying(c, "s1", of_first);
    step_guest_flush(c, 701);
    step_unmap(c);
}

/* One page of a cluster is stored to: the others come up as zeros. */
void scenario_reuse_mapped(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 5);
    step_guest_store(c, 530);
    step_guest_flush(c, 5);
    step_guest_flush(c, 530);
    step_snapshot(c, "a");
    step_guest_store(c, 100);
    step_guest_flush(c, 100);
    step_revert(c, "a");
    step_guest_store(c, 200);
    step_guest_flush(c, 200);
    step_unmap(c);
}

/* The same beneath a guest, where the thread of the map does it, while the guest goes on. */
void scenario_leave_mapped(struct crash *c)
{
    step_map(c);
    step_guest_store(c, 300);
    step_guest_flush(c, 300);
    step_revert(c, "s2");
    step_guest_store(c, 800);
    step_guest_flush(c, 800);
    step_delete(c, "s1");
    step_guest_store(c, 3);
    step_guest_flush(c, 3);
    step_delete(c, "s2");
    step_guest_store(c, 900);
    step_unmap(c);
}

void scenario_prepared(struct crash *c)
{
    step_map_prepared(c);
    step_guest_store(c, 5);
    step_guest_store(c, 530);
    step_guest_flush(c, 5);
    step_guest_flush(c, 530);
    step_snapshot(c, "a");
    step_guest_store(c, 100);
    step_guest_store(c, 5);
    step_guest_flush(c, 100);
    step_revert(c, "a");
    step_guest_store(c, 200);
    step_guest_flush(c, 200);
    step_unmap(c);
}

/* Slabs that were kept for its state, which were in use before, and others take again. */
void scenario_last_snapshot(struct crash *c)
{
    step_map(c);
    step_keep_spare(c, true);
    step_guest_store(c, 5);
    step_snapshot(c, "a");
    step_last_vm_state(c, "a", 2 * MIB + 8 * KIB);
    step_guest_store(c, 530);
    step_guest_flush(c, 530);
    step_keep_spare(c, false);
    step_guest_store(c, 100);
    step_guest_flush(c, 100);
    step_delete(c, "a");
    step_unmap(c);
}
