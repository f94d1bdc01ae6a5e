/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef PCOW_TEST_CRASH_MAPPED_H
#define PCOW_TEST_CRASH_MAPPED_H

struct crash;

void scenario_first_touch_mapped(struct crash *c);
void scenario_mirror_follows(struct crash *c);
void scenario_copy_on_write_mapped(struct crash *c);
void scenario_create_mapped(struct crash *c);
void scenario_create_in_steps(struct crash *c);
void scenario_abandon(struct crash *c);
void scenario_revert_mapped(struct crash *c);
void scenario_delete_while_copying(struct crash *c);
void scenario_reuse_mapped(struct crash *c);
void scenario_leave_mapped(struct crash *c);
void scenario_prepared(struct crash *c);
void scenario_last_snapshot(struct crash *c);

#endif
