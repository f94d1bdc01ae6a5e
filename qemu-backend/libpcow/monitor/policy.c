/* SPDX-License-Identifier: BSD-3-Clause */
#include "monitor/policy.h"

/* pages that one trap copies at most: others wait for the slab meanwhile */
#define MAX_COPY_RUN 128u
/* one trap in so many comes to a cluster again: then clusters are copied at the first one */
#define GROWN_SHARE 3u
#define MANY_PIECES 8u                 /* of a slab */

/* Does the guest come back to clusters of this slab? A part of the first traps asks anew. */
static bool comes_back(const struct policy_seen *seen)
{
    return seen->grown * GROWN_SHARE > seen->faults;
}

static struct range clip(struct range range, unsigned pages)
{
    if (range.first + range.count > pages)
        range.count = pages - range.first;
    return range;
}

struct range policy_window(const struct policy_seen *seen)
{
    struct range range = {seen->page / seen->cluster * seen->cluster, seen->cluster};

    if (seen->unmapped || (!seen->keepable && seen->is_short))
        return (struct range){0, seen->pages};
    if (seen->page == seen->run_end && seen->run >= seen->cluster)
        range = (struct range){seen->page, seen->present && seen->run >= MAX_COPY_RUN
                                               ? MAX_COPY_RUN
                                               : seen->run * 2u};
    else if (seen->present && !comes_back(seen) && !seen->begun)
        range = (struct range){seen->page, 1};
    return clip(range, seen->pages);
}

bool policy_is_hot(unsigned faults, unsigned own, unsigned share)
{
    return faults >= HOT_FAULTS && own >= PAGES_PER_SLAB / share;
}

bool policy_wants_rest(const struct policy_seen *seen, const struct page_set *own)
{
    bool sequence = seen->page == seen->run_end && seen->run > seen->cluster;

    return (sequence || (seen->faults >= HOT_FAULTS && seen->dense))
           && page_set_count(own) >= PAGES_PER_SLAB / HOT_SHARE_ABSENT;
}

bool policy_maps_anew(const struct policy_seen *seen, unsigned pieces)
{
    return seen->unmapped || pieces > MANY_PIECES || seen->is_short;
}

enum policy_keep policy_keep(const struct policy_seen *seen, unsigned count, bool copied,
                             bool again)
{
    if (seen->is_short)
        return POLICY_KEEP_AT_ONCE;
    return !again && count <= seen->cluster && (copied || !seen->dense) ? POLICY_KEEP_IF_PROVEN
                                                                        : POLICY_KEEP_NOT;
}

bool policy_fills_window(const struct policy_seen *seen, struct range window)
{
    return window.first == seen->page && window.count > seen->cluster;
}

bool policy_is_short(unsigned used, unsigned budget)
{
    return used + 2 >= budget;
}

bool policy_is_too_much(unsigned pieces, unsigned used, uint64_t reserved, unsigned budget)
{
    return pieces > 1 && used + pieces + reserved > budget;
}

enum policy_job policy_job(const struct policy_trap *trap)
{
    if (trap->owns
        && ((trap->comes_back && trap->copied) || (trap->faults == 1 && !trap->is_ready)))
        return POLICY_JOB_SLAB;
    if (trap->copied && !trap->queued && trap->hot)
        return POLICY_JOB_WHOLE;
    return trap->faults == 1 && trap->copied && !trap->is_busy ? POLICY_JOB_GUESS : POLICY_JOB_NONE;
}

static unsigned clamp(uint64_t value, unsigned low, unsigned high)
{
    return value > high ? high : value < low ? low : (unsigned)value;
}

unsigned policy_lead(const struct policy_demand *demand)
{
    unsigned lead = demand->lead;

    if (demand->passed_ns >= LEAD_WINDOW_NS)
        lead = clamp(demand->taken * LEAD_TIME_NS / demand->passed_ns, 0, demand->most);
    /* Too late already: do not wait for the end of the window. */
    if (demand->missed)
        lead = clamp((uint64_t)lead * 2, 2 * LEAD_MIN, demand->most);
    if (demand->in_use)
        lead = clamp(lead, LEAD_MIN, demand->most);
    return clamp(lead, demand->least, demand->most);
}

unsigned policy_lead_of_use(unsigned lead, unsigned takers, uint64_t taken, unsigned most)
{
    unsigned use = clamp(takers > taken ? takers - taken : 0, LEAD_MIN, most);

    return lead < use ? lead : use;
}
