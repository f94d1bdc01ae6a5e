/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * pcow_check(): the header, the length of the file, slabs and VM state. Layer records:
 * test_check_layers.c.
 */
#include "check_support.h"

#include "check/check.h"

static void test_healthy_image(void **state)
{
    struct findings *found;

    (void)state;
    make_image();
    found = run_check(0);
    assert_int_equal(found->count, 0);
    assert_int_equal(found->result.slabs_used, 6);
    assert_true(found->result.slabs >= 6);
    found = run_check(PCOW_CHECK_REPAIR);
    assert_int_equal(found->count, 0);
    expect_content();
    expect_usable();
}

static void test_locks(void **state)
{
    struct pcow_check_result result;
    pcow_image *image;

    (void)state;
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST_FAIL(-EBUSY, pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    MUST_FAIL(-EBUSY, pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
    MUST(pcow_check(IMAGE, PCOW_CHECK_FORCE_SHARE, NULL, NULL, &result, &error));
    MUST_FAIL(-EINVAL, pcow_check(IMAGE, PCOW_CHECK_FORCE_SHARE | PCOW_CHECK_REPAIR, NULL, NULL,
                                  &result, &error));
    pcow_close(image);
    image = must_open(IMAGE, 0);
    MUST(pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    MUST_FAIL(-EBUSY, pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
    pcow_close(image);
}

static void test_foreign_files(void **state)
{
    struct pcow_check_result result;
    char zeros[8192] = {0};
    int fd;

    (void)state;
    MUST_FAIL(-ENOENT, pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    MUST_FAIL(-EMEDIUMTYPE, pcow_check(scratch_directory(), 0, NULL, NULL, &result, &error));
    fd = open(IMAGE, O_RDWR | O_CREAT, 0600);
    MUST_FAIL(-EMEDIUMTYPE, pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    assert_int_equal(write(fd, zeros, sizeof zeros), sizeof zeros);
    close(fd);
    MUST_FAIL(-EMEDIUMTYPE, pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
    make_image();
    poke(0, zeros, sizeof zeros);
    MUST_FAIL(-EMEDIUMTYPE, pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
}

static void test_unknown_features(void **state)
{
    struct pcow_check_result result;
    struct header header;

    (void)state;
    make_image();
    peek(0, &header, sizeof header);
    header.incompatible_features = 4;
    header.crc = header_crc(&header);
    poke(0, &header, sizeof header);
    MUST_FAIL(-ENOTSUP, pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    header.incompatible_features = 0;
    header.read_only_compatible_features |= 1 << 7;
    header.crc = header_crc(&header);
    poke(0, &header, sizeof header);
    poke(HEADER_COPY_OFFSET, &header, sizeof header);
    MUST(pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
    MUST_FAIL(-ENOTSUP, pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
}

static void test_every_byte_of_the_header(void **state)
{
    (void)state;
    /* Every byte of the fields, and some of those that are reserved. */
    for (unsigned offset = 0; offset < 560; offset += offset < 96 || offset >= 504 ? 1 : 34) {
        make_image();
        flip(offset, 0x15);
        expect_repair("header");
        expect_view(NULL, 2);
        if (offset % 4)
            continue;
        make_image();
        flip(HEADER_COPY_OFFSET + offset, 0x51);
        expect_repair("copy");
        expect_content();
    }
    expect_usable();
}

static void test_wiped_header(void **state)
{
    uint8_t junk[HEADER_SIZE];

    (void)state;
    for (unsigned fill = 0; fill < 256; fill += 51) {
        memset(junk, (int)fill, sizeof junk);
        make_image();
        poke(0, junk, sizeof junk);
        expect_repair("header");
        expect_content();
        make_image();
        poke(HEADER_COPY_OFFSET, junk, sizeof junk);
        expect_repair("copy");
        expect_content();
    }
    expect_usable();
}

static void test_copy_of_another_header(void **state)
{
    struct header header;

    (void)state;
    make_image();
    peek(0, &header, sizeof header);
    header.uuid[3] ^= 1;
    header.crc = header_crc(&header);
    poke(HEADER_COPY_OFFSET, &header, sizeof header);
    expect_repair("another image");
    expect_content();
    expect_usable();
}

static void make_overlay(void)
{
    struct pcow_create_options options = {.base = scratch("base.pcow"), .no_mirror = true};
    uint8_t page[4096];

    pcow_close(must_create(scratch("base.pcow"), SIZE, 0, NULL));
    MUST(pcow_create(IMAGE, &options, &error));
    memset(page, 7, sizeof page);
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    MUST(pcow_write(image, 4096, page, sizeof page, &error));
    pcow_close(image);
}

static void test_record_of_the_base(void **state)
{
    const uint64_t name = offsetof(struct header, base[0].name);
    struct findings *found;
    pcow_image *image;

    (void)state;
    make_overlay();
    flip(name + 2, 0x20);
    expect_repair("'base.pcow'");
    image = must_open(IMAGE, 0);
    assert_non_null(pcow_base(image));
    pcow_close(image);
    /* In the copy too: only the user knows, and the way out works. */
    flip(name + 2, 0x20);
    flip(HEADER_COPY_OFFSET + name + 2, 0x20);
    found = run_check(PCOW_CHECK_REPAIR);
    assert_int_equal(found->result.corruptions, 1);
    assert_int_equal(found->result.corruptions_fixed, 0);
    assert_non_null(strstr(found->text, "rebase -u"));
    image = must_open(IMAGE, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    MUST(pcow_rebase(image, scratch("base.pcow"), NULL, true, NULL, NULL, &error));
    pcow_close(image);
    expect_clean();
    image = must_open(IMAGE, 0);
    assert_non_null(pcow_base(image));
    pcow_close(image);
}

/* ---- length ---------------------------------------------------------------------------------- */

static void test_appended_bytes(void **state)
{
    struct stat st;

    (void)state;
    make_image();
    assert_int_equal(stat(IMAGE, &st), 0);
    poke((uint64_t)st.st_size, "more", 4);
    expect_repair("length");
    expect_content();
    expect_usable();
}

static void test_cut_inside_a_slab(void **state)
{
    uint64_t slab;
    struct findings *found;

    (void)state;
    make_image();
    /*
     * The active layer's slab for guest slab 3 came last; it holds pages 2000 to 2004, that is 464
     * to 468 of the slab.
     */
    slab = find_slab(OWNER_DATA, LAYER_ACTIVE, 3);
    assert_int_equal(truncate(IMAGE, (off_t)((slab << SLAB_BITS) + 466 * 4096 + 100)), 0);
    found = expect_repair("ends inside");
    assert_int_equal(found->result.lost_size, 3 * 4096);
    memset(content[2] + 2002 * 4096, 0, 3 * 4096);
    expect_content();
    expect_usable();
}

static void test_cut_at_a_slab(void **state)
{
    uint64_t slab;
    struct findings *found;

    (void)state;
    make_image();
    slab = find_slab(OWNER_DATA, LAYER_ACTIVE, 3);
    assert_int_equal(truncate(IMAGE, (off_t)(slab << SLAB_BITS)), 0);
    found = expect_repair("behind the end of file");
    assert_int_equal(found->result.lost_size, 5 * 4096);
    memset(content[2] + 2000 * 4096, 0, 5 * 4096);
    expect_content();
    expect_usable();
}

static void test_only_metadata_left(void **state)
{
    struct findings *found;

    (void)state;
    make_image();
    assert_int_equal(truncate(IMAGE, 1536 * 1024), 0);
    found = expect_repair("length");
    assert_int_equal(found->result.lost_size, (20 + 512 + 2 + 8 + 4 + 5) * 4096);
    memset(content, 0, sizeof content);
    expect_content();
    expect_usable();
}

/* ---- slab table ------------------------------------------------------------------------------ */

static void test_damaged_owner_word(void **state)
{
    struct findings *found;

    (void)state;
    for (unsigned byte = 0; byte < 8; byte++) {
        make_image();
        flip(owner_offset(find_slab(OWNER_DATA, LAYER_S2, 1)) + byte, 0x42);
        found = expect_repair("owner word");
        assert_int_equal(found->result.lost_size, 8 * 4096);
        /* What s2 had written is gone; below it s1 shows through. */
        memcpy(content[1] + 600 * 4096, content[0] + 600 * 4096, 8 * 4096);
        memcpy(content[2] + 600 * 4096, content[0] + 600 * 4096, 8 * 4096);
        expect_content();
    }
    expect_usable();
}

static void test_impossible_owners(void **state)
{
    static const struct owner impossible[] = {
        {OWNER_NONE, LAYER_S1, 3}, {OWNER_DATA, LAYER_S1, MAX_GUEST_SLABS},
        {OWNER_DATA, 0, 3},        {OWNER_TABLE, 0, 0},
        {OWNER_TABLE, 0, 20},      {OWNER_STATE, 0, 0},
        {OWNER_DATA, 1000, 2},     {OWNER_DATA, MAX_LAYER_ID, 2},
    };

    (void)state;
    for (size_t i = 0; i < sizeof impossible / sizeof impossible[0]; i++) {
        uint64_t word = owner_encode(impossible[i]);

        make_image();
        poke(owner_offset(20), &word, sizeof word);
        expect_repair("file slab 20");
        expect_content();
        expect_usable();
    }
    make_image();
    poke_word(owner_offset(0), word_value(owner_encode((struct owner){OWNER_DATA, LAYER_S1, 3})));
    expect_repair("file slab 0");
    expect_content();
}

static void test_pages_held_twice(void **state)
{
    struct page_set valid = {{0}};
    uint64_t slab, word = owner_encode((struct owner){OWNER_DATA, LAYER_S2, 1});
    uint8_t page[4096];

    (void)state;
    make_image();
    slab = find_slab(OWNER_DATA, LAYER_S2, 1);
    /*
     * Pages 600 to 607 are 88 to 95 of guest slab 1. A second slab of the layer has some of them,
     * and others.
     */
    page_set_add_range(&valid, 94, 4);
    memset(page, 9, sizeof page);
    for (unsigned i = 94; i < 98; i++)
        poke((UINT64_C(20) << SLAB_BITS) + i * 4096, page, sizeof page);
    poke(bitmap_offset(20), &valid, sizeof valid);
    poke(owner_offset(20), &word, sizeof word);
    assert_true(slab < 20);
    for (unsigned view = 1; view < 3; view++)
        memset(content[view] + 606 * 4096, 9, 4 * 4096);
    expect_content();
    expect_repair("2 pages");
    expect_content();
    peek(bitmap_offset(slab), &valid, sizeof valid);
    assert_int_equal(page_set_count(&valid), 6);
    expect_usable();
}

/* ---- leaks ----------------------------------------------------------------------------------- */

static void expect_leaks(uint64_t leaks)
{
    struct findings *found = run_check(0);
    struct stat before, after;

    if (found->result.corruptions || found->result.leaks != leaks)
        fail_msg("%llu leaks expected: %s", (unsigned long long)leaks, found->text);
    stat(IMAGE, &before);
    found = run_check(PCOW_CHECK_REPAIR);
    assert_int_equal(found->result.corruptions, 0);
    assert_int_equal(found->result.leaks, leaks);
    assert_int_equal(found->result.leaks_fixed, leaks);
    assert_int_equal(found->result.lost_size, 0);
    stat(IMAGE, &after);
    assert_true(after.st_blocks < before.st_blocks);
    expect_content();
    expect_usable();
}

static void test_blocks_of_a_free_slab(void **state)
{
    uint8_t junk[65536];

    (void)state;
    make_image();
    memset(junk, 5, sizeof junk);
    poke((UINT64_C(10) << SLAB_BITS) + 4096, junk, sizeof junk);
    poke((UINT64_C(12) << SLAB_BITS), junk, sizeof junk);
    expect_leaks(2);
}

/* An owner word that is damaged, beside the leak that is there already. */
static void damage_an_owner(uint64_t slab)
{
    flip(owner_offset(slab), 0x10);
}

struct damager {
    struct observer observer;
    uint64_t slab;
};

static int damage_when_opened(struct observer *observer, const struct observation *observation)
{
    if (observation->what == OBSERVED_OPEN)
        damage_an_owner(((struct damager *)observer)->slab);
    return 0;
}

static int repair_leaks(struct observer *observer, struct pcow_check_result *result)
{
    return check_file(&(struct check_request){
        .path = IMAGE,
        .flags = PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS | PCOW_CHECK_LEAKS_ONLY,
        .result = result,
        .observer = observer,
    });
}

/* What is no leak stays as it is, also if it comes up between the look and the repair. */
static void test_leaks_only(void **state)
{
    struct damager damager = {.observer = {.look = damage_when_opened}};
    struct pcow_check_result result;
    uint8_t junk[65536];

    (void)state;
    make_image();
    damager.slab = find_slab(OWNER_DATA, LAYER_S2, 1);
    memset(junk, 5, sizeof junk);
    poke(UINT64_C(10) << SLAB_BITS, junk, sizeof junk);
    assert_int_equal(repair_leaks(&damager.observer, &result), -EAGAIN);
    assert_int_equal(access(scratch("image.pcow.rescue"), F_OK), -1);
    assert_int_equal(repair_leaks(NULL, &result), 0);
    assert_true(result.corruptions >= 1);
    assert_int_equal(result.corruptions_fixed + result.leaks_fixed, 0);
    assert_false(result.refused);
    assert_int_equal(run_check(0)->result.corruptions, result.corruptions);
    damage_an_owner(damager.slab);
    assert_int_equal(repair_leaks(NULL, &result), 0);
    assert_int_equal(result.leaks_fixed, 1);
    expect_content();
    expect_usable();
}

static void test_slabs_of_an_interrupted_operation(void **state)
{
    uint64_t word = owner_encode((struct owner){OWNER_DATA, 4, 2});
    uint8_t junk[4096] = {5};

    (void)state;
    make_image();
    /*
     * As revert leaves it: an open layer that is neither the active one nor its parent, with a
     * slab.
     */
    poke_word(record_offset(3, 8), LAYER_S1);
    poke_word(record_offset(3, 16), SIZE);
    poke_word(record_offset(3, 24), SIZE);
    poke_word(record_offset(3, 0), word_value(layer_state_word(4, LAYER_OPEN, 0, 0)));
    poke_word(offsetof(struct header, next_layer_id), 5);
    poke_word(offsetof(struct header, layer_slots), 4);
    poke(owner_offset(10), &word, sizeof word);
    poke(UINT64_C(10) << SLAB_BITS, junk, sizeof junk);
    expect_leaks(1);
}

/* ---- VM state -------------------------------------------------------------------------------- */

static uint8_t vm_state[5 * MIB];

static void make_image_with_state(void)
{
    uint64_t seed = 3;
    pcow_image *image;

    make_image();
    fill_pattern(vm_state, sizeof vm_state, &seed);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_write_state(image, "s1", 0, vm_state, sizeof vm_state, &error));
    MUST(pcow_snapshot_set_state_size(image, "s1", sizeof vm_state, &error));
    pcow_close(image);
}

static void expect_state(uint64_t size)
{
    pcow_image *image = must_open(IMAGE, 0);
    struct pcow_snapshot *list;
    uint8_t *buffer = malloc(sizeof vm_state);
    size_t count;

    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(list[0].state_size, size);
    free(list);
    if (size > sizeof vm_state)
        size = sizeof vm_state;
    MUST(pcow_snapshot_read_state(image, "s1", 0, buffer, size, &error));
    assert_memory_equal(buffer, vm_state, size);
    free(buffer);
    pcow_close(image);
}

static void test_vm_state(void **state)
{
    const uint64_t size_word = record_offset(0, offsetof(struct layer_record, state_size));
    uint8_t junk[4096] = {5};
    uint64_t word;

    (void)state;
    make_image_with_state();
    expect_clean();
    /* A piece is missing: half a state is none. */
    flip(owner_offset(find_slab(OWNER_STATE, LAYER_S1, 1)), 1);
    expect_repair("VM state");
    expect_state(0);
    expect_content();
    make_image_with_state();
    assert_int_equal(
        truncate(IMAGE, (off_t)((find_slab(OWNER_STATE, LAYER_S1, 2) << SLAB_BITS) + 100)), 0);
    expect_repair("VM state");
    expect_state(0);
    expect_content();
    /* Its length is lost: what is there is kept, rounded up. */
    make_image_with_state();
    flip(size_word, 1);
    expect_repair("VM state");
    expect_state(6 * MIB);
    expect_content();
    /* A piece behind the end is what an interrupted snapshot leaves. */
    make_image_with_state();
    word = owner_encode((struct owner){OWNER_STATE, LAYER_S1, 3});
    poke(owner_offset(20), &word, sizeof word);
    poke(UINT64_C(20) << SLAB_BITS, junk, sizeof junk);
    expect_leaks(1);
    expect_state(sizeof vm_state);
    /* A piece for the second time. */
    make_image_with_state();
    word = owner_encode((struct owner){OWNER_STATE, LAYER_S1, 2});
    poke(owner_offset(20), &word, sizeof word);
    expect_repair("second time");
    expect_state(sizeof vm_state);
}

/*
 * Nobody reads a hundred thousand lines; that there are more is said, and everything is counted and
 * repaired.
 */
static void test_more_than_can_be_told(void **state)
{
    static uint64_t junk[4000];
    struct findings *found;

    (void)state;
    make_image();
    memset(junk, 0x5a, sizeof junk);
    poke(owner_offset(40), junk, sizeof junk);
    found = run_check(0);
    assert_int_equal(found->result.corruptions, 4000);
    assert_int_equal(found->count, 1001);
    found = run_check(PCOW_CHECK_REPAIR);
    assert_int_equal(found->result.corruptions_fixed, 4000);
    expect_content();
    expect_usable();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)
        TEST(test_healthy_image),
        TEST(test_locks),
        TEST(test_foreign_files),
        TEST(test_unknown_features),
        TEST(test_every_byte_of_the_header),
        TEST(test_wiped_header),
        TEST(test_copy_of_another_header),
        TEST(test_record_of_the_base),
        TEST(test_appended_bytes),
        TEST(test_cut_inside_a_slab),
        TEST(test_cut_at_a_slab),
        TEST(test_only_metadata_left),
        TEST(test_damaged_owner_word),
        TEST(test_impossible_owners),
        TEST(test_pages_held_twice),
        TEST(test_blocks_of_a_free_slab),
        TEST(test_leaks_only),
        TEST(test_slabs_of_an_interrupted_operation),
        TEST(test_vm_state),
        TEST(test_more_than_can_be_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
