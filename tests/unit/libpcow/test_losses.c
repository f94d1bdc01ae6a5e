/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a repair loses is told before it, to the byte, and nothing else is lost by it: a rich image,
 * damaged in many ways, and what was written to it.
 */
#include "checking.h"
#include "rich.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define IMAGE scratch("image.pcow")

static struct rich *rich;

struct told {
    struct findings said;                      /* the first: add_finding() has a pointer to all */
    struct pcow_check_result result;
    uint64_t bytes;                            /* of all ranges */
};

/* Each range is what the layer it is said to be of has written there. */
static void add_loss(void *opaque, const struct pcow_loss *loss)
{
    struct told *told = opaque;

    told->bytes += loss->length;
    if (loss->layer > RICH_LAYERS)
        fail_msg("layer %u\n%s", loss->layer, told->said.text);
    assert_true(loss->length == 0 || loss->kind <= PCOW_LOSS_STATE);
    assert_int_equal(loss->file_offset == PCOW_NOWHERE, loss->content == 0);
    if (loss->kind != PCOW_LOSS_DATA || loss->guest_offset == PCOW_NOWHERE)
        return;
    assert_int_equal(loss->length % PCOW_PAGE_SIZE, 0);
    for (uint64_t at = 0; at < loss->length; at += PCOW_PAGE_SIZE)
        if (!rich->layer[loss->layer].page[(loss->guest_offset + at) / PCOW_PAGE_SIZE]
            && told->result.lost_certainty == PCOW_EXACT && loss->content)
            fail_msg("page %llu of layer %u was never written",
                     (unsigned long long)(loss->guest_offset + at) / PCOW_PAGE_SIZE, loss->layer);
}

static struct told *look(unsigned flags)
{
    static struct told told;

    memset(&told, 0, sizeof told);
    MUST(pcow_check_losses(IMAGE, flags, add_finding, add_loss, &told, &told.result, &error));
    assert_int_equal(told.bytes, told.result.lost_size);
    return &told;
}

static void poke(uint64_t offset, const void *from, size_t length)
{
    int fd = open(IMAGE, O_WRONLY);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, from, length, (off_t)offset), length);
    close(fd);
}

/*
 * What is lost, is said to be, before and after; nothing is changed while it is refused; and after
 * the repair the image is clean. refused_by_open: what is lost reads as an error, not as the base's
 * bytes.
 */
static struct told *expect(const char *what, uint64_t least, uint64_t most,
                           enum pcow_certainty certainty, bool refused_by_open)
{
    static struct told before;
    struct told *after;
    struct stat unchanged, now;
    pcow_image *image;
    int ret;

    before = *look(0);
    if (before.result.lost_size < least || before.result.lost_size > most
        || before.result.lost_certainty != certainty)
        fail_msg("%s: %llu bytes are said to be lost (%d), not %llu to %llu (%d)\n%s", what,
                 (unsigned long long)before.result.lost_size, before.result.lost_certainty,
                 (unsigned long long)least, (unsigned long long)most, certainty, before.said.text);
    if (before.result.losses && !before.result.corruptions && !before.result.leaks_doubtful)
        fail_msg("%s: what may be data is said to be a mere leak\n%s", what, before.said.text);
    ret = pcow_open(IMAGE, 0, NULL, &image, NULL);
    if (!ret)
        pcow_close(image);
    if (refused_by_open != (ret == -EBADMSG))
        fail_msg("%s: open says %d\n%s", what, ret, before.said.text);
    if (before.result.losses) {
        assert_int_equal(stat(IMAGE, &unchanged), 0);
        after = look(PCOW_CHECK_REPAIR);
        assert_true(after->result.refused);
        assert_int_equal(after->result.lost_size, before.result.lost_size);
        assert_int_equal(after->result.corruptions_fixed + after->result.leaks_fixed, 0);
        assert_int_equal(stat(IMAGE, &now), 0);
        assert_int_equal(unchanged.st_size, now.st_size);
        assert_int_equal(unchanged.st_blocks, now.st_blocks);
        assert_memory_equal(&unchanged.st_mtim, &now.st_mtim, sizeof now.st_mtim);
        assert_int_equal(access(scratch("image.pcow.rescue"), F_OK), -1);
    }
    after = look(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS);
    assert_false(after->result.refused);
    assert_int_equal(after->result.lost_size, before.result.lost_size);
    assert_int_equal(after->result.losses, before.result.losses);
    assert_string_equal(after->result.rescue_suffix, before.result.losses ? ".rescue" : "");
    assert_int_equal(after->result.corruptions, after->result.corruptions_fixed);
    after = look(0);
    if (after->result.corruptions || after->result.leaks || after->result.losses)
        fail_msg("%s: after the repair: %s", what, after->said.text);
    pcow_close(must_open(IMAGE, 0));
    return &before;
}

static void test_healthy(void **state)
{
    (void)state;
    rich_put_back(rich);
    expect("healthy", 0, 0, PCOW_EXACT, false);
    rich_expect_rest(rich, rich->size);
    assert_int_equal(rich_behind(rich, 0), rich_data(rich) + rich_states(rich));
}

/* Of 2 MiB and above every byte is known; below, the bitmaps go, then the records and the words. */
static void test_truncation(void **state)
{
    const uint64_t all = rich_data(rich) + rich_states(rich),
                   records = LAYER_TABLE_OFFSET + RICH_LAYERS * LAYER_RECORD_SIZE;

    (void)state;
    for (uint64_t length = 64 * KIB; length < rich->size; length += 64 * KIB) {
        uint64_t lost = rich_behind(rich, length);
        char what[64];

        snprintf(what, sizeof what, "cut at %llu KiB", (unsigned long long)(length / KIB));
        rich_put_back(rich);
        assert_int_equal(truncate(IMAGE, (off_t)length), 0);
        if (length > BITMAP_OFFSET) {
            expect(what, lost, lost, PCOW_EXACT, length % PCOW_SLAB_SIZE || lost);
            if (length % MIB == 0)
                rich_expect_rest(rich, length);
        } else if (length > records) {
            assert_int_equal(lost, all);
            expect(what, all, rich->size, PCOW_AT_MOST, true);
        } else if (length > LAYER_TABLE_OFFSET - 64 * KIB) {
            expect(what, rich_data(rich), rich->size, PCOW_AT_MOST, true);
        } else {
            expect(what, 0, rich->size, PCOW_ESTIMATE, true);
        }
    }
}

/* ---- 4 KiB ----------------------------------------------------------------------------------- */

enum fill { ZEROS, ONES, RANDOM, FILLS };
static const char *const fill_name[] = {"zeros", "ones", "random bytes"};

static void fill_page(uint64_t offset, enum fill fill)
{
    uint8_t page[PCOW_PAGE_SIZE];
    uint64_t seed = offset + 77;

    memset(page, fill == ONES ? 0xff : 0, sizeof page);
    if (fill == RANDOM)
        fill_pattern(page, sizeof page, &seed);
    rich_put_back(rich);
    poke(offset, page, sizeof page);
}

/* What bitmaps say of slabs whose owner is gone: also of free ones, what their last owner left. */
static uint64_t said_by_bitmaps(void)
{
    uint64_t pages = 0;

    for (uint64_t slab = 1; slab < rich->slabs; slab++)
        if (rich->owner[slab].kind != OWNER_STATE)
            pages += page_set_count(&rich->valid[slab]);
    return pages * PCOW_PAGE_SIZE;
}

static void test_slab_table(void **state)
{
    const uint64_t all = rich_data(rich) + rich_states(rich),
                   most = said_by_bitmaps() + rich_states(rich);

    (void)state;
    for (enum fill fill = ZEROS; fill < FILLS; fill++) {
        fill_page(SLAB_TABLE_OFFSET, fill);
        /* Zeros are words of slabs that are free: what is there is read no more. */
        expect(fill_name[fill], all, most, PCOW_ESTIMATE, fill != ZEROS);
        /* Nothing is owned there. */
        fill_page(SLAB_TABLE_OFFSET + PCOW_PAGE_SIZE, fill);
        expect(fill_name[fill], 0, 0, PCOW_EXACT, fill != ZEROS);
        rich_expect_rest(rich, rich->size);
    }
}

static void test_owner_words(void **state)
{
    const uint64_t junk = UINT64_C(0x1234567812345678);

    (void)state;
    for (uint64_t slab = 1; slab < rich->slabs; slab++) {
        const struct owner *owner = &rich->owner[slab];
        uint64_t lost = owner->kind == OWNER_STATE
                            ? rich->layer[owner->layer].state_size
                            : page_set_count(&rich->valid[slab]) * PCOW_PAGE_SIZE;

        rich_put_back(rich);
        poke(owner_offset(slab), &junk, sizeof junk);
        expect("an owner word", lost, lost,
               owner->kind == OWNER_STATE ? PCOW_ESTIMATE
               : lost == 0                ? PCOW_EXACT
                                          : PCOW_AT_MOST,
               true);
    }
}

static void test_bitmaps(void **state)
{
    const uint64_t all = rich_data(rich);

    (void)state;
    fill_page(BITMAP_OFFSET, ZEROS);
    expect("bitmaps", all, all, PCOW_ESTIMATE, false);
}

static void test_records(void **state)
{
    (void)state;
    for (enum fill fill = ZEROS; fill < FILLS; fill++) {
        struct told *told;

        fill_page(LAYER_TABLE_OFFSET, fill);
        told = expect(fill_name[fill], 0, 0, PCOW_EXACT, true);
        assert_in_range(told->result.losses, RICH_LAYERS - 1, 64);
        fill_page(LAYER_TABLE_OFFSET + PCOW_PAGE_SIZE, fill);
        told = expect(fill_name[fill], 0, 0, PCOW_EXACT, false);
        rich_expect_rest(rich, rich->size);
    }
}

static int setup(void **state)
{
    int ret = scratch_setup(state);

    rich = rich_make(false);
    return ret;
}

static int teardown(void **state)
{
    rich_free(rich);
    return scratch_teardown(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_healthy),    cmocka_unit_test(test_truncation),
        cmocka_unit_test(test_slab_table), cmocka_unit_test(test_owner_words),
        cmocka_unit_test(test_bitmaps),    cmocka_unit_test(test_records),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
