/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Can the replay fail? Every flush and every hole of every scenario is dropped in turn, and every
 * two neighbouring updates are swapped: in the log, as if the library had the bug. Each must leave
 * a state that is judged wrong, or leave only states that are right, all of which were built, or be
 * on the list of those that cannot be caught, with the reason. Each run takes about half of the
 * scenarios, and half of the bugs of each, others each time (PCOW_TEST_SEED); all with
 * PCOW_TEST_LONG.
 */
#include "crash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_KINDS 128u
/* more combinations for a bug that a sample does not show */
#define ALL_STEPS 50u

/*
 * What became of the bugs of one kind: the place of the flush that was dropped, or of the updates
 * that were swapped.
 */
struct kind {
    char what[96];
    unsigned seeded, caught, sampled;
};

/*
 * Either one of the states that the bug allows is wrong; or all of them were built, and all are
 * right: the order did not matter there; or they are too many, and all of a sample are right.
 */
enum verdict {
    CAUGHT,
    HARMLESS,
    SAMPLED,
};

/* Without exception, in both classes (where they occur). */
static const char *const always_caught[] = {
    "dropped: base record",
    "dropped: virtual_size of record",
    "swapped: state of record, active_layer",
    "swapped: active_layer, state of record",
    "swapped: owner word, parent of record",
    "swapped: base record, base_slot",
    "swapped: parent_limit of record, virtual_size of record",
    "swapped: generation, state of record",
};

/*
 * Kinds of which some are not caught, because what they do not order need not be ordered: the
 * reason. must: at least one of them is caught all the same, if all are seeded.
 */
static const struct {
    const char *prefix, *reason;
    bool must;
} harmless[] = {
    {"dropped: active_layer",
     "a snapshot in steps: the next flush, the guest's or its own, is one of the whole file", true},
    {"dropped: generation",
     "another flush of the same line or page comes before anything that it must precede", true},
    {"dropped: fdatasync",
     "what it made certain is made so again before anything relies on it, or was not promised yet",
     true},
    {"dropped: hole",
     "the slab is free or its pages are not valid: whoever uses it next empties it", true},
    {"dropped: data", "the pages are not promised yet, or a later flush covers them", true},
    {"dropped: bitmap", "the pages are not promised yet, or their layer goes", true},
    {"dropped: owner word",
     "a slab of a dead layer is free whether its owner word is cleared or not", true},
    {"dropped: next_layer_id",
     "a rename uses no id; class page-cache: another msync() of the page comes before the id is "
     "used",
     true},
    {"dropped: parent of record",
     "the flush of the state, in the same line or page, covers the words; the name of an open "
     "layer does not count",
     true},
    {"dropped: state of record",
     "an open record of a layer that is neither active nor parent of the active one counts as free",
     true},
    {"dropped: state_size of record",
     "the length of the VM state of a hidden layer is never asked for", true},
    {"dropped: base_slot",
     "nobody reads the old base: commit has copied, or the content of both is the same", true},
    {"dropped: name of record",
     "class page-cache: the next record in the same page is flushed before active_layer", false},
    {"dropped: layer_slots", "in one line with next_layer_id, which is stored later and flushed",
     false},
    {"dropped: parent_limit of record",
     "in one line with virtual_size, which is stored later and flushed", false},
    {"dropped: copy of the header", "only check -r reads it, and word by word", false},
    {"swapped: generation, ",
     "the update after it is not the commit point, which still comes later", false},
    {"swapped: data, ", "the bitmap or owner word publishes nothing that was promised", false},
    {"swapped: bitmap, ",
     "a page is valid only if both bitmap and owner word are there; with either alone it reads as "
     "before",
     false},
    {"swapped: owner word, ", "slabs of one layer change owner each on its own", false},
    {"swapped: layer_slots, ", "neither counts before a state or active_layer", false},
    {"swapped: next_layer_id, ", "neither counts before a state or active_layer", false},
    {"swapped: name of record, ", "neither counts before a state or active_layer", false},
    {"swapped: parent of record, ", "in one line where the class keeps the order", true},
    {"swapped: state of record, copy of the header", "only check -r reads the copy", false},
    {"swapped: state of record, owner word",
     "the slabs of a dead or hidden layer read the same whoever owns them", false},
    {"swapped: state of record, state of record",
     "that all data of a layer has checksums is noted of each by itself, and taken back before the "
     "merge of two",
     true},
    {"swapped: state of record, state_size of record", "a hidden layer has no VM state", true},
    {"swapped: state_size of record, ", "a hidden layer has no VM state", false},
    {"swapped: state, copy of the header", "only check -r reads the copy", false},
    {"dropped: checksum",
     "another flush of the same line or page comes before the page is stored to, or the page is "
     "stored to for the first time and is empty in its mirror as well",
     true},
    {"dropped: mirror", "class page-cache: the flush of all that follows covers it", false},
    {"swapped: checksum, ", "the page, or its checksum, is what it was before in either order",
     true},
    {"swapped: mirror, ", "the page is stale still", false},
    {"dropped: state",
     "unseal brings the mirror up to date, which syncs the file, before it returns", true},
    {"swapped: base_slot, checksum", "the mark is of the copy of the header, stored after both",
     false},
    {"swapped: base_slot, copy of the header", "only check -r reads the copy", false},
    {"swapped: copy of the header, ", "only check -r reads the copy", false},
};

static struct kind kinds[MAX_KINDS];
static unsigned kind_count;
static uint64_t seed;

static bool is_chosen(void)
{
    return getenv("PCOW_TEST_LONG") || random_next(&seed) % 2 == 0;
}

static void count(const char *what, enum verdict verdict)
{
    unsigned i = 0;

    while (i < kind_count && strcmp(kinds[i].what, what))
        i++;
    assert_true(i < MAX_KINDS);
    if (i == kind_count)
        snprintf(kinds[kind_count++].what, sizeof kinds[i].what, "%s", what);
    kinds[i].seeded++;
    kinds[i].caught += verdict == CAUGHT;
    kinds[i].sampled += verdict == SAMPLED;
}

static enum verdict judge_bug(struct crash *c, struct seen *seen, const struct entry *log,
                              size_t length, size_t from)
{
    unsigned limits[] = {test_steps(40), test_steps(40) * ALL_STEPS};
    struct replay replay;

    for (unsigned i = 0; i < 2; i++) {
        replay = crash_replay(c, seen, limits[i]);
        replay.entry = log;
        replay.count = length;
        replay.skip = from;
        if (!replay_run(&replay))
            return CAUGHT;
        if (!replay.sampled)
            return HARMLESS;
    }
    return SAMPLED;
}

/* ---- dropping -------------------------------------------------------------------------------- */

/* Flushes, and the holes without which old data would come up in new memory. */
static void drop_flushes(struct crash *c, struct seen *seen)
{
    struct entry *log = malloc(c->recorder.count * sizeof *log);

    assert_non_null(log);
    for (size_t at = 0; at < c->recorder.count; at++) {
        const struct entry *entry = &c->recorder.entry[at];
        char what[96];

        if (entry->kind != ENTRY_FLUSH && entry->kind != ENTRY_MSYNC && entry->kind != ENTRY_SYNC
            && entry->kind != ENTRY_PUNCH)
            continue;
        if (!is_chosen())
            continue;
        memcpy(log, c->recorder.entry, at * sizeof *log);
        memcpy(log + at, c->recorder.entry + at + 1, (c->recorder.count - at - 1) * sizeof *log);
        snprintf(what, sizeof what, "dropped: %s",
                 entry->kind == ENTRY_PUNCH ? "hole" : recorder_describe(entry));
        count(what, judge_bug(c, seen, log, c->recorder.count - 1, at));
    }
    free(log);
}

/* ---- swapping -------------------------------------------------------------------------------- */

/* One update: stores and what makes them certain. 0 if none begins here. */
static size_t update_length(const struct recorder *recorder, size_t at)
{
    size_t end = at;

    while (end < recorder->count && recorder->entry[end].kind == ENTRY_STORE)
        end++;
    if (end == at)
        return 0;
    while (end < recorder->count && recorder->entry[end].kind == ENTRY_FLUSH)
        end++;
    if (end == recorder->count
        || (recorder->entry[end].kind != ENTRY_FENCE && recorder->entry[end].kind != ENTRY_MSYNC))
        return 0;
    return end + 1 - at;
}

static void swap_updates(struct crash *c, struct seen *seen)
{
    const struct recorder *recorder = &c->recorder;
    struct entry *log = malloc(recorder->count * sizeof *log);

    assert_non_null(log);
    for (size_t at = 0; at < recorder->count; at++) {
        size_t first = update_length(recorder, at),
               second = first ? update_length(recorder, at + first) : 0;
        char what[96];

        if (!second)
            continue;
        if (!is_chosen()) {
            at += first - 1;
            continue;
        }
        memcpy(log, recorder->entry, recorder->count * sizeof *log);
        memcpy(log + at, recorder->entry + at + first, second * sizeof *log);
        memcpy(log + at + second, recorder->entry + at, first * sizeof *log);
        snprintf(what, sizeof what, "swapped: %s, ", recorder_describe(&recorder->entry[at]));
        snprintf(what + strlen(what), sizeof what - strlen(what), "%s",
                 recorder_describe(&recorder->entry[at + first]));
        count(what, judge_bug(c, seen, log, recorder->count, at));
        at += first - 1;
    }
    free(log);
}

/* ---- the verdict ----------------------------------------------------------------------------- */

static bool is_always_caught(const char *what)
{
    for (size_t i = 0; i < sizeof always_caught / sizeof always_caught[0]; i++)
        if (strcmp(what, always_caught[i]) == 0)
            return true;
    return false;
}

static const char *reason_for(const char *what)
{
    for (size_t i = 0; i < sizeof harmless / sizeof harmless[0]; i++)
        if (strncmp(what, harmless[i].prefix, strlen(harmless[i].prefix)) == 0)
            return harmless[i].reason;
    return NULL;
}

static unsigned caught_with(const char *prefix)
{
    unsigned caught = 0;

    for (unsigned i = 0; i < kind_count; i++)
        if (strncmp(kinds[i].what, prefix, strlen(prefix)) == 0)
            caught += kinds[i].caught;
    return caught;
}

static void report(enum pcow_persistence persistence, bool partial, bool only_one)
{
    unsigned seeded = 0, caught = 0, sampled = 0, failures = 0;

    for (unsigned i = 0; i < kind_count; i++) {
        const struct kind *kind = &kinds[i];
        const char *reason = kind->caught < kind->seeded ? reason_for(kind->what) : "";

        seeded += kind->seeded;
        caught += kind->caught;
        sampled += kind->sampled;
        print_message(
            "  %-50s %3u seeded, %3u caught, %3u right in all states, %3u in a sample%s%s\n",
            kind->what, kind->seeded, kind->caught, kind->seeded - kind->caught - kind->sampled,
            kind->sampled, reason && *reason ? ": " : "", reason ? reason : "");
        if ((is_always_caught(kind->what) && kind->caught < kind->seeded)
            || (!reason && kind->sampled)) {
            print_error("%s: %u of %u were not caught\n", kind->what, kind->seeded - kind->caught,
                        kind->seeded);
            failures++;
        }
    }
    for (size_t i = 0; i < sizeof harmless / sizeof harmless[0] && !partial; i++)
        if (harmless[i].must && !caught_with(harmless[i].prefix)) {
            print_error("%s: none was caught\n", harmless[i].prefix);
            failures++;
        }
    print_message("class %s: %u ordering bugs seeded: %u caught, %u harmless in every state that "
                  "they allow, %u in a sample of them\n",
                  pcow_persistence_name(persistence), seeded, caught, seeded - caught - sampled,
                  sampled);
    assert_int_equal(failures, 0);
    /*
     * Of all scenarios it was 44 % in either class, of one half in class page-cache 39.8: a judge
     * that has become blind would call the rest harmless.
     */
    assert_true(only_one ? caught > 0 : caught * (partial ? 4 : 3) > seeded);
}

static void run_class(enum pcow_persistence persistence)
{
    const char *only = getenv("PCOW_TEST_SCENARIO");

    kind_count = 0;
    seed = getenv("PCOW_TEST_SEED") ? random_seed() : (uint64_t)time(NULL) | 1;
    print_message("again: PCOW_TEST_SEED=%llu\n", (unsigned long long)seed);
    memset(kinds, 0, sizeof kinds);
    for (size_t i = 0; i < scenario_count; i++) {
        struct seen *seen = seen_new();
        struct replay replay;
        struct crash crash;

        /*
         * The thread that prepares slabs makes another log each time; the kinds above are those of
         * one thread.
         */
        if (only ? strcmp(only, scenarios[i].name) == 0
                 : !strstr(scenarios[i].name, "prepared") && is_chosen()) {
            crash_record(&crash, &scenarios[i], persistence);
            /* Without a bug it is right: what is seen here need not be judged again. */
            replay = crash_replay(&crash, seen, test_steps(40));
            if (!replay_run(&replay))
                fail_msg("%s: %s", scenarios[i].name, replay.failure);
            drop_flushes(&crash, seen);
            swap_updates(&crash, seen);
            crash_free(&crash);
        }
        seen_free(seen);
    }
    report(persistence, only || !getenv("PCOW_TEST_LONG"), only != NULL);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_pmem, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_page_cache, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
