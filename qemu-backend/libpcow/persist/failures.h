/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which requests to put data on the medium have failed, whoever asked.
 *
 * The kernel tells one request of an open file that data could not be written, fdatasync() and
 * msync() alike, even if it was written back long before; the next request succeeds without that
 * data (Linux, lib/errseq.c). So a request that succeeds shows nothing by itself: another thread
 * may have been told in its place, and may not have said so yet. Who relies on data of his counts
 * the failures before he stores it, and once more, with all answers that were out in between, after
 * his own request.
 *
 * Async-signal-safe.
 */
#ifndef PCOW_PERSIST_FAILURES_H
#define PCOW_PERSIST_FAILURES_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

struct failures {
    uint64_t count;                    /* atomics, all of them */
    /* threads that wait for the kernel's answer, by the phase in which they asked */
    unsigned phase, asking[2];
};

/*
 * Others wait for the thread, so it must neither be cancelled in between, nor run a handler that
 * stores to a map, which would wait for itself.
 */
struct request {
    unsigned phase;
    int cancel_state;
    sigset_t signals;
};

/* Around each request: begin() right before it, end() with what it gave. */
struct request failures_begin(struct failures *failures);
void failures_end(struct failures *failures, const struct request *request, bool failed);
/* A request that failed before the kernel was asked. */
void failures_add(struct failures *failures);

/* How many there are by now. */
uint64_t failures_count(const struct failures *failures);
/*
 * The same, with those of all requests that are under way. Waits for these, and for none that
 * begins meanwhile.
 */
uint64_t failures_await(struct failures *failures);

#endif
