/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * More than one thing of an image is damaged: what nothing proves any more is said to be lost, or
 * right; a repair that was not told to accept a loss never changes what a view reads. And pages
 * that hold nothing, to which somebody else has written.
 */
#include "checking.h"
#include "rich.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define IMAGE scratch("image.pcow")
#define PAGE PCOW_PAGE_SIZE

static struct rich *rich;
static struct findings findings;

static void overwrite(uint64_t offset, const void *from, size_t length)
{
    int fd = open(IMAGE, O_WRONLY | O_CLOEXEC);

    assert_int_equal(pwrite(fd, from, length, (off_t)offset), length);
    close(fd);
}

static void read_bytes(uint64_t offset, void *to, size_t length)
{
    int fd = open(IMAGE, O_RDONLY | O_CLOEXEC);

    assert_int_equal(pread(fd, to, length, (off_t)offset), length);
    close(fd);
}

/*
 * Found; and then either it is repaired without a loss and each view reads as before, or losses are
 * told, and nothing is changed before they are accepted. least: bytes that are lost at least. What
 * was done: 'R' or 'L'.
 */
static char expect_told(const char *what, uint64_t least)
{
    struct pcow_check_result found = check_image(0, &findings), repaired;

    if (!found.corruptions && !found.leaks_doubtful)
        fail_msg("%s: nothing is found: %s", what, findings.text);
    repaired = check_image(PCOW_CHECK_REPAIR, &findings);
    assert_int_equal(repaired.refused, found.losses > 0);
    if (!found.losses) {
        if (!rich_is_right(rich))
            fail_msg("%s: repaired without a loss, and a view reads something else: %s", what,
                     findings.text);
        repaired = check_image(0, &findings);
        if (repaired.corruptions || repaired.leaks)
            fail_msg("%s: after the repair: %s", what, findings.text);
        return 'R';
    }
    if (found.lost_certainty != PCOW_ESTIMATE && found.lost_size < least)
        fail_msg("%s: %llu bytes are said to be lost, not %llu: %s", what,
                 (unsigned long long)found.lost_size, (unsigned long long)least, findings.text);
    repaired = check_image(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &findings);
    assert_int_equal(repaired.corruptions, repaired.corruptions_fixed);
    repaired = check_image(0, &findings);
    if (repaired.corruptions || repaired.leaks)
        fail_msg("%s: after the repair: %s", what, findings.text);
    return 'L';
}

/* ---- a copy that was cut short, and whose length is another one ------------------------------ */

static void try_cut(uint64_t length, uint64_t padded)
{
    const uint64_t lost = rich_behind(rich, length);
    char what[80];

    rich_put_back(rich);
    assert_int_equal(truncate(IMAGE, (off_t)length), 0);
    assert_int_equal(truncate(IMAGE, (off_t)padded), 0);
    snprintf(what, sizeof what, "cut at %llu KiB, and of %llu KiB",
             (unsigned long long)(length / KIB), (unsigned long long)(padded / KIB));
    if (expect_told(what, lost) == 'R' && lost)
        fail_msg("%s: nothing is lost", what);
}

static void cut_metadata(bool mirror)
{
    rich = rich_make(mirror);
    for (uint64_t length = 16 * KIB; length <= BITMAP_OFFSET;
         length += length < 64 * KIB ? 16 * KIB : 64 * KIB) {
        try_cut(length, rich->size);
        for (uint64_t slabs = 1; slabs <= 4; slabs++)
            try_cut(length, slabs * PCOW_SLAB_SIZE);
    }
    rich_free(rich);
}

static void test_cut_and_padded(void **state)
{
    (void)state;
    cut_metadata(false);
}

static void test_cut_and_padded_with_mirror(void **state)
{
    (void)state;
    cut_metadata(true);
}

/* Behind the bitmaps, or some of them: no content is left, and as much of the mirror. */
static void test_cut_before_the_data(void **state)
{
    (void)state;
    rich = rich_make(true);
    for (uint64_t length = BITMAP_OFFSET + 64 * KIB; length <= 3 * MIB; length += 64 * KIB)
        for (uint64_t padded = 6 * MIB; padded < rich->size + 10 * MIB; padded += 10 * MIB)
            try_cut(length, padded);
    rich_free(rich);
}

/* ---- a page, and that of checksums ----------------------------------------------------------- */

enum fill { ZEROS, ONES, RANDOM, OLDER, BIT, FILLS };
static const char *const fill_name[] = {"zeros", "ones", "random", "older", "bit"};

static bool fill_page(unsigned page, enum fill fill, const uint8_t *older)
{
    uint8_t content[PAGE], was[PAGE];
    uint64_t seed = page + 5;

    read_bytes((uint64_t)page * PAGE, was, PAGE);
    memcpy(content, was, PAGE);
    if (fill == BIT)
        content[2 * sizeof(uint64_t)] ^= 1;
    else if (fill == RANDOM)
        fill_pattern(content, sizeof content, &seed);
    else if (fill == OLDER)
        memcpy(content, older + (uint64_t)page * PAGE, sizeof content);
    else
        memset(content, fill == ONES ? 0xff : 0, sizeof content);
    overwrite((uint64_t)page * PAGE, content, sizeof content);
    return memcmp(content, was, PAGE) != 0;
}

static void test_page_and_checksums(void **state)
{
    static const unsigned pages[] = {SLAB_TABLE_OFFSET / PAGE, LAYER_TABLE_OFFSET / PAGE,
                                     BITMAP_OFFSET / PAGE};
    const unsigned words = (unsigned)(mirror_offset(0, CHECKSUMS_PAGE) / PAGE);
    unsigned repaired = 0, lost = 0;

    (void)state;
    rich = rich_make(true);
    for (unsigned i = 0; i < sizeof pages / sizeof *pages; i++)
        for (enum fill page = ZEROS; page < FILLS; page++)
            for (enum fill checksums = ZEROS; checksums < FILLS; checksums++)
                for (unsigned copy = 0; copy < 2; copy++) {
                    char what[80];
                    bool is_right;

                    rich_put_back(rich);
                    if (!fill_page(pages[i], page, rich->older)
                        || !fill_page(words, checksums, rich->older))
                        continue;
                    if (copy)
                        fill_page(METADATA_PAGES + pages[i], RANDOM, NULL);
                    snprintf(what, sizeof what, "page %u %s, checksums %s%s", pages[i],
                             fill_name[page], fill_name[checksums], copy ? ", copy random" : "");
                    is_right = expect_told(what, 0) == 'R';
                    repaired += is_right;
                    lost += !is_right;
                }
    print_message("  %u are repaired, %u told as losses\n", repaired, lost);
    assert_true(repaired && lost);
    rich_free(rich);
}

/* The copy of a page, and the sector of checksums that has its word: that page is all there is. */
static void test_word_and_copy_gone(void **state)
{
    static const unsigned pages[] = {0, SLAB_TABLE_OFFSET / PAGE, LAYER_TABLE_OFFSET / PAGE,
                                     BITMAP_OFFSET / PAGE};
    static const uint8_t zeros[PAGE];

    (void)state;
    rich = rich_make(true);
    for (unsigned i = 0; i < sizeof pages / sizeof *pages; i++)
        for (unsigned all = 0; all < 2; all++) {
            char what[64];

            rich_put_back(rich);
            overwrite(mirror_offset(0, pages[i]), zeros, PAGE);
            overwrite(mirror_offset(0, CHECKSUMS_PAGE)
                          + (all ? 0 : pages[i] * sizeof(uint64_t) / 512 * 512),
                      zeros, all ? PAGE : 512);
            snprintf(what, sizeof what, "word and copy of page %u", pages[i]);
            if (expect_told(what, 0) != 'R')
                fail_msg("%s: %s", what, findings.text);
        }
    rich_free(rich);
}

/* ---- what holds nothing ---------------------------------------------------------------------- */

static bool is_empty(const uint8_t *content)
{
    return !content[0] && !memcmp(content, content + 1, PAGE - 1);
}

static bool metadata_is_as_before(void)
{
    static uint8_t now[2 * PCOW_SLAB_SIZE];

    read_bytes(0, now, sizeof now);
    return memcmp(now, rich->bytes, sizeof now) == 0;
}

/* Of each structure, pages next to what is used, and others: somebody has written there. */
static void test_unused_pages(void **state)
{
    unsigned tried = 0;

    (void)state;
    rich = rich_make(true);
    for (unsigned page = 1; page < METADATA_PAGES; page++) {
        const uint8_t *before = rich->bytes + (uint64_t)(page - 1) * PAGE;

        if (!metadata_page_counts(page) || !is_empty(before + PAGE)
            || (is_empty(before) && page % 29))
            continue;
        for (unsigned way = 0; way < 3; way++) {
            uint8_t content[PAGE];
            uint64_t seed = page + way;
            char what[64];

            fill_pattern(content, sizeof content, &seed);
            if (way == 1)
                memset(content, 0xff, sizeof content);
            if (way == 2)
                memcpy(content, before, sizeof content);
            if (is_empty(content))
                continue;
            rich_put_back(rich);
            overwrite((uint64_t)page * PAGE, content, sizeof content);
            snprintf(what, sizeof what, "unused page %u, way %u", page, way);
            tried++;
            if (expect_told(what, 0) != 'R' || !metadata_is_as_before())
                fail_msg("%s: %s", what, findings.text);
        }
    }
    assert_true(tried > 30);
    rich_free(rich);
}

/* ---- the tree -------------------------------------------------------------------------------- */

static struct layer_record read_record(unsigned slot)
{
    struct layer_record record;

    read_bytes(LAYER_TABLE_OFFSET + slot * LAYER_RECORD_SIZE, &record, sizeof record);
    return record;
}

/* A fork stands on the snapshot: which record counts is not to be guessed against it. */
static void test_pinned_once(void **state)
{
    (void)state;
    rich = rich_make(false);
    for (unsigned to = 1; to < 3; to++) {
        unsigned slot = 0;
        struct layer_record record;
        struct pcow_error why;
        pcow_image *image;

        rich_put_back(rich);
        while (!(word_value(read_record(slot).state) >> 32 & LAYER_PINNED))
            assert_true(++slot < RICH_LAYERS + 1);
        /* the same without the flag, in front of it or behind */
        record = read_record(slot);
        record.state = word_encode(word_value(record.state)
                                   & ~((uint64_t)LAYER_PINNED << 32));
        if (to == 1) {
            struct layer_record pinned = read_record(slot);

            overwrite(LAYER_TABLE_OFFSET + 40 * LAYER_RECORD_SIZE, &pinned, sizeof pinned);
            overwrite(LAYER_TABLE_OFFSET + slot * LAYER_RECORD_SIZE, &record, sizeof record);
        } else {
            overwrite(LAYER_TABLE_OFFSET + 40 * LAYER_RECORD_SIZE, &record, sizeof record);
        }
        expect_told("two records of a snapshot", 0);
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        assert_int_equal(pcow_snapshot_delete(image, rich->layer[1].name, NULL, &why), -EBUSY);
        pcow_close(image);
        assert_true(rich_is_right(rich));
    }
    rich_free(rich);
}

static void kill_a_writer(void)
{
    uint8_t content[PAGE];
    pcow_image *image;
    pid_t child = fork();
    int status;

    rich_page(RICH_LAYERS, 0, content);
    if (child == 0)
        _exit(pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL)
              || pcow_write(image, 0, content, sizeof content, NULL));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    rich->layer[RICH_LAYERS].page[0] = true;
}

/* The base must not vanish by eight bytes, whose other copies name it. */
static void test_word_of_the_base(void **state)
{
    static const uint64_t zero;

    (void)state;
    for (unsigned mirror = 0; mirror < 2; mirror++) {
        rich = rich_make(mirror);
        if (mirror)
            kill_a_writer();
        overwrite(offsetof(struct header, base_slot), &zero, sizeof zero);
        assert_int_equal(expect_told("base_slot", 0), 'R');
        rich_free(rich);
        unlink(IMAGE);
        unlink(scratch("fork.pcow"));
        unlink(scratch("base.pcow"));
    }
}

/* Taken off by who may, nobody takes it for damage. */
static void test_base_taken_off(void **state)
{
    struct pcow_check_result found;
    pcow_image *image;

    (void)state;
    rich = rich_make(false);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_rebase(image, NULL, NULL, true, NULL, NULL, &error));
    pcow_close(image);
    found = check_image(0, &findings);
    if (found.corruptions || found.leaks)
        fail_msg("%s", findings.text);
    rich_free(rich);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_cut_and_padded),
        TEST(test_cut_and_padded_with_mirror),
        TEST(test_cut_before_the_data),
        TEST(test_page_and_checksums),
        TEST(test_word_and_copy_gone),
        TEST(test_unused_pages),
        TEST(test_pinned_once),
        TEST(test_word_of_the_base),
        TEST(test_base_taken_off),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
