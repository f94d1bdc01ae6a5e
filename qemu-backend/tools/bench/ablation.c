/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * pcow-bench without one of the monitor's guesses: PCOW_BENCH_WITHOUT names it. What a row takes
 * then, beside what it takes with all of them, is what the guess is for. The linker puts these in
 * the place of the functions of policy.h, density.h and ahead.h (--wrap); not installed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "monitor/density.h"
#include "monitor/policy.h"

static const char *const guesses[] = {
    "sequence",     /* where the last window ends a sequence goes on, twice as much */
    "one-page",     /* a copy begins with one page of its cluster */
    "grown",        /* where the guest comes back to clusters, they are copied at once */
    "rest",         /* the rest of a slab that is used page for page */
    "whole",        /* a whole slab at its first store, of a guest that fills them */
    "fill",         /* the page table is filled for a sequence's next window */
    "neighbours",   /* a page brings those beside it into the page table */
    "anew",         /* a slab that has become own is mapped as one */
    "keep",         /* a slab stays one mapping of which pages are let in (engine minor) */
    "hot",          /* hot slabs are copied whole in the background */
    "job",          /* the thread prepares the rest of slabs, and touches their source */
    "guess",        /* the thread touches the source of slabs that may follow */
    "lead",         /* as many slabs are kept ready as are taken */
};

static const char *missing = "";

static bool without(const char *guess)
{
    return !strcmp(missing, guess);
}

static void __attribute__((constructor)) choose(void)
{
    const char *wanted = getenv("PCOW_BENCH_WITHOUT");

    for (size_t i = 0; wanted && *wanted && i < sizeof guesses / sizeof guesses[0]; i++)
        if (!strcmp(guesses[i], wanted))
            missing = guesses[i];
    if (wanted && strcmp(missing, wanted)) {
        fprintf(stderr, "PCOW_BENCH_WITHOUT=%s: there is no such guess; they are", wanted);
        for (size_t i = 0; i < sizeof guesses / sizeof guesses[0]; i++)
            fprintf(stderr, " %s", guesses[i]);
        fputc('\n', stderr);
        exit(EXIT_FAILURE);
    }
}

/* The linker makes these names. */
#define REAL(name) __real_##name
#define WRAP(name) __wrap_##name
#define REPLACE(type, name, ...)                \
    type REAL(name)(__VA_ARGS__);               \
    type WRAP(name)(__VA_ARGS__);               \
    type WRAP(name)(__VA_ARGS__)

REPLACE(struct range, policy_window, const struct policy_seen *seen)
{
    struct policy_seen other = *seen;

    if (without("sequence"))
        other.run = 0, other.run_end = PAGES_PER_SLAB + 1;
    if (without("one-page"))
        other.begun = true;
    if (without("grown"))
        other.grown = 0;
    return REAL(policy_window)(&other);
}

REPLACE(bool, policy_wants_rest, const struct policy_seen *seen, const struct page_set *own)
{
    return !without("rest") && REAL(policy_wants_rest)(seen, own);
}

REPLACE(bool, density_begin_slab, struct density *density)
{
    return !without("whole") && REAL(density_begin_slab)(density);
}

REPLACE(bool, policy_fills_window, const struct policy_seen *seen, struct range window)
{
    return !without("fill") && REAL(policy_fills_window)(seen, window);
}

REPLACE(bool, density_wants, struct density *density, const uint8_t *window, unsigned pages)
{
    return !without("neighbours") && REAL(density_wants)(density, window, pages);
}

REPLACE(bool, policy_maps_anew, const struct policy_seen *seen, unsigned pieces)
{
    return without("anew") ? seen->unmapped : REAL(policy_maps_anew)(seen, pieces);
}

REPLACE(enum policy_keep, policy_keep, const struct policy_seen *seen, unsigned count, bool copied,
        bool again)
{
    return without("keep") ? POLICY_KEEP_NOT : REAL(policy_keep)(seen, count, copied, again);
}

REPLACE(bool, policy_is_hot, unsigned faults, unsigned own, unsigned share)
{
    return !without("hot") && REAL(policy_is_hot)(faults, own, share);
}

REPLACE(enum policy_job, policy_job, const struct policy_trap *trap)
{
    enum policy_job job = REAL(policy_job)(trap);

    if ((without("job") && job == POLICY_JOB_SLAB)
        || (without("guess") && job == POLICY_JOB_GUESS))
        return POLICY_JOB_NONE;
    return job;
}

REPLACE(unsigned, policy_lead, const struct policy_demand *demand)
{
    unsigned least = demand->least > LEAD_MIN ? demand->least : LEAD_MIN;

    return without("lead") ? least : REAL(policy_lead)(demand);
}
