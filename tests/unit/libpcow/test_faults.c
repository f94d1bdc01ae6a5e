/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Calls that fail: for every public operation, every kind of call that it makes to the kernel, and
 * every error that this may return, the first call fails, the second, ... until the operation
 * passes with all of them. Each time the error is reported in words, the image is as before or as
 * after, in this process and for who opens it next, it is clean, it can be written to, and the
 * operation can be repeated.
 */
#include "faults.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "operations/operations.h"

#define WORDS 512u

/* ---- one fault ------------------------------------------------------------------------------- */

struct expected {
    struct expectation either, after;
    struct world before_world, after_world, repeated_world;
};

static void expect_worlds(struct expected *expected, const struct world *before,
                          const struct operation *operation)
{
    struct world only_new;

    expected->before_world = expected->after_world = *before;
    operation->alter(&expected->after_world);
    only_new = expected->after_world;
    view_settle(&only_new.active);
    for (unsigned i = 0; i < only_new.snapshots; i++)
        view_settle(&only_new.saved[i].view);
    expected->repeated_world = only_new;
    expected->either =
        (struct expectation){.world = {&expected->before_world, &expected->after_world},
                             .worlds = 2,
                             .first_generation = UINT16_MAX};
    expected->after = (struct expectation){
        .world = {&expected->repeated_world}, .worlds = 1, .first_generation = UINT16_MAX};
}

static void check_memory(const struct crash *c, const struct expectation *expectation,
                         const char *where)
{
    const uint64_t *memory = pcow_map_address(c->map);
    unsigned matching = 0;

    for (unsigned w = 0; w < expectation->worlds; w++) {
        const struct view *view = &expectation->world[w]->active;
        bool same = true;

        for (uint64_t i = 0; i < view->size / 8 && same; i++)
            same = view_allows(view, (unsigned)(i / WORDS), memory[i]);
        matching += same;
    }
    if (!matching)
        fault_wrong("%s: the mapped memory is neither as before nor as after", where);
}

static void check_image(struct crash *c, const struct expectation *expectation, const char *where)
{
    char reasons[1200];

    if (c->map)
        check_memory(c, expectation, where);
    else if (!world_compare(c->image, expectation, reasons, sizeof reasons))
        fault_wrong("%s: %s", where, reasons);
}

static void close_all(struct crash *c)
{
    pcow_map_destroy(c->map);
    c->map = NULL;
    pcow_close(c->image);
    c->image = NULL;
}

static void open_all(struct crash *c, const struct operation *operation)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    c->recorder.injecting = true;              /* it counts only */
    c->recorder.fail_at = 0;
    MUST(image_open(c->top, PCOW_OPEN_WRITE, NULL, &c->recorder.observer, &c->image, &error));
    if (operation->mapped)
        MUST(pcow_map_create(c->image, &options, &c->map, &error));
    else
        MUST(pcow_read(c->image, 0, &(char){0}, 1, &error));
}

/* In this process the image goes on, whatever the model says of it. */
static void go_on(struct crash *c, const struct world *world, const char *where)
{
    const char *bad;

    if (world->sealed)
        return;
    pcow_map_destroy(c->map);
    c->map = NULL;
    bad = world_live_on(c->image, world);
    if (bad)
        fault_wrong("%s: %s", where, bad);
}

static bool may_succeed(const struct operation *operation, unsigned call, int code)
{
    /* Commit closes the base: what its mirror lacks then is stale, and the next writer's. */
    return operation->makes_do == true || operation->makes_do == code
           || (strcmp(operation->name, "commit") == 0
               && (fault_calls[call].what == OBSERVED_SYNC
                   || fault_calls[call].what == OBSERVED_WRITE));
}

/* True if the operation made fewer than n calls of this kind, so that it passed. */
static bool one_fault(const struct operation *operation, unsigned call, int code, unsigned n,
                      enum pcow_persistence persistence, struct expected *expected)
{
    struct pcow_error error = {0};
    struct crash c;
    char where[200];
    bool passed;
    int ret;

    crash_prepare(&c, operation->prepare, persistence);
    recorder_init(&c.recorder, persistence);
    expect_worlds(expected, &c.now, operation);
    snprintf(where, sizeof where, "%s, %s: call %u of %s fails with %s", operation->name,
             pcow_persistence_name(persistence), n, fault_calls[call].name, strerror(-code));
    open_all(&c, operation);
    recorder_fail(&c.recorder, fault_calls[call].what, code, n);
    ret = operation->run(&c, &error);
    passed = recorder_fail_no_more(&c.recorder) < n;
    if (passed && ret)
        fault_wrong("%s: it was not called, but: %s", where, error.message);
    if (!passed && !(ret == 0 && may_succeed(operation, call, code))
        && (ret == 0 || error.code != ret || strlen(error.message) < 10))
        fault_wrong("%s: returned %d '%s'", where, ret, error.message);
    if (!operation->mapped || c.map)
        check_image(&c, ret ? &expected->either : &expected->after, where);
    if (!passed) {
        struct pcow_error again = {0};

        /* A commit that failed is told to the next flush as well, once. */
        if (c.image)
            (void)pcow_flush(c.image, &again);
        /* Once more, with nothing in its way. */
        ret = operation->run(&c, &again);
        if (ret && ret != operation->repeated)
            fault_wrong("%s: then again: %s", where, again.message);
        check_image(&c, &expected->after, where);
    }
    close_all(&c);
    fault_check_file(c.top, where, false);
    if (!expected->after_world.sealed) {
        open_all(&c, operation);
        check_image(&c, &expected->after, where);
        go_on(&c, &expected->repeated_world, where);
        close_all(&c);
        fault_check_file(c.top, where, true);
    }
    if (c.has_base)
        fault_check_file(c.base, where, true);
    crash_free(&c);
    unlink(c.top);
    unlink(c.base);
    return passed;
}

/* The same, but after the fault the process ends: what the next one finds. */
static void fault_and_reopen(const struct operation *operation, unsigned call, int code, unsigned n,
                             enum pcow_persistence persistence, struct expected *expected)
{
    struct pcow_error ignored = {0};
    char where[200], reasons[1200] = "";
    unsigned here = 3, there;
    struct crash c;

    crash_prepare(&c, operation->prepare, persistence);
    recorder_init(&c.recorder, persistence);
    snprintf(where, sizeof where, "%s, %s: call %u of %s fails with %s, then reopened",
             operation->name, pcow_persistence_name(persistence), n, fault_calls[call].name,
             strerror(-code));
    open_all(&c, operation);
    recorder_fail(&c.recorder, fault_calls[call].what, code, n);
    operation->run(&c, &ignored);
    recorder_fail_no_more(&c.recorder);
    if (!operation->mapped)
        here = world_compare(c.image, &expected->either, reasons, sizeof reasons);
    close_all(&c);
    fault_check_file(c.top, where, false);
    MUST(pcow_open(c.top, 0, NULL, &c.image, &error));
    there = world_compare(c.image, &expected->either, reasons, sizeof reasons);
    if (!(here & there))
        fault_wrong("%s: in the process it was %s, now it is %s %s", where,
                    here & 1 ? "as before" : "done", there & 1 ? "as before" : "done", reasons);
    close_all(&c);
    if (!(there & 2) || !expected->after_world.sealed) {
        open_all(&c, &(struct operation){.mapped = false});
        go_on(&c, there & 1 ? &expected->before_world : &expected->after_world, where);
        close_all(&c);
        fault_check_file(c.top, where, true);
    }
    crash_free(&c);
    unlink(c.top);
    unlink(c.base);
}

static void run_class(enum pcow_persistence persistence)
{
    struct expected *expected = malloc(sizeof *expected);
    const char *only = getenv("PCOW_TEST_SCENARIO");
    unsigned faults = 0;

    assert_non_null(expected);
    for (size_t i = 0; i < fault_operation_count; i++) {
        if (only && strcmp(only, fault_operations[i].name))
            continue;
        for (unsigned call = 0; call < FAULT_CALLS; call++)
            for (unsigned code = 0; code < 2; code++)
                for (unsigned n = 1;; n++) {
                    if (one_fault(&fault_operations[i], call, fault_calls[call].code[code], n,
                                  persistence, expected))
                        break;
                    fault_and_reopen(&fault_operations[i], call, fault_calls[call].code[code], n,
                                     persistence, expected);
                    faults++;
                }
    }
    if (!only)
        faults += fault_files(persistence);
    print_message("class %s: %zu operations, %u faults\n", pcow_persistence_name(persistence),
                  fault_operation_count + fault_file_operation_count, faults);
    assert_true(faults > 0);
    assert_int_equal(fault_wrongs(), 0);
    free(expected);
}

static void test_volatile(void **state)
{
    (void)state;
    run_class(PCOW_PERSISTENCE_VOLATILE);
}

static void test_page_cache(void **state)
{
    (void)state;
    run_class(PCOW_PERSISTENCE_PAGE_CACHE);
}

static void test_pmem(void **state)
{
    (void)state;
    run_class(PCOW_PERSISTENCE_PMEM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_volatile, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_page_cache, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_pmem, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
