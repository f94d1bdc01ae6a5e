/* SPDX-License-Identifier: BSD-3-Clause */
#include "guard.h"

#include <errno.h>
#include <pcow.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>

/* A signal handler can only find its way back through these; one of each per thread. */
static _Thread_local sigjmp_buf way_back;
static _Thread_local volatile sig_atomic_t guarded;

static void handle_sigbus(int number, siginfo_t *info, void *context)
{
    /* in the midst of the library there is no way back but its own */
    if (pcow_serve_sigbus(info, context)) {
        return;
    }
    if (guarded) {
        guarded = false;
        siglongjmp(way_back, 1);
    }
    signal(number, SIG_DFL);
    raise(number);
}

void guard_install(void)
{
    struct sigaction action = {.sa_sigaction = handle_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER};

    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

int guarded_copy(void *to, const void *from, size_t length)
{
    if (sigsetjmp(way_back, 1)) {
        return -EFAULT;
    }
    guarded = true;
    memcpy(to, from, length);
    guarded = false;
    return 0;
}
