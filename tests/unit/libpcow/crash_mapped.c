/* SPDX-License-Identifier: BSD-3-Clause */
/* Scenarios in which a guest stores to its mapped memory. */
#include "crash_mapped.h"

#include "crash_steps.h"

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
