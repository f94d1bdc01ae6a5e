/* SPDX-License-Identifier: BSD-3-Clause */
/* What a repair drops of the checksums of data is not missed for ever. */
#include "summed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* A repair frees slabs and takes pages out of others. */
static void test_repair_drops_them(void **state)
{
    struct owner owner = {OWNER_DATA, 3, 2};
    uint64_t slab, word = owner_encode(owner);
    struct pcow_check_result result;
    static const uint64_t stale[512];

    (void)state;
    make_image();
    checksum(NULL, true);
    slab = slab_of(3, 6, OWNER_DATA);
    /* two slabs for the same 2 MiB, in a file whose mirror cannot tell */
    must_transfer(IMAGE, &word, sizeof word, owner_offset(slab), true);
    must_transfer(IMAGE, (void *)stale, sizeof stale, mirror_offset(0, CHECKSUMS_PAGE), true);
    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, NULL, NULL, &result,
                    &error));
    assert_true(result.corruptions > 0 && result.corruptions == result.corruptions_fixed);
    must_be_clean(IMAGE);
    /* it is another's now, which its checksum tells */
    assert_true(verify().corruptions <= 1);
}

static bool all_had_checksums(void)
{
    pcow_image *image = must_open(IMAGE, 0);
    struct pcow_info info;

    pcow_get_info(image, &info);
    pcow_close(image);
    return info.checksums;
}

static void repair(void)
{
    struct pcow_check_result result;

    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, NULL, NULL, &result,
                    &error));
    unlink(scratch("image.pcow.rescue"));
    must_be_clean(IMAGE);
}

/* What a repair drops is not missed for ever; what was lost before is. */
static void test_repair_of_a_sealed_image(void **state)
{
    uint64_t slab, last = 0, zero = 0;
    struct owner owner;
    uint8_t junk = 1;

    (void)state;
    make_image();
    seal();
    for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
        last = slab;
    must_transfer(IMAGE, &junk, 1, (last + 1) << SLAB_BITS, true);
    must_transfer(IMAGE, &zero, sizeof zero, datasum_offset(slab_of(1, 0, OWNER_DATA)), true);
    repair();
    assert_true(all_had_checksums());
    assert_int_equal(verify().corruptions, 1);
    assert_non_null(strstr(findings.text, "its checksum is gone"));
    unlink(IMAGE);
    make_image();
    seal();
    assert_int_equal(truncate(IMAGE, (off_t)((last << SLAB_BITS) + 4 * PAGE)), 0);
    repair();
    assert_false(all_had_checksums());
    assert_int_equal(verify().corruptions, 0);
}

/* Wherever a repair is killed, the next one leaves no checksum that is missed for ever. */
static void test_interrupted_repair(void **state)
{
    unsigned step = 0;
    bool killed;

    (void)state;
    do {
        struct owner owner;
        uint64_t slab, last = 0;

        unlink(IMAGE);
        make_image();
        seal();
        for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
            last = slab;
        assert_int_equal(truncate(IMAGE, (off_t)((last << SLAB_BITS) + 4 * PAGE)), 0);
        killed = repair_until(step++);
        repair();
        unlink(scratch("image.pcow.rescue-2"));
        if (verify().corruptions)
            fail_msg("killed at step %u: %s", step - 1, findings.text);
        assert_false(all_had_checksums());
    } while (killed);
    print_message("killed at %u steps\n", step - 1);
    assert_true(step > 5);
}

/* What is a mere leak costs no checksum, so an interrupted repair of it costs no promise. */
static void test_interrupted_repair_of_a_leak(void **state)
{
    unsigned step = 0;
    bool killed;

    (void)state;
    do {
        struct owner owner;
        uint64_t slab, last = 0;
        uint8_t junk = 1;

        unlink(IMAGE);
        make_image();
        seal();
        for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
            last = slab;
        must_transfer(IMAGE, &junk, 1, (last + 1) << SLAB_BITS, true);
        killed = repair_until(step++);
        repair();
        assert_int_equal(verify().corruptions, 0);
        if (!all_had_checksums())
            fail_msg("killed at step %u: the promise is gone", step - 1);
    } while (killed);
    assert_true(step > 2);
}

/* Does the file still end before each slab that it says to have? */
static bool cut_is_seen(void)
{
    uint64_t words[64];
    int fd = open(IMAGE, O_RDONLY | O_CLOEXEC);
    off_t size = lseek(fd, 0, SEEK_END);
    bool seen = true;

    assert_int_equal(pread(fd, words, sizeof words, SLAB_TABLE_OFFSET), sizeof words);
    close(fd);
    for (unsigned slab = MIRROR_HEADS; slab < 64; slab++)
        seen = seen && (!words[slab] || size <= (off_t)slab << SLAB_BITS);
    return seen;
}

/* Cut inside of the metadata, wherever the repair is killed: nothing reads as zeros unseen. */
static void test_interrupted_repair_of_a_cut(void **state)
{
    static const off_t length[] = {2 * MIB + 3 * PAGE, 3 * MIB, 5 * MIB};
    unsigned step = 0, run = 0;
    uint8_t junk = 0xee;

    (void)state;
    while (run < 2 * sizeof length / sizeof *length) {
        bool killed;

        unlink(IMAGE);
        make_image();
        if (run & 1)
            seal();
        /* To repair the header marks its page in the mirror, which is gone. */
        must_transfer(IMAGE, &junk, 1, 16, true);
        assert_int_equal(truncate(IMAGE, length[run / 2]), 0);
        killed = repair_until(step++);
        if (!cut_is_seen())
            fail_msg("cut at %lld, killed at step %u: the cut is not seen any more",
                     (long long)length[run / 2], step - 1);
        repair();
        unlink(scratch("image.pcow.rescue-2"));
        if (!killed) {
            step = 0;
            run++;
        }
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_repair_drops_them),
        TEST(test_repair_of_a_sealed_image),
        TEST(test_interrupted_repair),
        TEST(test_interrupted_repair_of_a_leak),
        TEST(test_interrupted_repair_of_a_cut),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
