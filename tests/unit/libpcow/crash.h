/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Scenarios: what is done to an image while the recorder looks, with a model of what must be found
 * after a crash at any point of it.
 */
#ifndef PCOW_TEST_CRASH_H
#define PCOW_TEST_CRASH_H

#include "crash_world.h"
#include "recorder.h"
#include "replay.h"

#define CRASH_SIZE (4 * MIB)                   /* of the images that scenarios begin with */

struct crash {
    struct recorder recorder;
    enum pcow_persistence persistence;
    char top[512], base[512], states[512];     /* paths; the directory of the states */
    pcow_image *image;
    pcow_map *map;
    bool recording, has_base;
    bool stores_left;                          /* the guest stored what it never flushed */
    uint16_t generation;                       /* of the last store */
    struct expectation expects;
    struct world now;
    struct view below;                         /* what shows where the image holds nothing */
    struct saved frozen;                       /* by step_freeze() */
    uint64_t token;                            /* of step_prepare() */
    void **kept;                               /* worlds and expectations that the log points to */
    size_t kept_count;
};

struct scenario {
    const char *name;
    void (*prepare)(struct crash *c);          /* not recorded; the image is open */
    void (*run)(struct crash *c);              /* recorded */
};

extern const struct scenario scenarios[];
extern const size_t scenario_count;

/* What a scenario begins with: its files, and c->now as they are; nothing is open. */
void crash_prepare(struct crash *c, void (*prepare)(struct crash *),
                   enum pcow_persistence persistence);
/*
 * s1 - s2 - active, on nothing / an image without snapshots on a base / and another base beside it.
 */
void crash_two_snapshots(struct crash *c);
void crash_on_a_base(struct crash *c);
void crash_beside_another_base(struct crash *c);
/* What the base holds. */
void crash_prepare_base(struct crash *c);
/* What any image can go through, whatever was interrupted in it. */
void crash_go_on(struct crash *c);

/* Run a scenario; the log is in c->recorder. */
void crash_record(struct crash *c, const struct scenario *scenario,
                  enum pcow_persistence persistence);
/*
 * The same on a file that a crash has left, which reads as world: its writer finishes what was
 * interrupted and goes on. The states are made where those of first were.
 */
void crash_record_second_life(struct crash *c, const struct crash *first, const char *top,
                              const struct world *world);
/* The judge of its replays. */
const char *crash_judge(const struct crash *c, const struct expectation *expectation);
void crash_free(struct crash *c);
/* A replay of this log (or of an altered copy of it). */
struct replay crash_replay(struct crash *c, struct seen *seen, unsigned limit);

#endif
