/* SPDX-License-Identifier: BSD-3-Clause */
#include "crash_steps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "operations/operations.h"

#define TOP_NAME "top.pcow"
#define BASE_NAME "base.pcow"

static void make(struct crash *c, const char *path, const char *base,
                 void (*prepare)(struct crash *))
{
    unlink(path);
    c->image = must_create(path, CRASH_SIZE, 16 * KIB, base);
    prepare(c);
    pcow_close(c->image);
    c->image = NULL;
    view_settle(&c->now.active);
    for (unsigned i = 0; i < c->now.snapshots; i++)
        view_settle(&c->now.saved[i].view);
}

static void start(struct crash *c, const struct scenario *scenario)
{
    struct pcow_info info;

    /* What the writer does when it opens is recorded too: it may find an interrupted operation. */
    MUST(pcow_open(c->top, 0, NULL, &c->image, &error));
    pcow_get_info(c->image, &info);
    pcow_close(c->image);
    recorder_init(&c->recorder, c->persistence);
    c->expects.first_generation = (uint16_t)(c->generation + 1);
    c->expects.image_generation = info.generation;
    c->now.changed = false;
    c->recording = true;
    step_expect(c, NULL);
    MUST(image_open(c->top, PCOW_OPEN_WRITE, NULL, &c->recorder.observer, &c->image, &error));
    scenario->run(c);
    if (!c->stores_left)
        step_flush(c);
    pcow_close(c->image);
    c->image = NULL;
}

void crash_prepare(struct crash *c, void (*prepare)(struct crash *),
                   enum pcow_persistence persistence)
{
    memset(c, 0, sizeof *c);
    c->persistence = persistence;
    snprintf(c->top, sizeof c->top, "%s", scratch(TOP_NAME));
    snprintf(c->base, sizeof c->base, "%s", scratch(BASE_NAME));
    snprintf(c->states, sizeof c->states, "%s", scratch("states"));
    mkdir(c->states, 0700);
    c->now.active.size = CRASH_SIZE;
    c->has_base = prepare == crash_on_a_base || prepare == crash_beside_another_base;
    if (c->has_base)
        make(c, c->base, NULL, crash_prepare_base);
    c->below = c->now.active;
    make(c, c->top, c->has_base ? c->base : NULL, prepare);
}

void crash_record(struct crash *c, const struct scenario *scenario,
                  enum pcow_persistence persistence)
{
    crash_prepare(c, scenario->prepare, persistence);
    start(c, scenario);
}

static const struct scenario second_life = {"second life", NULL, crash_go_on};

void crash_record_second_life(struct crash *c, const struct crash *first, const char *top,
                              const struct world *world)
{
    memset(c, 0, sizeof *c);
    c->persistence = first->persistence;
    snprintf(c->top, sizeof c->top, "%s", top);
    snprintf(c->states, sizeof c->states, "%s", first->states);
    c->now = *world;
    c->now.has_base_view = false;
    c->generation = (uint16_t)(first->generation + 1000);
    start(c, &second_life);
}
void crash_free(struct crash *c)
{
    char path[1100];

    recorder_free(&c->recorder);
    for (size_t i = 0; i < c->kept_count; i++)
        free(c->kept[i]);
    free(c->kept);
    snprintf(path, sizeof path, "%s/%s", c->states, strrchr(c->top, '/') + 1);
    unlink(path);
    snprintf(path, sizeof path, "%s/" BASE_NAME, c->states);
    unlink(path);
    snprintf(path, sizeof path, "%s/other.pcow", c->states);
    unlink(path);
    rmdir(c->states);
}

const char *crash_judge(const struct crash *c, const struct expectation *expectation)
{
    return world_judge(c->states, strrchr(c->top, '/') + 1, c->has_base ? BASE_NAME : NULL,
                       expectation);
}

static const char *judge(void *opaque, const void *expectation)
{
    return crash_judge(opaque, expectation);
}

struct replay crash_replay(struct crash *c, struct seen *seen, unsigned limit)
{
    return (struct replay){
        .recorder = &c->recorder,
        .entry = c->recorder.entry,
        .count = c->recorder.count,
        .persistence = c->persistence,
        .directory = c->states,
        .seed = random_seed(),
        .limit = limit,
        .judge = judge,
        .opaque = c,
        .seen = seen,
    };
}
