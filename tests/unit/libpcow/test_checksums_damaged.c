/* SPDX-License-Identifier: BSD-3-Clause */
/* No checksum is made anew of what is known to be damaged. */
#include "summed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum loss { ENTRY_ZERO, PAGE_ZERO, ENTRY_BROKEN, DATA_OTHER, LOSSES };

/* The first slab of "one": its checksum is lost and its data damaged, or only that. */
static void damage_one(enum loss loss, uint32_t layer, uint32_t number)
{
    static const uint8_t zeros[PAGE];
    uint64_t slab = slab_of(layer, number, OWNER_DATA);

    flip((slab << SLAB_BITS) + 3 * PAGE);
    if (loss == ENTRY_ZERO)
        must_transfer(IMAGE, (void *)zeros, 64, datasum_offset(slab), true);
    else if (loss == PAGE_ZERO)
        must_transfer(IMAGE, (void *)zeros, PAGE, datasum_offset(0), true);
    else if (loss == ENTRY_BROKEN)
        flip(datasum_offset(slab) + 12);
}

static int make_again(const char *snapshot, unsigned flags, bool beside, char *said)
{
    struct pcow_error error = {0};
    pcow_image *image = beside ? open_at(snapshot) : must_open(IMAGE, PCOW_OPEN_WRITE);
    int ret;

    findings.text[0] = 0;
    ret = beside ? pcow_checksum_beside_writer(image, flags, add_finding, NULL, &findings, &error)
                 : pcow_checksum(image, snapshot, flags, add_finding, NULL, &findings, &error);
    pcow_close(image);
    if (said)
        strcpy(said, error.message);
    return ret;
}

/* Nothing is made of it, it is named, and it stays found; until somebody accepts it. */
static void test_damage_of_snapshots_is_not_blessed(void **state)
{
    static const char *const words[] = {"its checksum is gone", "its checksum is gone",
                                        "its checksum is damaged", "it is not what its checksum"};
    char said[sizeof((struct pcow_error *)0)->message];

    (void)state;
    for (unsigned beside = 0; beside < 2; beside++) {
        for (enum loss loss = 0; loss < LOSSES; loss++) {
            uint64_t before;

            unlink(IMAGE);
            make_image();
            checksum("two", false);
            damage_one(loss, 1, 0);
            before = verify().corruptions;
            assert_int_equal(before, loss == PAGE_ZERO ? 8 : 1);
            assert_int_equal(make_again("two", 0, beside, said), -EUCLEAN);
            assert_non_null(strstr(findings.text, "the 2 MiB from guest byte 0 of snapshot 'one'"));
            assert_non_null(strstr(findings.text, words[loss]));
            assert_non_null(strstr(said, words[loss]));
            assert_int_equal(verify().corruptions, before);
            assert_int_equal(make_again("two", PCOW_CHECKSUM_ACCEPT_DAMAGE, beside, NULL), 0);
            assert_int_equal(verify().corruptions, 0);
            assert_int_equal(make_again("two", 0, beside, NULL), 0);
        }
    }
}

/* Killed when the old one is dropped and the new one not published: it is still found. */
static void test_killed_while_damage_is_accepted(void **state)
{
    uint64_t done = 8 * PCOW_SLAB_SIZE;        /* with VM state, the last but one of nine */
    pid_t child;

    (void)state;
    make_image();
    checksum("two", false);
    damage_one(DATA_OTHER, 1, 0);
    child = fork();
    if (child == 0) {
        struct pcow_error error;
        pcow_image *image;

        if (!pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error))
            pcow_checksum(image, "two", PCOW_CHECKSUM_ACCEPT_DAMAGE, NULL, kill_after, &done,
                          &error);
        _exit(1);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(entry_word(slab_of(1, 0, OWNER_DATA)), 0);
    assert_int_equal(make_again("two", 0, false, NULL), -EUCLEAN);
    expect_found("guest byte 0 of snapshot 'one'", "its checksum is gone", 0, 0);
    assert_int_equal(make_again("two", PCOW_CHECKSUM_ACCEPT_DAMAGE, false, NULL), 0);
    expect_verified(ONE + TWO, ACTIVE);
}

/* One snapshot of several is told once: by its own turn. */
static void test_damage_is_told_once(void **state)
{
    (void)state;
    make_image();
    checksum("two", false);
    damage_one(ENTRY_ZERO, 1, 0);
    assert_int_equal(make_again("two", PCOW_CHECKSUM_COMPARE_OWN, true, NULL), 0);
    assert_int_equal(make_again("one", PCOW_CHECKSUM_COMPARE_OWN, true, NULL), -EUCLEAN);
    assert_int_equal(verify().corruptions, 1);
}

/* unseal keeps what the header says until somebody has changed something. */
static void test_damage_of_a_template_is_not_blessed(void **state)
{
    pcow_image *image;

    (void)state;
    for (enum loss loss = 0; loss < LOSSES; loss++) {
        uint64_t before;

        unlink(IMAGE);
        make_image();
        seal();
        damage_one(loss, 3, 6);
        before = verify().corruptions;
        assert_int_equal(before, loss == PAGE_ZERO ? 11 : 1);
        MUST(pcow_unseal(IMAGE, &error));
        assert_int_equal(verify().corruptions, before);
        assert_int_equal(make_again(NULL, PCOW_CHECKSUM_ACTIVE, false, NULL), -EUCLEAN);
        assert_non_null(
            strstr(findings.text, "the 2 MiB from guest byte 12582912 of the active layer"));
        assert_int_equal(verify().corruptions, before);
        assert_int_equal(
            make_again(NULL, PCOW_CHECKSUM_ACTIVE | PCOW_CHECKSUM_ACCEPT_DAMAGE, false, NULL),
            0);
        expect_verified(ALL, 0);
        /* A writer that comes drops some, which is no damage. */
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        store(image, 6, 3, 0x66);
        pcow_close(image);
        expect_verified(ALL - 2 * PAGE, 2 * PAGE);
        seal();
        expect_verified(ALL, 0);
    }
}

/* A seal without checksums forgets nothing either. */
static void test_plain_seal_keeps_what_is_gone(void **state)
{
    pcow_image *image;

    (void)state;
    make_image();
    seal();
    damage_one(ENTRY_ZERO, 3, 6);
    for (unsigned i = 0; i < 2; i++) {
        MUST(pcow_unseal(IMAGE, &error));
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        MUST(pcow_seal(image, &error));
        pcow_close(image);
        assert_int_equal(verify().corruptions, 1);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_damage_of_snapshots_is_not_blessed),
        TEST(test_killed_while_damage_is_accepted),
        TEST(test_damage_is_told_once),
        TEST(test_damage_of_a_template_is_not_blessed),
        TEST(test_plain_seal_keeps_what_is_gone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
