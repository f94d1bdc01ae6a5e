/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An image of more than 32 GiB of file: its metadata lies in two places, and so do its mirrors and
 * its checksums of data. What is damaged in the second group is found, named and put right as in
 * the first.
 */
#include "checking.h"
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/format2.h"

#define IMAGE scratch("image.pcow")
#define PAGE PCOW_PAGE_SIZE
/* One page of each is stored; a few lie in the second group. */
#define FIRST (SLABS_PER_GROUP + 60u)
#define SLABS (SLABS_PER_GROUP + 100u)

static struct findings findings;
static uint8_t pristine[2 * PCOW_SLAB_SIZE], older[PCOW_SLAB_SIZE];

static void fill_page(uint64_t slab, uint8_t content[PAGE])
{
    uint64_t seed = slab + 1;

    fill_pattern(content, PAGE, &seed);
}

static uint64_t place_of(uint64_t slab)
{
    return slab * PCOW_SLAB_SIZE + slab % PAGES_PER_SLAB * PAGE;
}

static void store(pcow_image *image, uint64_t first, uint64_t end)
{
    uint8_t content[PAGE];

    for (uint64_t slab = first; slab < end; slab++) {
        fill_page(slab, content);
        MUST(pcow_write(image, place_of(slab), content, sizeof content, &error));
    }
}

/* A snapshot with VM state has most of it, and the active layer the rest. */
static void make_image(void)
{
    pcow_image *image = must_create(IMAGE, SLABS * PCOW_SLAB_SIZE, 4 * KIB, NULL);

    store(image, 0, FIRST);
    MUST(pcow_snapshot_create(image, "first", &error));
    pcow_close(image);
    must_transfer(IMAGE, older, sizeof older, GROUP_SIZE, false);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_write_state(image, "first", 0, "state", 5, &error));
    MUST(pcow_snapshot_set_state_size(image, "first", 5, &error));
    store(image, FIRST, SLABS);
    pcow_close(image);
    must_transfer(IMAGE, pristine, sizeof pristine, GROUP_SIZE, false);
}

static void expect_right(void)
{
    pcow_image *image = must_open(IMAGE, 0);
    uint8_t content[PAGE], expected[PAGE];

    for (uint64_t slab = SLABS_PER_GROUP - 10; slab < SLABS; slab++) {
        fill_page(slab, expected);
        MUST(pcow_read(image, place_of(slab), content, sizeof content, &error));
        assert_memory_equal(content, expected, sizeof content);
    }
    pcow_close(image);
}

static bool is_empty(const uint8_t *page)
{
    return !page[0] && !memcmp(page, page + 1, PAGE - 1);
}

static void expect_words(unsigned page, const char *fill)
{
    const char *wanted[4] = {"of snapshot 'first'", "of the active layer",
                             "VM state bytes 0 to 2097151 of snapshot 'first'"};
    char where[64];

    snprintf(where, sizeof where, "at byte %llu is damaged",
             (unsigned long long)(GROUP_SIZE + (uint64_t)page * PAGE));
    wanted[3] = where;
    /* One page of bitmaps tells of 64 slabs, and of the last no more than the last ones. */
    for (unsigned i = (uint64_t)page * PAGE >= BITMAP_OFFSET ? 3 : 0; i < 4; i++)
        if (!strstr(findings.text, wanted[i]))
            fail_msg("page %u, %s: not %s, but %s", page, fill, wanted[i], findings.text);
    if (!strstr(findings.text, "guest bytes") && !strstr(findings.text, "VM state bytes"))
        fail_msg("page %u, %s: no ranges: %s", page, fill, findings.text);
}

static void test_pages_of_the_second_group(void **state)
{
    static const char *const fill_name[] = {"zeros", "ones", "random", "older", "neighbour"};
    static uint8_t now[sizeof pristine];
    unsigned tried = 0, used = 0;

    (void)state;
    make_image();
    expect_right();
    for (unsigned page = 0; page < METADATA_PAGES; page++) {
        if (!metadata_page_counts(page) || is_empty(pristine + (size_t)page * PAGE))
            continue;
        used++;
        for (unsigned fill = 0; fill < 5; fill++) {
            const uint8_t *from = fill == 3 ? older : pristine + PAGE;
            uint64_t seed = page + 77;
            struct pcow_check_result result;
            uint8_t content[PAGE];
            pcow_image *image;

            memset(content, fill == 1 ? 0xff : 0, sizeof content);
            if (fill == 2)
                fill_pattern(content, sizeof content, &seed);
            if (fill > 2)
                memcpy(content, from + (size_t)page * PAGE, sizeof content);
            if (!memcmp(content, pristine + (size_t)page * PAGE, PAGE))
                continue;
            must_transfer(IMAGE, content, sizeof content, GROUP_SIZE + (uint64_t)page * PAGE, true);
            assert_int_equal(pcow_open(IMAGE, 0, NULL, &image, NULL), -EBADMSG);
            result = check_image(0, &findings);
            assert_int_equal(result.corruptions, 1);
            assert_int_equal(result.losses, 0);
            expect_words(page, fill_name[fill]);
            result = check_image(PCOW_CHECK_REPAIR, &findings);
            assert_int_equal(result.corruptions_fixed, 1);
            must_transfer(IMAGE, now, sizeof now, GROUP_SIZE, false);
            assert_memory_equal(now, pristine, sizeof now);
            tried++;
        }
    }
    /* the slab table, and the bitmaps of 100 slabs and more */
    assert_in_range(used, 3, 4);
    assert_in_range(tried, 3 * used, 5 * used);
    expect_right();
}

/* The mirror itself, and its page of checksums: nothing is lost, and both are made anew. */
static void test_mirror_of_the_second_group(void **state)
{
    static uint8_t now[sizeof pristine], ones[PAGE];

    (void)state;
    make_image();
    memset(ones, 0xff, sizeof ones);
    for (unsigned page = 0; page < METADATA_PAGES; page++) {
        uint64_t offset = PCOW_SLAB_SIZE + (uint64_t)page * PAGE;
        struct pcow_check_result result;

        if (is_empty(pristine + offset))
            continue;
        must_transfer(IMAGE, ones, sizeof ones, GROUP_SIZE + offset, true);
        result = check_image(PCOW_CHECK_REPAIR, &findings);
        if (!result.corruptions || result.corruptions != result.corruptions_fixed || result.losses)
            fail_msg("page %u of the mirror: %s", page, findings.text);
        must_transfer(IMAGE, now, sizeof now, GROUP_SIZE, false);
        /* Pages that were never stored to have a checksum then, too. */
        if (page == CHECKSUMS_PAGE)
            must_transfer(IMAGE, pristine + offset, PAGE, GROUP_SIZE + offset, false);
        assert_memory_equal(now, pristine, sizeof now);
    }
    must_be_clean(IMAGE);
    expect_right();
}

static void test_data_of_the_second_group(void **state)
{
    uint64_t slab = SLABS_PER_GROUP + MIRROR_HEADS, word;
    struct pcow_data_result result;
    pcow_image *image;
    struct owner owner;
    uint8_t zeros[PAGE] = {0}, byte;
    char what[96];

    (void)state;
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_checksum(image, NULL, 0, NULL, NULL, NULL, &error));
    pcow_close(image);
    must_transfer(IMAGE, &word, sizeof word, owner_offset(slab), false);
    owner = owner_decode(word);
    assert_int_equal(owner.kind, OWNER_DATA);
    word = (slab << SLAB_BITS) + owner.number % PAGES_PER_SLAB * PAGE + 5;
    must_transfer(IMAGE, &byte, 1, word, false);
    byte ^= 4;
    must_transfer(IMAGE, &byte, 1, word, true);
    snprintf(what, sizeof what,
             "from guest byte %llu of snapshot 'first' (file slab %llu): it is not what its",
             (unsigned long long)owner.number << SLAB_BITS, (unsigned long long)slab);
    findings.text[0] = 0;
    MUST(pcow_check_data(IMAGE, 0, add_finding, NULL, &findings, &result, &error));
    assert_int_equal(result.corruptions, 1);
    if (!strstr(findings.text, what))
        fail_msg("not %s, but %s", what, findings.text);
    byte ^= 4;
    must_transfer(IMAGE, &byte, 1, word, true);
    must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(slab) / PAGE * PAGE, true);
    MUST(pcow_check_data(IMAGE, 0, add_finding, NULL, &findings, &result, &error));
    /* of 64 slabs three are none of data, and of the others one may be VM state */
    assert_in_range(result.corruptions, 50, 61);
    assert_non_null(strstr(findings.text, "its checksum is gone"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_pages_of_the_second_group, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_mirror_of_the_second_group, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_data_of_the_second_group, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
