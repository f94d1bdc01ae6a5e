/* SPDX-License-Identifier: BSD-3-Clause */
#include "persist/failures.h"

#include <pthread.h>
#include <time.h>

#define ASK_AGAIN_NS 20000L            /* a flush of a device takes longer */
#define PHASES 3u

struct request failures_begin(struct failures *failures)
{
    struct request request;
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &request.signals);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &request.cancel_state);
    request.phase = __atomic_load_n(&failures->phase, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&failures->asking[request.phase % 2], 1, __ATOMIC_SEQ_CST);
    return request;
}

void failures_add(struct failures *failures)
{
    __atomic_fetch_add(&failures->count, 1, __ATOMIC_SEQ_CST);
}

void failures_end(struct failures *failures, const struct request *request, bool failed)
{
    if (failed)
        failures_add(failures);
    __atomic_fetch_sub(&failures->asking[request->phase % 2], 1, __ATOMIC_SEQ_CST);
    pthread_setcancelstate(request->cancel_state, NULL);
    pthread_sigmask(SIG_SETMASK, &request->signals, NULL);
}

uint64_t failures_count(const struct failures *failures)
{
    return __atomic_load_n(&failures->count, __ATOMIC_SEQ_CST);
}

static bool is_asking(const struct failures *failures, unsigned phase)
{
    return __atomic_load_n(&failures->asking[phase % 2], __ATOMIC_SEQ_CST) != 0;
}

/*
 * The next phase begins when somebody has seen that nobody is left of the one before the present,
 * whose place it takes. He may have looked before this one came, so the first change shows nothing;
 * the two after it show that nobody is left of either who was there when this one came. Requests
 * that keep coming belong to the present phase and hold nobody up. Any number of threads may push
 * the phases on.
 */
uint64_t failures_await(struct failures *failures)
{
    const struct timespec interval = {0, ASK_AGAIN_NS};
    unsigned first = __atomic_load_n(&failures->phase, __ATOMIC_SEQ_CST), phase = first;

    if (!is_asking(failures, 0) && !is_asking(failures, 1))
        return failures_count(failures);
    while (phase - first < PHASES) {
        if (is_asking(failures, phase + 1))
            nanosleep(&interval, NULL);
        else
            __atomic_compare_exchange_n(&failures->phase, &phase, phase + 1, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        phase = __atomic_load_n(&failures->phase, __ATOMIC_SEQ_CST);
    }
    return failures_count(failures);
}
