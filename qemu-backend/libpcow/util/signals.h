/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Who has claimed something must not be interrupted by a signal handler of the program: it may
 * store to a map, and a trap in it would wait for the claim, which its own thread could never give
 * back. So signals are blocked meanwhile, but those that tell of an instruction of the thread; and
 * the thread is not cancelled.
 */
#ifndef PCOW_UTIL_SIGNALS_H
#define PCOW_UTIL_SIGNALS_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SIGNAL_BIT(number) (UINT64_C(1) << ((number) - 1))
/* And the two that the C library keeps for itself. */
#define SIGNALS_LEFT \
    (SIGNAL_BIT(SIGSEGV) | SIGNAL_BIT(SIGBUS) | SIGNAL_BIT(SIGFPE) | SIGNAL_BIT(SIGILL) \
     | SIGNAL_BIT(SIGTRAP) | SIGNAL_BIT(32) | SIGNAL_BIT(33))

typedef uint64_t signal_mask;          /* the kernel's, which the C library's begins with */

static inline signal_mask signals_change(int how, signal_mask mask)
{
    signal_mask before = 0;

    syscall(SYS_rt_sigprocmask, how, &mask, &before, sizeof mask);
    return before;
}

/* The thread's state before; what interrupts_restore() is to be given. */
struct interrupts {
    signal_mask signals;
    int cancel_state;
};

/*
 * A thread that is cancelled meanwhile ends later: it would leave what it has claimed for ever.
 * Async-signal-safe with glibc and musl, both.
 */
static inline struct interrupts interrupts_disable(void)
{
    struct interrupts before;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before.cancel_state);
    before.signals = signals_change(SIG_BLOCK, ~SIGNALS_LEFT);
    return before;
}

static inline void interrupts_restore(struct interrupts before)
{
    signals_change(SIG_SETMASK, before.signals);
    pthread_setcancelstate(before.cancel_state, NULL);
}

#endif
