/* SPDX-License-Identifier: BSD-3-Clause */
/* Calls that fail: which, in which operations. See test_faults.c. */
#ifndef PCOW_TEST_FAULTS_H
#define PCOW_TEST_FAULTS_H

#include "crash.h"

#define FAULT_CALLS 7u

/* A kind of call, and two errors that it may return. */
struct fault_call {
    enum observed what;
    const char *name;
    int code[2];
};

extern const struct fault_call fault_calls[FAULT_CALLS];

/* On an open image. */
struct operation {
    const char *name;
    void (*prepare)(struct crash *c);
    int (*run)(struct crash *c, struct pcow_error *error);
    /* What the model must become. */
    void (*alter)(struct world *world);
    bool mapped;
    /* true: it may get by without what failed; -ENOSPC: if that was space, by giving back some */
    int makes_do;
    /* besides 0, what a second call may return if the first was complete */
    int repeated;
};

extern const struct operation fault_operations[];
extern const size_t fault_operation_count;

/*
 * Operations on files that are not open: create, unseal, open after a crash, check -r. Returns the
 * number of faults.
 */
unsigned fault_files(enum pcow_persistence persistence);
extern const size_t fault_file_operation_count;

/* Tell what is wrong, and go on: all of it is told before the test fails. */
void fault_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
unsigned fault_wrongs(void);
void fault_check_file(const char *path, const char *where, bool tidied);

#endif
