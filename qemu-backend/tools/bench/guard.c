/* SPDX-License-Identifier: BSD-3-Clause */
#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "interrupt.h"
#include "report.h"

/* Seldom enough to leave the measurement alone. */
static void pause_a_little(void)
{
    struct timespec interval = {0, 50000000};

    nanosleep(&interval, NULL);
}

int run_guarded(int (*work)(void *opaque), void *opaque)
{
    pid_t parent = getpid(), child, gone;
    bool told = false;
    int status;

    fflush(stdout);
    child = fork();
    if (child < 0) {
        report("cannot start a process: %s", strerror(errno));
        return EXIT_FAILURE;
    }
    if (child == 0) {
        /* Not to go on alone; the second look is for a parent that was gone before. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(getppid() == parent ? work(opaque) : EXIT_FAILURE);
    }
    while ((gone = waitpid(child, &status, WNOHANG)) == 0 || (gone < 0 && errno == EINTR)) {
        if (interrupt_pending() && !told) {
            told = true;
            kill(child, SIGTERM);
        }
        pause_a_little();
    }
    if (gone != child) {
        report("lost the measuring process: %s", strerror(errno));
        return EXIT_FAILURE;
    }
    if (WIFSIGNALED(status) && !interrupt_pending()) {
        report("the measurement was ended by a signal (%s)%s", strsignal(WTERMSIG(status)),
               WTERMSIG(status) == SIGBUS ? "; was the pool filled by something else?" : "");
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}
