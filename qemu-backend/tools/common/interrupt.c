/* SPDX-License-Identifier: BSD-3-Clause */
#include "interrupt.h"

#include <stddef.h>

/* A signal handler has no other place to leave its message. */
static volatile sig_atomic_t noted_signal;

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
static const size_t signal_count = sizeof(signals) / sizeof(signals[0]);

static void note_signal(int number)
{
    noted_signal = number;
}

void interrupt_catch(void)
{
    struct sigaction action = {.sa_handler = note_signal}, old;

    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < signal_count; i++) {
        /* what is ignored (nohup) stays ignored */
        if (!sigaction(signals[i], NULL, &old) && old.sa_handler != SIG_IGN) {
            sigaction(signals[i], &action, NULL);
        }
    }
}

bool interrupt_pending(void)
{
    return noted_signal != 0;
}

void interrupt_hold(sigset_t *old)
{
    sigset_t held;

    sigemptyset(&held);
    for (size_t i = 0; i < signal_count; i++) {
        sigaddset(&held, signals[i]);
    }
    sigprocmask(SIG_BLOCK, &held, old);
}

void interrupt_release(const sigset_t *old)
{
    sigprocmask(SIG_SETMASK, old, NULL);
}

int interrupt_obey(int status)
{
    if (noted_signal) {
        signal(noted_signal, SIG_DFL);
        raise(noted_signal);
    }
    return status;
}
