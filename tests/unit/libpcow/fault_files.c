/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check/check.h"
#include "operations/operations.h"

/* All of them are told before the test fails. */
static unsigned wrongs;

void fault_wrong(const char *format, ...)
{
    char text[2048];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    print_error("%s\n", text);
    wrongs++;
}

unsigned fault_wrongs(void)
{
    return wrongs;
}

void fault_check_file(const char *path, const char *where, bool tidied)
{
    const char *bad = world_check(path, where, tidied);

    if (bad)
        fault_wrong("%s", bad);
}

/* ---- what needs no open image ---------------------------------------------------------------- */

static void poke(const char *path, uint64_t offset, const void *from, size_t length)
{
    int fd = open(path, O_WRONLY);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, from, length, (off_t)offset), length);
    close(fd);
}

static void prepare_nothing(struct crash *c)
{
    unlink(c->top);
}

static int run_create(struct crash *c, struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = 4 * MIB};

    return image_create(c->top, &options, &c->recorder.observer, error);
}

static void verify_not_created(struct crash *c, const char *where)
{
    if (access(c->top, F_OK) == 0)
        fault_wrong("%s: half an image is left", where);
}

static void verify_created(struct crash *c, const char *where)
{
    fault_check_file(c->top, where, true);
    pcow_close(must_open(c->top, PCOW_OPEN_WRITE));
}

static void prepare_sealed(struct crash *c)
{
    pcow_image *image = must_open(c->top, PCOW_OPEN_WRITE);

    MUST(pcow_seal(image, &error));
    pcow_close(image);
}

static int run_unseal(struct crash *c, struct pcow_error *error)
{
    return image_unseal(c->top, &c->recorder.observer, error);
}

static void verify_readable(struct crash *c, const char *where)
{
    struct expectation expectation = {
        .world = {&c->now}, .worlds = 1, .first_generation = UINT16_MAX};
    char reasons[1200];
    pcow_image *image = must_open(c->top, 0);

    if (!world_compare(image, &expectation, reasons, sizeof reasons))
        fault_wrong("%s: %s", where, reasons);
    pcow_close(image);
}

static void verify_sealed_or_not(struct crash *c, const char *where)
{
    struct pcow_info info;
    pcow_image *image = must_open(c->top, 0);

    pcow_get_info(image, &info);
    pcow_close(image);
    c->now.sealed = info.sealed;
    verify_readable(c, where);
    c->now.sealed = false;
}

/* Taking s2 was interrupted behind its commit, and deleting s1 had begun to hide it. */
static void prepare_interrupted(struct crash *c)
{
    uint64_t open_word = layer_state_word(2, LAYER_OPEN, 0, 0),
             hidden = layer_state_word(1, LAYER_HIDDEN, 0, 0),
             stale = checksum_encode(CHECKSUM_STALE, 0),
             page = LAYER_TABLE_OFFSET / PCOW_PAGE_SIZE;

    poke(c->top, LAYER_TABLE_OFFSET + LAYER_RECORD_SIZE, &open_word, sizeof open_word);
    poke(c->top, LAYER_TABLE_OFFSET, &hidden, sizeof hidden);
    poke(c->top, mirror_offset(0, CHECKSUMS_PAGE) + page * sizeof stale, &stale, sizeof stale);
    world_remove(&c->now, "s1");
    world_remove(&c->now, "s2");
}

static int run_open(struct crash *c, struct pcow_error *error)
{
    int ret = image_open(c->top, PCOW_OPEN_WRITE, NULL, &c->recorder.observer, &c->image, error);

    pcow_close(c->image);
    c->image = NULL;
    return ret;
}

/* Damage that costs nothing: a word of the header, a counter, a free record, blocks of nobody. */
static void prepare_damaged(struct crash *c)
{
    uint64_t junk = 0x4711, next = word_encode(2);

    poke(c->top, offsetof(struct header, generation), &junk, sizeof junk);
    poke(c->top, offsetof(struct header, next_layer_id), &next, sizeof next);
    poke(c->top, HEADER_COPY_OFFSET + 30, &junk, sizeof junk);
    poke(c->top, UINT64_C(20) << SLAB_BITS, &junk, sizeof junk);
}

static int run_repair(struct crash *c, struct pcow_error *error)
{
    struct pcow_check_result result;

    return check_file(&(struct check_request){.path = c->top,
                                              .flags = PCOW_CHECK_REPAIR,
                                              .result = &result,
                                              .error = error,
                                              .observer = &c->recorder.observer});
}

static void verify_nothing(struct crash *c, const char *where)
{
    (void)c;
    (void)where;
}

static void verify_whole(struct crash *c, const char *where)
{
    fault_check_file(c->top, where, true);
    verify_readable(c, where);
}

static const struct {
    const char *name;
    void (*prepare)(struct crash *c);
    int (*run)(struct crash *c, struct pcow_error *error);
    void (*failed)(struct crash *c, const char *where);
    void (*done)(struct crash *c, const char *where);
    bool leaves_blocks;                        /* that it cannot punch out, to the next writer */
    /* when it is done, which brings the mirror up to date, or leaves that to the next writer */
    bool closes;
} file_operations[] = {
    {"create", prepare_nothing, run_create, verify_not_created, verify_created, false, false},
    {"unseal", prepare_sealed, run_unseal, verify_sealed_or_not, verify_whole, false, true},
    {"open after a crash", prepare_interrupted, run_open, verify_readable, verify_whole, true,
     true},
    {"check -r", prepare_damaged, run_repair, verify_nothing, verify_whole, false, false},
};

const size_t fault_file_operation_count = sizeof file_operations / sizeof file_operations[0];

static bool one_file_fault(size_t i, unsigned call, int code, unsigned n,
                           enum pcow_persistence persistence)
{
    struct pcow_error error = {0};
    struct crash c;
    char where[200];
    bool passed;
    int ret;

    crash_prepare(&c, crash_two_snapshots, persistence);
    recorder_init(&c.recorder, persistence);
    file_operations[i].prepare(&c);
    snprintf(where, sizeof where, "%s, %s: call %u of %s fails with %s", file_operations[i].name,
             pcow_persistence_name(persistence), n, fault_calls[call].name, strerror(-code));
    c.recorder.injecting = true;
    recorder_fail(&c.recorder, fault_calls[call].what, code, n);
    ret = file_operations[i].run(&c, &error);
    passed = recorder_fail_no_more(&c.recorder) < n;
    if (!passed && ret == 0 && file_operations[i].leaves_blocks
        && fault_calls[call].what == OBSERVED_PUNCH)
        pcow_close(must_open(c.top, PCOW_OPEN_WRITE));
    else if (!passed && ret == 0 && file_operations[i].closes
             && (fault_calls[call].what == OBSERVED_SYNC
                 || fault_calls[call].what == OBSERVED_WRITE))
        pcow_close(must_open(c.top, PCOW_OPEN_WRITE));
    else if (passed != (ret == 0) || (ret && (error.code != ret || strlen(error.message) < 10)))
        fault_wrong("%s: returned %d '%s'", where, ret, error.message);
    if (ret) {
        file_operations[i].failed(&c, where);
        ret = file_operations[i].run(&c, &error);
        if (ret)
            fault_wrong("%s: then again: %s", where, error.message);
    }
    file_operations[i].done(&c, where);
    crash_free(&c);
    unlink(c.top);
    return passed;
}

unsigned fault_files(enum pcow_persistence persistence)
{
    unsigned faults = 0;

    for (size_t i = 0; i < sizeof file_operations / sizeof file_operations[0]; i++)
        for (unsigned call = 0; call < FAULT_CALLS; call++)
            for (unsigned code = 0; code < 2; code++)
                for (unsigned n = 1;
                     !one_file_fault(i, call, fault_calls[call].code[code], n, persistence); n++)
                    faults++;
    return faults;
}
