/* SPDX-License-Identifier: BSD-3-Clause */
/* What is decided from what was seen: no image, no mapping, no thread. */
#include "support.h"

#include "monitor/policy.h"
#include "util/bits.h"

#define CLUSTER 16u
#define MOST 256u                      /* slabs kept ready */

/* The first store to a page in the midst of a slab in which nothing happened yet. */
static struct policy_seen first_store(void)
{
    return (struct policy_seen){.pages = PAGES_PER_SLAB, .cluster = CLUSTER, .page = 100};
}

static void must_be(struct range range, unsigned first, unsigned count)
{
    assert_int_equal(range.first, first);
    assert_int_equal(range.count, count);
}

static void test_absent_memory_comes_by_the_cluster(void **state)
{
    struct policy_seen seen = first_store();

    (void)state;
    must_be(policy_window(&seen), 96, CLUSTER);
    seen.begun = true;
    must_be(policy_window(&seen), 96, CLUSTER);
    /* The end of an image of format 1 may cut a cluster. */
    seen.pages = 103;
    must_be(policy_window(&seen), 96, 7);
    /* Clusters of one page, and of a whole slab. */
    seen = first_store();
    seen.cluster = 1;
    must_be(policy_window(&seen), 100, 1);
    seen.cluster = PAGES_PER_SLAB;
    must_be(policy_window(&seen), 0, PAGES_PER_SLAB);
}

static void test_copies_begin_with_the_page(void **state)
{
    struct policy_seen seen = first_store();

    (void)state;
    seen.present = true;
    must_be(policy_window(&seen), 100, 1);
    /* The guest comes back to the cluster: all of it. */
    seen.begun = true;
    must_be(policy_window(&seen), 96, CLUSTER);
    /* It came back to more than one cluster in three: the next one is copied at once. */
    seen.begun = false;
    seen.faults = 9;
    seen.grown = 3;
    must_be(policy_window(&seen), 100, 1);
    seen.grown = 4;
    must_be(policy_window(&seen), 96, CLUSTER);
}

static void test_a_sequence_doubles(void **state)
{
    struct policy_seen seen = first_store();
    unsigned windows = 0;

    (void)state;
    seen.page = 0;
    /* From its first cluster on: 16, 32, 64, ..., and the last one ends with the slab. */
    while (seen.page < PAGES_PER_SLAB) {
        struct range window = policy_window(&seen);

        assert_int_equal(window.first, seen.page);
        assert_true(window.count == 2 * seen.run || (seen.run == 0 && window.count == CLUSTER)
                    || window.first + window.count == PAGES_PER_SLAB);
        seen.page = seen.run_end = window.first + window.count;
        seen.run = window.count;
        windows++;
    }
    assert_int_equal(seen.page, PAGES_PER_SLAB);
    assert_int_equal(windows, 6);
    /* What is copied: 128 pages at most, as others may be waiting for the slab. */
    seen.present = true;
    seen.page = seen.run_end = 64;
    seen.run = 64;
    must_be(policy_window(&seen), 64, 128);
    seen.page = seen.run_end = seen.run = 128;
    must_be(policy_window(&seen), 128, 128);
    seen.present = false;
    must_be(policy_window(&seen), 128, 256);
    /* One page beside it is none; nor is what was less than a cluster. */
    seen.run_end = 127;
    must_be(policy_window(&seen), 128, CLUSTER);
    seen.run_end = 128;
    seen.run = CLUSTER - 1;
    must_be(policy_window(&seen), 128, CLUSTER);
}

static void test_whole_where_mappings_are_short(void **state)
{
    struct policy_seen seen = first_store();

    (void)state;
    seen.present = true;
    seen.is_short = true;
    must_be(policy_window(&seen), 0, PAGES_PER_SLAB);
    /* An engine may have it as one mapping without that. */
    seen.keepable = true;
    must_be(policy_window(&seen), 100, 1);
    seen.is_short = false;
    seen.unmapped = true;
    must_be(policy_window(&seen), 0, PAGES_PER_SLAB);
    seen.pages = 7;
    seen.page = 3;
    must_be(policy_window(&seen), 0, 7);
    assert_false(policy_is_short(97, 100));
    assert_true(policy_is_short(98, 100) && policy_is_short(101, 100));
}

/* Whatever was seen: the page is in the window, and the window in the slab. */
static void test_every_window(void **state)
{
    uint64_t seed = random_seed();

    (void)state;
    for (unsigned i = 0; i < 1000000; i++) {
        struct policy_seen seen = {
            .pages = random_next(&seed) % 2 ? PAGES_PER_SLAB
                                           : 1 + (unsigned)(random_next(&seed) % PAGES_PER_SLAB),
            .cluster = 1u << random_next(&seed) % 10,
            .faults = (unsigned)(random_next(&seed) % 256),
            .grown = (unsigned)(random_next(&seed) % 256),
            .run_end = (unsigned)(random_next(&seed) % (PAGES_PER_SLAB + 1)),
            .run = (unsigned)(random_next(&seed) % (PAGES_PER_SLAB + 1)),
        };
        unsigned bits = (unsigned)random_next(&seed);
        struct range window;

        seen.page = bits & 1 && seen.run_end < seen.pages
                        ? seen.run_end
                        : (unsigned)(random_next(&seed) % seen.pages);
        seen.begun = bits & 2;
        seen.present = bits & 4;
        seen.unmapped = bits & 8;
        seen.keepable = bits & 16;
        seen.is_short = bits & 32;
        seen.dense = bits & 64;
        window = policy_window(&seen);
        if (seen.page < window.first || seen.page >= window.first + window.count
            || window.first + window.count > seen.pages)
            fail_msg("page %u of %u: %u pages from %u on", seen.page, seen.pages, window.count,
                     window.first);
    }
}

/* So many pages are mapped for stores. */
static bool wants_rest(const struct policy_seen *seen, unsigned count)
{
    struct page_set own = {{0}};

    page_set_add_range(&own, 0, count);
    return policy_wants_rest(seen, &own);
}

static void test_the_rest(void **state)
{
    struct policy_seen seen = first_store();

    (void)state;
    /* A slab that is used page for page: eight traps, and a third of it. */
    seen.faults = HOT_FAULTS;
    seen.dense = true;
    assert_true(wants_rest(&seen, 170));
    assert_false(wants_rest(&seen, 169));
    seen.dense = false;
    assert_false(wants_rest(&seen, 511));
    seen.dense = true;
    seen.faults = HOT_FAULTS - 1;
    assert_false(wants_rest(&seen, 511));
    /* Or a sequence, of more than its first cluster. */
    seen.page = seen.run_end = 176;
    seen.run = CLUSTER;
    assert_false(wants_rest(&seen, 176));
    seen.run = 2 * CLUSTER;
    assert_true(wants_rest(&seen, 176));
    assert_true(policy_is_hot(HOT_FAULTS, 256, HOT_SHARE));
    assert_false(policy_is_hot(HOT_FAULTS, 255, HOT_SHARE));
    assert_false(policy_is_hot(HOT_FAULTS - 1, 512, HOT_SHARE));
}

static void test_what_is_whole_is_mapped_anew(void **state)
{
    struct policy_seen seen = first_store();

    (void)state;
    assert_false(policy_maps_anew(&seen, 8));
    assert_true(policy_maps_anew(&seen, 9));
    seen.is_short = true;
    assert_true(policy_maps_anew(&seen, 1));
    seen.is_short = false;
    seen.unmapped = true;
    assert_true(policy_maps_anew(&seen, 1));
}

static void test_what_an_engine_keeps(void **state)
{
    struct policy_seen seen = first_store();

    (void)state;
    /* A page or a cluster here and there, */
    assert_int_equal(policy_keep(&seen, CLUSTER, false, false), POLICY_KEEP_IF_PROVEN);
    assert_int_equal(policy_keep(&seen, 1, true, false), POLICY_KEEP_IF_PROVEN);
    /* but no sequence, nor where the guest comes back, or fills what it has begun. */
    assert_int_equal(policy_keep(&seen, CLUSTER + 1, true, false), POLICY_KEEP_NOT);
    assert_int_equal(policy_keep(&seen, CLUSTER, true, true), POLICY_KEEP_NOT);
    seen.dense = true;
    assert_int_equal(policy_keep(&seen, CLUSTER, false, false), POLICY_KEEP_NOT);
    assert_int_equal(policy_keep(&seen, 1, true, false), POLICY_KEEP_IF_PROVEN);
    seen.is_short = true;
    assert_int_equal(policy_keep(&seen, PAGES_PER_SLAB, false, true), POLICY_KEEP_AT_ONCE);
}

static void test_the_page_table_is_filled_for_a_sequence(void **state)
{
    struct policy_seen seen = first_store();
    struct range cluster = {96, CLUSTER};

    (void)state;
    assert_false(policy_fills_window(&seen, cluster));
    assert_false(policy_fills_window(&seen, (struct range){96, 2 * CLUSTER}));
    assert_true(policy_fills_window(&seen, (struct range){100, 2 * CLUSTER}));
}

static void test_mappings(void **state)
{
    (void)state;
    assert_false(policy_is_too_much(1, 1000, 1000, 100));
    assert_false(policy_is_too_much(10, 60, 30, 100));
    assert_true(policy_is_too_much(10, 60, 31, 100));
    /* More reserved than fits a number of mappings. */
    assert_true(policy_is_too_much(2, 0, UINT64_C(1) << 40, UINT32_MAX));
}

static void test_jobs(void **state)
{
    struct policy_trap trap = {.faults = 1, .owns = true, .is_ready = true};

    (void)state;
    /* One that was taken from those that are ready, and nothing copied. */
    assert_int_equal(policy_job(&trap), POLICY_JOB_NONE);
    trap.is_ready = false;
    assert_int_equal(policy_job(&trap), POLICY_JOB_SLAB);
    trap.owns = false;
    assert_int_equal(policy_job(&trap), POLICY_JOB_NONE);
    /* A copy: more may follow from there, when there is time. */
    trap = (struct policy_trap){.faults = 1, .owns = true, .is_ready = true, .copied = true};
    assert_int_equal(policy_job(&trap), POLICY_JOB_GUESS);
    trap.is_busy = true;
    assert_int_equal(policy_job(&trap), POLICY_JOB_NONE);
    trap.comes_back = true;
    assert_int_equal(policy_job(&trap), POLICY_JOB_SLAB);
    /* Later ones, until the slab is hot; it is asked for once. */
    trap = (struct policy_trap){.faults = 9, .owns = true, .copied = true};
    assert_int_equal(policy_job(&trap), POLICY_JOB_NONE);
    trap.hot = true;
    assert_int_equal(policy_job(&trap), POLICY_JOB_WHOLE);
    trap.queued = true;
    assert_int_equal(policy_job(&trap), POLICY_JOB_NONE);
    /* What was absent is not copied. */
    trap.queued = trap.copied = false;
    assert_int_equal(policy_job(&trap), POLICY_JOB_NONE);
}

static void test_lead(void **state)
{
    struct policy_demand demand = {.most = MOST};

    (void)state;
    /* Nobody stores. */
    assert_int_equal(policy_lead(&demand), 0);
    demand.least = 2;
    assert_int_equal(policy_lead(&demand), 2);
    /* The first was wanted, and none was ready. */
    demand = (struct policy_demand){.most = MOST, .missed = true, .in_use = true, .taken = 1};
    assert_int_equal(policy_lead(&demand), 8);
    demand.lead = 8;
    assert_int_equal(policy_lead(&demand), 16);
    demand.lead = 200;
    assert_int_equal(policy_lead(&demand), MOST);
    /* As many as are taken in 200 ms, looked at after 100. */
    demand = (struct policy_demand){.most = MOST, .in_use = true, .lead = 8, .taken = 20};
    demand.passed_ns = LEAD_WINDOW_NS - 1;
    assert_int_equal(policy_lead(&demand), 8);
    demand.passed_ns = LEAD_WINDOW_NS;
    assert_int_equal(policy_lead(&demand), 40);
    demand.passed_ns = 20 * UINT64_C(1000000000);
    assert_int_equal(policy_lead(&demand), LEAD_MIN);
    demand.in_use = false;
    assert_int_equal(policy_lead(&demand), 0);
    /* No more than there are who could take one; but a few, as a snapshot may come. */
    assert_int_equal(policy_lead_of_use(40, 100, 30, MOST), 40);
    assert_int_equal(policy_lead_of_use(40, 100, 90, MOST), 10);
    assert_int_equal(policy_lead_of_use(40, 100, 200, MOST), LEAD_MIN);
    assert_int_equal(policy_lead_of_use(3, 0, 0, MOST), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_absent_memory_comes_by_the_cluster),
        cmocka_unit_test(test_copies_begin_with_the_page),
        cmocka_unit_test(test_a_sequence_doubles),
        cmocka_unit_test(test_whole_where_mappings_are_short),
        cmocka_unit_test(test_every_window),
        cmocka_unit_test(test_the_rest),
        cmocka_unit_test(test_what_is_whole_is_mapped_anew),
        cmocka_unit_test(test_what_an_engine_keeps),
        cmocka_unit_test(test_the_page_table_is_filled_for_a_sequence),
        cmocka_unit_test(test_mappings),
        cmocka_unit_test(test_jobs),
        cmocka_unit_test(test_lead),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
