/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How much to bring in, and how: pure functions from what was seen to what is to be done. They look
 * at no mapping, no clock, and no memory but what they are given; test_policy tries them so. Who
 * calls them has seen (store.c, ahead.c, lead.c, layout.c), and does it.
 *
 * Many of them are guesses about what the guest will do next. A wrong one costs time or space,
 * never bytes.
 */
#ifndef PCOW_MONITOR_POLICY_H
#define PCOW_MONITOR_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "util/bits.h"

/* Pages of a slab. */
struct range {
    unsigned first, count;
};

/* ---- a store that has trapped ---------------------------------------------------------------- */

/* What is known before anything is done for it. */
struct policy_seen {
    unsigned pages;                    /* of the slab */
    unsigned cluster;                  /* pages of one */
    unsigned page;                     /* that is stored to */
    unsigned faults;                   /* stores that have trapped in the slab before; */
    unsigned grown;                    /* of them, to a window in which pages were own */
    unsigned run_end, run;             /* the last one's window: page after it, pages */
    bool begun;                        /* pages of the cluster are mapped for stores */
    bool present;                      /* an older layer or a base has it: it has to be copied */
    bool unmapped;                     /* nothing of the slab is mapped */
    bool keepable;                     /* the engine may have all of it as one mapping */
    bool is_short;                     /* of mappings */
    bool dense;                        /* the guest uses what traps have brought in lately */
};

/*
 * Absent memory: its cluster. Memory that has to be copied: the page alone when the guest comes to
 * a cluster for the first time (fine-grained copy-on-write), the rest of it when it comes back, or
 * at once where it was seen to do so. Where the last trap's window ends, a sequence goes on: twice
 * as much. The whole slab if mappings run short and it takes more than one.
 */
struct range policy_window(const struct policy_seen *seen);

/*
 * Of that slab, these pages of which are mapped for stores: the rest in one go? Only if nothing
 * has to be copied for it, and it is used page for page, or in a sequence. They are counted last:
 * most traps want no rest.
 */
bool policy_wants_rest(const struct policy_seen *seen, const struct page_set *own);

/* All of a slab has become own, which has so many mappings: is it to be mapped anew, as one? */
bool policy_maps_anew(const struct policy_seen *seen, unsigned pieces);

/*
 * Is the engine to keep the slab now that so many pages are own? Of a guest that stores here and
 * there: not where it comes back to what it has begun, or goes on in a sequence, as the slab will
 * be one mapping soon in any case.
 */
enum policy_keep {
    POLICY_KEEP_NOT,
    POLICY_KEEP_IF_PROVEN,             /* that it is worth it is for the engine to say */
    POLICY_KEEP_AT_ONCE,               /* mappings are short */
};

enum policy_keep policy_keep(const struct policy_seen *seen, unsigned count, bool copied,
                             bool again);

/* Is the window a sequence's next one, all of which is to be in the page table? */
bool policy_fills_window(const struct policy_seen *seen, struct range window);

/* ---- mappings -------------------------------------------------------------------------------- */

/* Has the next trap none to cut one in three? */
bool policy_is_short(unsigned used, unsigned budget);
/*
 * Are so many mappings for one slab too many, with so many reserved for others? One it may always
 * have.
 */
bool policy_is_too_much(unsigned pieces, unsigned used, uint64_t reserved, unsigned budget);

/* ---- the thread that works ahead ------------------------------------------------------------- */

#define HOT_FAULTS 8u                  /* a slab with so many traps, */
/*
 * and one part in so many own, is made own whole: that at most doubles its space, or makes it three
 * times as much where nothing is copied and the guest uses page for page
 */
#define HOT_SHARE 2u
#define HOT_SHARE_ABSENT 3u

bool policy_is_hot(unsigned faults, unsigned own, unsigned share);

struct policy_trap {
    unsigned faults;                   /* with this one */
    bool copied;
    bool comes_back;                   /* for the first time, to a cluster that was begun */
    bool owns;                         /* the active layer has a slab for it, */
    bool is_ready;                     /* of which all pages are prepared */
    bool queued;                       /* the thread was asked to copy the rest */
    bool hot;
    bool is_busy;                      /* others wait for it */
};

/* What the thread is to do after it. */
enum policy_job {
    POLICY_JOB_NONE,
    POLICY_JOB_SLAB,                   /* prepare the rest of it, or touch its source */
    POLICY_JOB_WHOLE,                  /* copy the rest of it */
    POLICY_JOB_GUESS,                  /* as the first, when there is time: for its source only */
};

enum policy_job policy_job(const struct policy_trap *trap);

#define LEAD_MIN 4u                    /* slabs that are kept ready while the image is in use, */
#define LEAD_TIME_NS 200000000u        /* or as many as were taken in such a time */
/* between two looks at how fast that is, and at how many can be taken */
#define LEAD_WINDOW_NS 100000000u

/* Since the last look; what a window is for, since that began. */
struct policy_demand {
    unsigned lead, least, most;        /* slabs that are kept ready now; never less; never more */
    uint64_t taken, passed_ns;         /* in the window */
    bool missed;                       /* one was wanted and none was ready */
    bool in_use;                       /* some were taken since all were given back */
};

/* How many slabs are to be kept ready, */
unsigned policy_lead(const struct policy_demand *demand);
/* if there are guest slabs that could take one: takers when they were counted, taken since. */
unsigned policy_lead_of_use(unsigned lead, unsigned takers, uint64_t taken, unsigned most);

#endif
