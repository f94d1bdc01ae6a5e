/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Checksums of data: damage of any of it is found and named, and of the checksums too; whoever
 * changes what has one drops it first; and to make them can be broken off at any time.
 */
#include "summed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>

static void test_finds_nothing_where_nothing_is(void **state)
{
    (void)state;
    make_image();
    expect_verified(0, ALL);
    checksum("one", false);
    expect_verified(ONE, TWO + ACTIVE);
    checksum(NULL, false);
    expect_verified(ONE + TWO, ACTIVE);
    seal();
    expect_verified(ALL, 0);
}

/* Each byte that is valid, in each kind of layer; what is not valid does not count. */
static void test_finds_damaged_data(void **state)
{
    struct owner owner;
    uint64_t slab;
    unsigned n;

    (void)state;
    make_image();
    seal();
    for (n = 0; (slab = owned_slab(n, &owner)); n++) {
        uint64_t data = slab << SLAB_BITS, size = PCOW_SLAB_SIZE;
        char where[64], what[64];
        unsigned page = 0;

        if (owner.kind == OWNER_DATA) {
            struct page_set valid;

            must_transfer(IMAGE, &valid, sizeof valid, bitmap_offset(slab), false);
            page = page_set_has(&valid, 0) ? 0 : page_set_run_end(&valid, 0, PAGES_PER_SLAB);
            size = page_set_count(&valid) * PAGE;
            flip(data + 200 * PAGE);
            assert_int_equal(verify().corruptions, 0);
            flip(data + 200 * PAGE);
        }
        snprintf(where, sizeof where, "from %s byte %llu of ",
                 owner.kind == OWNER_DATA ? "guest" : "VM state",
                 (unsigned long long)owner.number << SLAB_BITS);
        snprintf(what, sizeof what, "(file slab %llu): it is not what",
                 (unsigned long long)slab);
        flip(data + page * PAGE + 1234);
        expect_found(where, what, size, 0);
        assert_non_null(strstr(findings.text, owner.layer == 1   ? "snapshot 'one'"
                                         : owner.layer == 2 ? "snapshot 'two'"
                                                            : "the active layer"));
        flip(data + page * PAGE + 1234);
        assert_int_equal(verify().corruptions, 0);
    }
    assert_int_equal(n, 4 + 1 + 4 + 2);
}

/* A slab that was written to another's place, or two that changed places. */
static void test_finds_data_in_a_wrong_place(void **state)
{
    static uint8_t a[PCOW_SLAB_SIZE], b[PCOW_SLAB_SIZE];
    uint64_t first, second;

    (void)state;
    make_image();
    seal();
    first = slab_of(1, 0, OWNER_DATA);
    second = slab_of(1, 1, OWNER_DATA);
    must_transfer(IMAGE, a, sizeof a, first << SLAB_BITS, false);
    must_transfer(IMAGE, b, sizeof b, second << SLAB_BITS, false);
    must_transfer(IMAGE, b, sizeof b, first << SLAB_BITS, true);
    must_transfer(IMAGE, a, sizeof a, second << SLAB_BITS, true);
    assert_int_equal(verify().corruptions, 2);
    /* with their checksums, too */
    must_transfer(IMAGE, a, 64, datasum_offset(first), false);
    must_transfer(IMAGE, b, 64, datasum_offset(second), false);
    must_transfer(IMAGE, b, 64, datasum_offset(first), true);
    must_transfer(IMAGE, a, 64, datasum_offset(second), true);
    assert_int_equal(verify().corruptions, 2);
    assert_non_null(strstr(findings.text, "its checksum is damaged"));
}

/* Each bit of a checksum; a page of them that is zeros, or an older one. */
static void test_finds_damaged_checksums(void **state)
{
    static uint8_t page[PAGE], kept[PAGE];
    uint64_t slab, at;

    (void)state;
    make_image();
    must_transfer(IMAGE, page, sizeof page, datasum_offset(0), false);
    seal();
    slab = slab_of(2, 4, OWNER_DATA);
    at = datasum_offset(slab);
    for (unsigned byte = 0; byte < 64; byte++) {
        flip(at + byte);
        expect_found("from guest byte 8388608 of snapshot 'two'", "its checksum is damaged", 0,
                     2 * PAGE);
        flip(at + byte);
    }
    flip(datasum_offset(60));
    expect_found("file slab 60 holds no data", "has a checksum", 0, 0);
    flip(datasum_offset(60));
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), false);
    must_transfer(IMAGE, page, sizeof page, datasum_offset(0), true);
    assert_int_equal(verify().corruptions, 11);
    assert_non_null(strstr(findings.text, "its checksum is gone"));
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), true);
    expect_verified(ALL, 0);
}

static void fill_random(uint8_t *page)
{
    for (unsigned i = 0; i < PAGE; i++)
        page[i] = (uint8_t)((i + 7) * UINT64_C(0x9e3779b97f4a7c15) >> 40);
}

/*
 * All checksums of two snapshots at once, in an image that is not sealed: that they were there is
 * in the records. The slabs of the active layer have none, and nothing is said of them.
 */
static void expect_gone_in_snapshots(uint8_t *older)
{
    static uint8_t kept[PAGE], page[PAGE];

    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), false);
    for (unsigned kind = 0; kind < 4; kind++) {
        struct pcow_data_result result;

        memset(page, kind == 1 ? 0xff : 0, sizeof page);
        if (kind == 2)
            fill_random(page);
        must_transfer(IMAGE, kind == 3 ? older : page, sizeof page, datasum_offset(0), true);
        result = verify();
        if (kind == 0 || kind == 3) {
            assert_int_equal(result.corruptions, 8);
            assert_non_null(strstr(findings.text, "of snapshot 'two'"));
            assert_non_null(strstr(findings.text, "its checksum is gone"));
            assert_int_equal(verify_shared().corruptions, 8);
        } else {
            assert_int_equal(result.unjudged, ALL);
        }
        must_be_clean(IMAGE);
    }
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), true);
    expect_verified(ONE + TWO, ACTIVE);
}

static void test_finds_checksums_that_are_gone(void **state)
{
    static uint8_t older[PAGE], zeros[PAGE];
    pcow_image *image;

    (void)state;
    make_image();
    must_transfer(IMAGE, older, sizeof older, datasum_offset(0), false);
    checksum(NULL, false);
    expect_gone_in_snapshots(older);
    /* Some of a snapshot's are dropped: of what is left nothing is said any more. */
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "one", NULL, &error));
    pcow_close(image);
    assert_int_equal(verify().corruptions, 0);
    must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(0), true);
    assert_int_equal(verify().corruptions, 0);
    /* Until they were made once more. */
    checksum("two", false);
    assert_int_equal(verify().corruptions, 0);
    must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(0), true);
    assert_int_equal(verify().corruptions, 8);
}

/* A repair that drops one says nothing of the others, and is no damage itself. */
static void test_repair_of_a_snapshot_with_checksums(void **state)
{
    struct pcow_check_result result;
    uint64_t word, offset;

    (void)state;
    make_image();
    checksum(NULL, false);
    /* in the page of owner words, and in its copy: nobody knows which was right */
    offset = owner_offset(slab_of(2, 4, OWNER_DATA));
    word = owner_encode((struct owner){OWNER_DATA, 1, 5});
    must_transfer(IMAGE, &word, sizeof word, offset, true);
    must_transfer(IMAGE, &word, sizeof word, PCOW_SLAB_SIZE + offset, true);
    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, NULL, NULL, &result,
                    &error));
    must_be_clean(IMAGE);
    verify();
    if (strstr(findings.text, "its checksum is gone"))
        fail_msg("%s", findings.text);
}

/* What is damaged keeps its checksum when others are made, and stays found. */
static void test_damage_is_not_blessed(void **state)
{
    struct pcow_data_result result;
    pcow_image *image;

    (void)state;
    make_image();
    checksum(NULL, false);
    flip((slab_of(1, 0, OWNER_DATA) << SLAB_BITS) + 3 * PAGE);
    flip(datasum_offset(slab_of(1, 1, OWNER_DATA)) + 20);
    assert_int_equal(verify().corruptions, 2);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST_FAIL(-EUCLEAN,
              pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    pcow_close(image);
    result = verify();
    assert_int_equal(result.corruptions, 2);
    assert_int_equal(result.without, 0);
}

static void test_writers_drop_them(void **state)
{
    uint64_t first = 0, second = 0;
    pcow_image *image;

    (void)state;
    make_image();
    seal();
    image = NULL;
    MUST_FAIL(-EROFS, pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error));
    MUST(pcow_unseal(IMAGE, &error));
    expect_verified(ALL, 0);
    first = slab_of(3, 2, OWNER_DATA);
    second = slab_of(3, 6, OWNER_DATA);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    assert_int_not_equal(entry_word(first), 0);
    /* over a page that is there */
    store(image, 2, 3, 0x77);
    assert_int_equal(entry_word(first), 0);
    assert_int_not_equal(entry_word(second), 0);
    pcow_close(image);
    expect_verified(ALL - 2 * PAGE, 2 * PAGE);
    /* a new page of a slab that is there */
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    store(image, 6, 100, 0x78);
    assert_int_equal(entry_word(second), 0);
    pcow_close(image);
    expect_verified(ONE + TWO, 5 * PAGE);
    /* zeros */
    checksum(NULL, true);
    expect_verified(ALL + PAGE, 0);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_write_zeroes(image, 2 * PCOW_SLAB_SIZE + 3 * PAGE, PAGE, &error));
    pcow_close(image);
    expect_verified(ONE + TWO + 3 * PAGE, 2 * PAGE);
}

/* The guest comes another way. */
static void test_guests_drop_them(void **state)
{
    FOR_EACH_ENGINE(engine)
    {
        pcow_image *image;
        pcow_map *map;
        uint8_t *memory;
        uint64_t slab;

        if (engine == PCOW_ENGINE_MINOR && !serve_bus())
            continue;
        scratch_teardown(state);
        scratch_setup(state);
        make_image();
        checksum(NULL, true);
        slab = slab_of(3, 6, OWNER_DATA);
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        /* a load changes nothing */
        assert_int_equal(memory[6 * PCOW_SLAB_SIZE + 3 * PAGE], 0x52);
        assert_int_not_equal(entry_word(slab), 0);
        memory[6 * PCOW_SLAB_SIZE + 3 * PAGE] = 0x99;
        assert_int_equal(entry_word(slab), 0);
        pcow_map_destroy(map);
        pcow_close(image);
        expect_verified(ALL - 2 * PAGE, 2 * PAGE);
    }
}

static void test_merges_drop_them(void **state)
{
    pcow_image *image;
    struct pcow_data_result result;

    (void)state;
    make_image();
    checksum(NULL, true);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    /* what is left of "one" becomes "two"'s: without checksums */
    MUST(pcow_snapshot_delete(image, "one", NULL, &error));
    pcow_close(image);
    result = verify();
    assert_int_equal(result.corruptions, 0);
    assert_int_equal(result.verified, TWO + ACTIVE);
    assert_int_equal(result.without, 6 * PAGE);
    checksum(NULL, true);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_revert(image, "two", &error));
    store(image, 0, 3, 0x60);
    MUST(pcow_snapshot_create(image, "three", &error));
    MUST(pcow_snapshot_delete(image, "two", NULL, &error));
    MUST(pcow_snapshot_revert(image, "three", &error));
    pcow_close(image);
    assert_int_equal(verify().corruptions, 0);
    must_be_clean(IMAGE);
    /* and slabs that were freed are others' then */
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "three", NULL, &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(image, slab, slab + 7, 0x61);
    pcow_close(image);
    assert_int_equal(verify().corruptions, 0);
    must_be_clean(IMAGE);
}

static int stop_after(void *opaque, uint64_t done, uint64_t total)
{
    assert_true(done <= total);
    return done >= *(uint64_t *)opaque ? -ECANCELED : 0;
}

/* Cancelled or killed after each slab, and begun again. */
static void test_goes_on_where_it_was(void **state)
{
    (void)state;
    make_image();
    for (unsigned run = 0; run < 10; run++) {
        uint64_t done = PCOW_SLAB_SIZE;
        pcow_image *image;
        pid_t child;

        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        MUST_FAIL(-ECANCELED, pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, stop_after,
                                            &done, &error));
        pcow_close(image);
        assert_int_equal(verify().corruptions, 0);
        assert_true(verify().verified > 0 && verify().without > 0);
        child = fork();
        if (child == 0) {
            struct pcow_error error;

            if (!pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error))
                pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, kill_after, &done, &error);
            _exit(1);
        }
        assert_int_equal(waitpid(child, NULL, 0), child);
        assert_int_equal(verify().corruptions, 0);
    }
    checksum(NULL, true);
    expect_verified(ALL, 0);
}

/* A hash that was stored and not published counts for nothing. */
static void test_half_a_checksum(void **state)
{
    uint64_t slab, zero = 0;
    uint8_t content = 1;

    (void)state;
    make_image();
    checksum(NULL, true);
    /* of the active layer: of a snapshot it is damage that it is gone */
    slab = slab_of(3, 6, OWNER_DATA);
    must_transfer(IMAGE, &zero, sizeof zero, datasum_offset(slab), true);
    expect_verified(ALL - 2 * PAGE, 2 * PAGE);
    must_transfer(IMAGE, &content, 1, (slab << SLAB_BITS) + 3 * PAGE, true);
    checksum(NULL, true);
    expect_verified(ALL, 0);
}

static void test_others(void **state)
{
    pcow_image *image;
    struct pcow_info info;
    struct pcow_data_result result;

    (void)state;
    image = must_create_without_mirror(IMAGE, SIZE);
    store(image, 0, 0, 1);
    MUST_FAIL(-ENOTSUP, pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    pcow_close(image);
    result = verify();
    assert_int_equal(result.corruptions, 0);
    assert_int_equal(result.without, PAGE);
    unlink(IMAGE);
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST_FAIL(-ENOENT, pcow_checksum(image, "three", 0, NULL, NULL, NULL, &error));
    MUST(pcow_seal(image, &error));
    pcow_get_info(image, &info);
    assert_false(info.checksums);
    pcow_close(image);
    expect_verified(0, ALL);
    MUST(pcow_unseal(IMAGE, &error));
    seal();
    image = must_open(IMAGE, 0);
    pcow_get_info(image, &info);
    assert_true(info.checksums);
    MUST_FAIL(-EROFS, pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    pcow_close(image);
    MUST(pcow_unseal(IMAGE, &error));
    image = must_open(IMAGE, 0);
    pcow_get_info(image, &info);
    assert_false(info.checksums);
    pcow_close(image);
    MUST_FAIL(-ENOENT, pcow_check_data(scratch("none"), 0, NULL, NULL, NULL, &result, &error));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_finds_nothing_where_nothing_is),
        TEST(test_finds_damaged_data),
        TEST(test_finds_data_in_a_wrong_place),
        TEST(test_finds_damaged_checksums),
        TEST(test_finds_checksums_that_are_gone),
        TEST(test_repair_of_a_snapshot_with_checksums),
        TEST(test_damage_is_not_blessed),
        TEST(test_writers_drop_them),
        TEST(test_guests_drop_them),
        TEST(test_merges_drop_them),
        TEST(test_goes_on_where_it_was),
        TEST(test_half_a_checksum),
        TEST(test_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
