/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a media error took and must not be lost by the next writer, nor by a repair that cannot
 * know.
 */
#include "check_support.h"

#define WORD(field) offsetof(struct header, field)

/* Snapshot s2 becomes a leaf: the active layer stands on s1. */
static void make_leaf(void)
{
    uint64_t seed = 9;
    pcow_image *image;

    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_revert(image, "s1", &error));
    memcpy(content[2], content[0], SIZE);
    write_pages(image, content[2], 700, 3, &seed);
    pcow_close(image);
}

/* A writer would give the snapshot's slabs to others; the repair keeps what it held. */
static void expect_leaf_saved(void)
{
    pcow_image *image;

    MUST_FAIL(-EBADMSG, pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error));
    expect_repair("layer 2 has no record");
    expect_view("s1", 0);
    expect_view(NULL, 2);
    /* What it held itself; nothing tells which layer it stood on. */
    MUST(pcow_open(IMAGE, 0, "recovered-2", &image, &error));
    assert_reads(image, 600 * 4096, content[1] + 600 * 4096, 8 * 4096);
    pcow_close(image);
    expect_usable();
}

static void test_lost_record_of_a_leaf(void **state)
{
    uint8_t zeros[LAYER_RECORD_SIZE] = {0};

    (void)state;
    make_leaf();
    poke(record_offset(1, 0), zeros, sizeof zeros);
    /* What is there can be read. */
    expect_view("s1", 0);
    expect_view(NULL, 2);
    expect_leaf_saved();
}

/* Where the record of a snapshot is now. */
static uint32_t find_record(uint32_t id)
{
    for (uint32_t slot = 0; slot < 16; slot++) {
        uint64_t state;

        peek(record_offset(slot, 0), &state, sizeof state);
        if ((word_value(state) & MAX_LAYER_ID) == id
            && (word_value(state) >> 28 & 0xf) == LAYER_SNAPSHOT)
            return slot;
    }
    fail_msg("layer %u has no record", id);
    return 0;
}

/*
 * Nothing that a rename leaves tells of a deletion; what earlier versions left goes with the next
 * writer.
 */
static void test_lost_record_of_a_renamed_leaf(void **state)
{
    uint8_t zeros[LAYER_RECORD_SIZE] = {0};

    (void)state;
    for (unsigned earlier = 0; earlier < 2; earlier++) {
        pcow_image *image;
        uint32_t slot;

        make_leaf();
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        MUST(pcow_snapshot_rename(image, "s2", "renamed", &error));
        pcow_close(image);
        slot = find_record(LAYER_S2);
        assert_int_not_equal(slot, 1);
        if (earlier) {
            poke_word(record_offset(1, 0),
                      word_value(layer_state_word(LAYER_S2, LAYER_FREE, 0, 0)));
            expect_clean();
            pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
        }
        poke(record_offset(slot, 0), zeros, sizeof zeros);
        expect_leaf_saved();
    }
}

/*
 * The same slabs with a record that tells of the deletion: it was interrupted, and a writer
 * finishes it.
 */
static void test_interrupted_deletion_of_a_leaf(void **state)
{
    static const enum layer_state dead[] = {LAYER_FREE, LAYER_OPEN};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        make_leaf();
        poke_word(record_offset(1, 0), word_value(layer_state_word(LAYER_S2, dead[i], 0, 0)));
        assert_true(find_slab(OWNER_DATA, LAYER_S2, 1) > 0);
        pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
        assert_int_equal(find_slab(OWNER_DATA, LAYER_S2, 1), 0);
        expect_clean();
        expect_view("s1", 0);
        expect_view(NULL, 2);
    }
}

/*
 * What a repair gives back may be what an image stands on, which the lost word would have told.
 * Three ways to lose it: the state word, the record, and a record that says that it is dead.
 */
static void test_lost_record_that_an_image_stands_on(void **state)
{
    uint8_t zeros[LAYER_RECORD_SIZE] = {0};

    (void)state;
    for (unsigned damage = 0; damage < 3; damage++) {
        struct pcow_create_options options = {.base_snapshot = "s1"};
        const char *name = damage == 1 ? "recovered-1" : "s1";
        pcow_image *image;

        make_image();
        options.base = IMAGE;
        MUST(pcow_create(scratch("top.pcow"), &options, &error));
        if (damage == 0)
            flip(record_offset(0, 0), 0x40);
        else if (damage == 1)
            poke(record_offset(0, 0), zeros, sizeof zeros);
        else
            poke_word(record_offset(0, 0),
                      word_value(layer_state_word(LAYER_S1, LAYER_FREE, 0, 0)));
        run_check(PCOW_CHECK_REPAIR);
        expect_clean();
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        MUST_FAIL(-EBUSY, pcow_snapshot_delete(image, name, NULL, &error));
        pcow_close(must_open(scratch("top.pcow"), 0));
        /* The mark is a question only: nobody is hindered. */
        unlink(scratch("top.pcow"));
        MUST(pcow_snapshot_delete(image, name, NULL, &error));
        pcow_close(image);
        expect_clean();
    }
}

/* ---- the base -------------------------------------------------------------------------------- */

static uint8_t page[4096];

/*
 * The base holds a page; so does the image, another one. second: it was put on another base before.
 */
static void make_overlay(bool second)
{
    struct pcow_create_options options = {.base = scratch("base.pcow"), .no_mirror = true};
    pcow_image *image;

    unlink(IMAGE);
    unlink(scratch("base.pcow"));
    unlink(scratch("other.pcow"));
    memset(page, 7, sizeof page);
    image = must_create(scratch("base.pcow"), SIZE, 0, NULL);
    MUST(pcow_write(image, 0, page, sizeof page, &error));
    pcow_close(image);
    if (second) {
        pcow_close(must_create(scratch("other.pcow"), SIZE, 0, NULL));
        options.base = scratch("other.pcow");
    }
    MUST(pcow_create(IMAGE, &options, &error));
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    if (second)
        MUST(pcow_rebase(image, scratch("base.pcow"), NULL, true, NULL, NULL, &error));
    MUST(pcow_write(image, 8192, page, sizeof page, &error));
    pcow_close(image);
}

static void expect_base(void)
{
    pcow_image *image = must_open(IMAGE, 0);

    assert_non_null(pcow_base(image));
    assert_reads(image, 0, page, sizeof page);
    assert_reads(image, 8192, page, sizeof page);
    pcow_close(image);
}

static void test_base_slot_lost_twice(void **state)
{
    (void)state;
    make_overlay(false);
    flip(WORD(base_slot), 0x7f);
    flip(HEADER_COPY_OFFSET + WORD(base_slot), 0x7f);
    expect_repair("'base.pcow', which is taken");
    expect_base();
    /* The name is found in the copy only. */
    make_overlay(false);
    flip(WORD(base_slot), 0x7f);
    flip(WORD(base[0].name), 0x7f);
    flip(HEADER_COPY_OFFSET + WORD(base_slot), 0x7f);
    expect_repair("'base.pcow', which is taken");
    expect_base();
    /* No base was ever set. */
    make_image();
    flip(WORD(base_slot), 0x7f);
    flip(HEADER_COPY_OFFSET + WORD(base_slot), 0x7f);
    expect_repair("no base was ever set");
    expect_content();
    expect_usable();
}

static void expect_asks_for_the_base(const char *says)
{
    struct findings *found = run_check(PCOW_CHECK_REPAIR);
    pcow_image *image;

    assert_true(found->result.corruptions > found->result.corruptions_fixed);
    if (!strstr(found->text, says))
        fail_msg("'%s' is not in: %s", says, found->text);
    MUST_FAIL(-EBADMSG, pcow_open(IMAGE, 0, NULL, &image, &error));
    /* A second repair does not think better of it. */
    found = run_check(PCOW_CHECK_REPAIR);
    assert_true(found->result.corruptions > found->result.corruptions_fixed);
    MUST_FAIL(-EBADMSG, pcow_open(IMAGE, 0, NULL, &image, &error));
    /* The way out that they name. */
    image = must_open(IMAGE, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    MUST(pcow_rebase(image, scratch("base.pcow"), NULL, true, NULL, NULL, &error));
    pcow_close(image);
    expect_clean();
    expect_base();
}

static void test_only_the_user_knows_the_base(void **state)
{
    (void)state;
    make_overlay(true);
    flip(WORD(base_slot), 0x7f);
    flip(HEADER_COPY_OFFSET + WORD(base_slot), 0x7f);
    expect_asks_for_the_base("'other.pcow' or 'base.pcow'");
    make_overlay(false);
    flip(WORD(base_slot), 0x7f);
    flip(WORD(base[0].name), 0x7f);
    flip(HEADER_COPY_OFFSET + WORD(base_slot), 0x7f);
    flip(HEADER_COPY_OFFSET + WORD(base[0].name), 0x7f);
    expect_asks_for_the_base("there was a base");
}

/*
 * A media error of one block that was cleared: the words are zeros, the checksum of what lies
 * before them still fits.
 */
static void test_wiped_words(void **state)
{
    uint8_t zeros[256] = {0};

    (void)state;
    make_overlay(false);
    poke(WORD(active_layer), zeros, sizeof zeros);
    expect_repair("base_slot");
    expect_base();
    make_overlay(false);
    poke(WORD(active_layer), zeros, sizeof zeros);
    poke(HEADER_COPY_OFFSET + WORD(active_layer), zeros, sizeof zeros);
    expect_repair("'base.pcow', which is taken");
    expect_base();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_lost_record_of_a_leaf, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_lost_record_of_a_renamed_leaf, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_interrupted_deletion_of_a_leaf, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_lost_record_that_an_image_stands_on, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_base_slot_lost_twice, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_only_the_user_knows_the_base, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_wiped_words, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
