/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Power loss at every point of every operation: all states that it could leave, in each class of
 * persistence (see replay.h for the rules), are opened, checked, compared with what the guest had
 * made durable, opened by a writer, compared again, and lived on with. PCOW_TEST_STEPS is the
 * number of combinations at one crash point before they are sampled.
 */
#include "crash.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

struct total {
    uint64_t points, built, judged;
    unsigned lives, failures;
};

static void add(struct total *total, const struct replay *replay, bool right, const char *name)
{
    total->points += replay->points;
    total->built += replay->built;
    total->judged += replay->judged;
    total->failures += !right;
    if (!right)
        print_error("%s: %s\n", name, replay->failure);
}

/* ---- what a crash leaves has a second life, and crashes again -------------------------------- */

#define SURVIVORS 64u

/* Of the states that were judged, some; their files stay. */
struct survivors {
    struct crash *crash;
    uint64_t count, every;
    unsigned wanted;
    const struct expectation *expectation[SURVIVORS];
};

static const char *file_of_survivor(const char *kind, unsigned i)
{
    char name[32];

    snprintf(name, sizeof name, "%s%u.pcow", kind, i);
    return scratch(name);
}

static void copy_sparse(const char *from, const char *to)
{
    char buffer[65536];
    int in = open(from, O_RDONLY), out = open(to, O_RDWR | O_CREAT | O_TRUNC, 0600);
    off_t at = 0, end = lseek(in, 0, SEEK_END);

    assert_true(in >= 0 && out >= 0);
    assert_int_equal(ftruncate(out, end), 0);
    while ((at = lseek(in, at, SEEK_DATA)) >= 0) {
        ssize_t got = pread(in, buffer,
                            (size_t)(lseek(in, at, SEEK_HOLE) - at) < sizeof buffer
                                ? (size_t)(lseek(in, at, SEEK_HOLE) - at)
                                : sizeof buffer,
                            at);

        assert_true(got > 0);
        assert_int_equal(pwrite(out, buffer, (size_t)got, at), got);
        at += got;
    }
    close(in);
    close(out);
}

static const char *judge_and_keep(void *opaque, const void *expectation)
{
    struct survivors *survivors = opaque;
    const struct crash *c = survivors->crash;
    uint64_t number = survivors->count++;
    char path[1100];

    if (number % survivors->every == survivors->every - 1
        && number / survivors->every < survivors->wanted) {
        unsigned i = (unsigned)(number / survivors->every);

        survivors->expectation[i] = expectation;
        snprintf(path, sizeof path, "%s/top.pcow", c->states);
        copy_sparse(path, file_of_survivor("top", i));
        if (c->has_base) {
            snprintf(path, sizeof path, "%s/base.pcow", c->states);
            copy_sparse(path, file_of_survivor("base", i));
        }
    }
    return crash_judge(c, expectation);
}

static void live_again(struct survivors *survivors, const char *name, struct total *total)
{
    for (unsigned i = 0; i < survivors->wanted; i++) {
        struct world *world = malloc(sizeof *world);
        struct seen *seen = seen_new();
        struct replay replay;
        struct crash second;
        char again[100];

        assert_non_null(world);
        /* With a base, the name of the base in the image is that of the first life. */
        if (survivors->expectation[i] && !survivors->crash->has_base
            && world_recognize(file_of_survivor("top", i), survivors->expectation[i], world)
            && !world->sealed && !world->amending) {
            crash_record_second_life(&second, survivors->crash, file_of_survivor("top", i), world);
            replay = crash_replay(&second, seen, test_steps(60) / 4);
            snprintf(again, sizeof again, "%s, second life %u", name, i);
            add(total, &replay, replay_run(&replay), again);
            total->lives++;
            crash_free(&second);
        }
        free(world);
        seen_free(seen);
    }
}

#define STATES 60u                     /* of each crash point, at most */

/* ---- all scenarios --------------------------------------------------------------------------- */

static void run_class(enum pcow_persistence persistence)
{
    unsigned limit = test_steps(STATES);
    struct total total = {0};
    const char *only = getenv("PCOW_TEST_SCENARIO");

    for (size_t i = 0; i < scenario_count; i++) {
        struct seen *seen = seen_new();
        double begun = seconds();
        struct survivors survivors = {0};
        struct replay replay;
        struct crash crash;
        bool right;

        if (only && strcmp(only, scenarios[i].name)) {
            seen_free(seen);
            continue;
        }
        crash_record(&crash, &scenarios[i], persistence);
        replay = crash_replay(&crash, seen, limit);
        survivors.crash = &crash;
        survivors.wanted = limit < 40 ? 1 : limit / 20 < SURVIVORS ? limit / 20 : SURVIVORS;
        survivors.every = persistence == PCOW_PERSISTENCE_VOLATILE ? 9 : 13;
        replay.judge = judge_and_keep;
        replay.opaque = &survivors;
        right = replay_run(&replay);
        add(&total, &replay, right, scenarios[i].name);
        if (right)
            live_again(&survivors, scenarios[i].name, &total);
        print_message(
            "  %-24s %5zu entries, %4llu crash points, %7llu states, %6llu distinct, %.1f s\n",
            scenarios[i].name, crash.recorder.count, (unsigned long long)replay.points,
            (unsigned long long)replay.built, (unsigned long long)replay.judged, seconds() - begun);
        crash_free(&crash);
        seen_free(seen);
    }
    print_message("class %s: %llu crash points, %llu states replayed, %llu of them distinct; %u "
                  "crashed images went on and crashed again\n",
                  pcow_persistence_name(persistence), (unsigned long long)total.points,
                  (unsigned long long)total.built, (unsigned long long)total.judged, total.lives);
    assert_int_equal(total.failures, 0);
    assert_true(total.judged > 0 && (only || total.lives > 0));
}

static void test_pmem(void **state)
{
    (void)state;
    run_class(PCOW_PERSISTENCE_PMEM);
}

static void test_page_cache(void **state)
{
    (void)state;
    run_class(PCOW_PERSISTENCE_PAGE_CACHE);
}

static void test_killed_process(void **state)
{
    (void)state;
    run_class(PCOW_PERSISTENCE_VOLATILE);
}

/* Of one class, if it is named: so that several processors have work. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_killed_process, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_pmem, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_page_cache, scratch_setup, scratch_teardown),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
