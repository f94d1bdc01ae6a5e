/* SPDX-License-Identifier: BSD-3-Clause */
/* The states of a guest slab: each transition of the table is made, and each other one refused. */
#include "support.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "monitor/slab_state.h"

/* The shortest way from one state to another that the table knows; false: there is none. */
static bool go(struct slab_status *status, enum slab_state to)
{
    int before[SLAB_STATES], queue[SLAB_STATES], head = 0, tail = 0;
    enum slab_state path[SLAB_STATES];
    unsigned length = 0;

    memset(before, -1, sizeof before);
    before[slab_state(status)] = (int)slab_state(status);
    queue[tail++] = (int)slab_state(status);
    while (head < tail) {
        int at = queue[head++];

        for (int next = 0; next < SLAB_STATES; next++)
            if (before[next] < 0
                && slab_state_may_follow((enum slab_state)at, (enum slab_state)next)) {
                before[next] = at;
                queue[tail++] = next;
            }
    }
    if (before[to] < 0)
        return false;
    for (int at = (int)to; at != (int)slab_state(status); at = before[at])
        path[length++] = (enum slab_state)at;
    while (length > 0)
        slab_enter(status, path[--length]);
    return slab_state(status) == to;
}

/* What a child does that makes the transition. */
static int end_of_child(enum slab_state from, enum slab_state to)
{
    pid_t child = fork();
    int ended;

    assert_true(child >= 0);
    if (child == 0) {
        struct slab_status status = {(uint8_t)from, SLAB_FRESH};

        slab_enter(&status, to);
        _exit(slab_state(&status) == to ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    return ended;
}

static void test_every_transition(void **state)
{
    unsigned made = 0, refused = 0;

    (void)state;
#ifdef NDEBUG
    skip();
#endif
    for (int from = 0; from < SLAB_STATES; from++)
        for (int to = 0; to < SLAB_STATES; to++) {
            struct slab_status status = {0};
            int ended;

            /* None is a place that nobody comes to, or leaves. */
            assert_true(go(&status, (enum slab_state)from));
            if (slab_state_may_follow((enum slab_state)from, (enum slab_state)to)) {
                slab_enter(&status, (enum slab_state)to);
                assert_int_equal(slab_state(&status), to);
                assert_true(go(&status, SLAB_MAPPED));
                made++;
                continue;
            }
            ended = end_of_child((enum slab_state)from, (enum slab_state)to);
            if (!WIFSIGNALED(ended) || WTERMSIG(ended) != SIGABRT)
                fail_msg("%s after %s is not refused", slab_state_name((enum slab_state)to),
                         slab_state_name((enum slab_state)from));
            refused++;
        }
    print_message("%u transitions made, %u refused\n", made, refused);
    assert_true(made > 30 && refused > 30);
}

/*
 * Written by hand, from what may happen to a slab: a row of slab_states.h that is changed in
 * passing is seen here. A row is a state, a column one that may follow.
 */
static void test_table(void **state)
{
    static const enum slab_state order[] = {
        SLAB_MAPPED, SLAB_UNMAPPED, SLAB_UNKNOWN, SLAB_BOUNCE, SLAB_MINOR, SLAB_MINOR_FROZEN,
        SLAB_WATCHED, SLAB_WATCHED_READ, SLAB_WATCHED_UNMAPPED, SLAB_WATCHED_UNMAPPED_READ,
    };
    static const char *const may[] = {
        /*                       mapped
                                 |unmapped
                                 ||unknown
                                 |||bounce
                                 ||||minor
                                 |||||minor, frozen
                                 ||||||watched
                                 |||||||watched, read
                                 ||||||||watched, unmapped
                                 |||||||||watched, unmapped, read */
        /* mapped */            "xx-xx-x---",
        /* unmapped */          "xxxx----x-",
        /* unknown */           "xxx-----x-",
        /* bounce */            "xx-xx-x---",
        /* minor */             "xxxxxx----",
        /* minor, frozen */     "xxx-xx----",
        /* watched */           "xx----xx--",
        /* watched, read */     "xx----xx--",
        /* watched, unmapped */ "xxxx----xx",
        /* the same, read */    "xxxx----xx",
    };
    const unsigned known = sizeof order / sizeof *order;

    (void)state;
#ifndef SLAB_STATES_FOR_TESTS
    assert_int_equal(known, SLAB_STATES);
#endif
    for (unsigned from = 0; from < known; from++)
        for (unsigned to = 0; to < known; to++)
            if (slab_state_may_follow(order[from], order[to]) != (may[from][to] == 'x'))
                fail_msg("%s after %s", slab_state_name(order[to]), slab_state_name(order[from]));
}

static void test_groups(void **state)
{
    (void)state;
    for (int i = 0; i < SLAB_STATES; i++) {
        const struct slab_status status = {(uint8_t)i, SLAB_FRESH};

        /* Who may load without a trap needs neither. */
        assert_int_equal(slab_can_be_loaded_from(&status),
                         !slab_is_kept(&status) && !slab_is_unmapped(&status));
        assert_false(slab_is_kept(&status)
                     && (slab_is_unmapped(&status) || slab_is_watched(&status)));
        /* Who may load without a trap is told before anything goes. */
        assert_int_equal(slab_state_may_follow((enum slab_state)i, SLAB_UNKNOWN),
                         !slab_can_be_loaded_from(&status));
    }
}

static void test_ages(void **state)
{
    struct slab_status status = {0};

    (void)state;
    slab_freeze_stale(&status);
    assert_int_equal(slab_age(&status), SLAB_FRESH);
    slab_grow_stale(&status);
    assert_int_equal(slab_age(&status), SLAB_STALE);
    slab_freeze_stale(&status);
    slab_grow_stale(&status);
    assert_int_equal(slab_age(&status), SLAB_STALE_FROZEN);
    assert_false(slab_age_may_follow(SLAB_STALE_FROZEN, SLAB_STALE));
    slab_refresh(&status);
    assert_false(slab_is_stale(&status));
    slab_lose_track(&status);
    assert_int_equal(slab_age(&status), SLAB_STALE_FROZEN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_transition),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_ages),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
