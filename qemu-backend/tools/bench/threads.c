/* SPDX-License-Identifier: BSD-3-Clause */
#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "bench.h"
#include "report.h"

enum signal { WAIT, GO, GIVE_UP };

struct worker {
    pthread_t thread;
    enum signal *signal;
    void (*work)(void *opaque, unsigned thread);
    void *opaque;
    unsigned number;
};

unsigned usable_cpus(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) ? 1 : (unsigned)CPU_COUNT(&set);
}

/* The CPUs are counted from the last: the first often serves interrupts. */
static void pin(unsigned number)
{
    cpu_set_t usable, one;
    unsigned seen = 0;

    if (sched_getaffinity(0, sizeof(usable), &usable)) {
        return;
    }
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; cpu--) {
        if (CPU_ISSET(cpu, &usable) && seen++ == number % (unsigned)CPU_COUNT(&usable)) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
            return;
        }
    }
}

static void *run(void *opaque)
{
    struct worker *worker = opaque;
    enum signal signal;

    pin(worker->number);
    while ((signal = __atomic_load_n(worker->signal, __ATOMIC_ACQUIRE)) == WAIT) {
        sched_yield();
    }
    if (signal == GO) {
        worker->work(worker->opaque, worker->number);
    }
    return NULL;
}

int run_threads(unsigned count, void (*work)(void *opaque, unsigned thread), void *opaque,
                struct pcow_error *error)
{
    struct worker workers[MAX_THREADS];
    enum signal signal = WAIT;
    unsigned begun = 0;
    int r = count > MAX_THREADS ? EINVAL : 0;

    while (!r && begun < count) {
        workers[begun] =
            (struct worker){.signal = &signal, .work = work, .opaque = opaque, .number = begun};
        r = pthread_create(&workers[begun].thread, NULL, run, &workers[begun]);
        begun += r == 0;
    }
    __atomic_store_n(&signal, r ? GIVE_UP : GO, __ATOMIC_RELEASE);
    for (unsigned i = 0; i < begun; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    return r ? fail(error, -r, "cannot start a thread: %s", strerror(r)) : 0;
}
