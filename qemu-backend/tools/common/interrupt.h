/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * SIGINT, SIGTERM and SIGHUP during long work: noted, so that the work can undo itself, and obeyed
 * afterwards.
 */
#ifndef TOOLS_INTERRUPT_H
#define TOOLS_INTERRUPT_H

#include <signal.h>
#include <stdbool.h>

/* From now on these signals are noted instead of ending the process; system calls return EINTR. */
void interrupt_catch(void);
bool interrupt_pending(void);
/*
 * Keep the signals away from a call that cannot be broken off halfway; *old: what to give back
 * afterwards.
 */
void interrupt_hold(sigset_t *old);
void interrupt_release(const sigset_t *old);
/* End the process by the signal that was noted, if there is one; else return status. */
int interrupt_obey(int status);

#endif
