/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A page of metadata that another process overwrites beside a writer, who closes the image as if
 * nothing were: it is told, found by check, and put right without loss. The writer had stored to
 * the page, so its checksum said nothing at that time.
 */
#include "checking.h"
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/format2.h"
#include "image/image.h"
#include "image/store.h"
#include "operations/operations.h"

#define SLABS 80u                      /* bitmaps: two pages */
#define SIZE (SLABS * 2 * MIB)
#define SNAPSHOTS 18u                  /* layer records: two pages */
#define PAGE PCOW_PAGE_SIZE
#define MARKED (METADATA_PAGES + CHECKSUMS_PAGE)
#define IMAGE scratch("image.pcow")

enum fill { ZEROS, ONES, RANDOM, OLDER, NEIGHBOUR, FILLS };
static const char *const fill_name[] = {"zeros", "ones", "random", "older", "neighbour"};

static uint8_t before[2 * METADATA_PAGES][PAGE];   /* metadata and mirror, when it was opened */
static uint8_t model[SNAPSHOTS + 3][SLABS];        /* what each view holds in a slab */
static struct findings findings;

static void read_pages(uint8_t to[2 * METADATA_PAGES][PAGE])
{
    int fd = open(IMAGE, O_RDONLY | O_CLOEXEC);

    assert_int_equal(pread(fd, to, 2 * METADATA_PAGES * PAGE, 0), 2 * METADATA_PAGES * PAGE);
    close(fd);
}

static void store(pcow_image *image, unsigned view, unsigned slab)
{
    uint8_t content[PAGE];

    model[view][slab] = (uint8_t)(view * 7 + slab + 1);
    memset(content, model[view][slab], sizeof content);
    MUST(pcow_write(image, slab * PCOW_SLAB_SIZE, content, sizeof content, &error));
}

/* The view that was written to becomes a snapshot; what it holds shows through in the next one. */
static void take_snapshot(pcow_image *image, unsigned view)
{
    char name[16];

    snprintf(name, sizeof name, "s%u", view);
    MUST(pcow_snapshot_create(image, name, &error));
    memcpy(model[view + 1], model[view], sizeof model[view]);
}

static void make_image(void)
{
    pcow_image *image = must_create(IMAGE, SIZE, 4 * KIB, NULL);

    memset(model, 0, sizeof model);
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(image, 0, slab);
    for (unsigned view = 0; view < SNAPSHOTS; view++) {
        take_snapshot(image, view);
        store(image, view + 1, view);
    }
    pcow_close(image);
    read_pages(before);
}

/* All kinds of pages are stored to. */
static pcow_image *open_and_store(void)
{
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    MUST(pcow_snapshot_delete(image, "s0", NULL, &error));
    store(image, SNAPSHOTS, 40);
    take_snapshot(image, SNAPSHOTS);
    store(image, SNAPSHOTS + 1, 2);
    store(image, SNAPSHOTS + 1, 77);
    MUST(pcow_flush(image, &error));
    return image;
}

static void store_more(pcow_image *image)
{
    take_snapshot(image, SNAPSHOTS + 1);
    store(image, SNAPSHOTS + 2, 5);
    store(image, SNAPSHOTS + 2, 77);
}

static void expect_content(unsigned views, const char *what)
{
    for (unsigned view = 1; view < views; view++) {
        uint8_t content[PAGE];
        pcow_image *image;
        char name[16];

        snprintf(name, sizeof name, "s%u", view);
        MUST(pcow_open(IMAGE, 0, view + 1 < views ? name : NULL, &image, &error));
        for (unsigned slab = 0; slab < SLABS; slab++) {
            MUST(pcow_read(image, slab * PCOW_SLAB_SIZE, content, sizeof content, &error));
            if (content[0] != model[view][slab] || content[PAGE - 1] != model[view][slab])
                fail_msg("%s: slab %u of view %u holds %u, not %u", what, slab, view, content[0],
                         model[view][slab]);
        }
        pcow_close(image);
    }
}

/* Another process, that knows nothing of the format: the page, and does it differ from before? */
static bool poke(unsigned page, enum fill fill)
{
    uint8_t content[PAGE], found[PAGE];
    uint64_t seed = page * 5 + 1;
    int status, fd = open(IMAGE, O_RDWR | O_CLOEXEC);
    pid_t child;

    assert_int_equal(pread(fd, found, PAGE, (off_t)(page * PAGE)), PAGE);
    memset(content, fill == ONES ? 0xff : 0, PAGE);
    if (fill == RANDOM)
        fill_pattern(content, PAGE, &seed);
    if (fill == OLDER)
        memcpy(content, before[page], PAGE);
    if (fill == NEIGHBOUR)
        assert_int_equal(pread(fd, content, PAGE, (off_t)((page + 1) * PAGE)), PAGE);
    child = fork();
    if (child == 0)
        _exit(pwrite(fd, content, PAGE, (off_t)(page * PAGE)) != PAGE);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    close(fd);
    return memcmp(content, found, PAGE) != 0;
}

static unsigned tried;

static void try_poke(unsigned page, enum fill fill, bool more)
{
    pcow_image *image, *opened = NULL;
    struct pcow_check_result result;
    struct pcow_error told = {0};
    char what[64];
    int ret;

    unlink(IMAGE);
    make_image();
    image = open_and_store();
    snprintf(what, sizeof what, "page %u, %s, more: %d", page, fill_name[fill], more);
    if (!poke(page, fill)) {
        pcow_close(image);
        return;
    }
    if (more)
        store_more(image);
    ret = pcow_finish(image, &told);
    pcow_close(image);
    tried++;
    result = check_image(0, &findings);
    /* A snapshot writes the copy of the header as a whole. */
    if (page == 1 && more) {
        if (ret || result.corruptions)
            fail_msg("%s: close says %d, check finds %s", what, ret, findings.text);
        return;
    }
    /* Checksums are put right by the way. */
    if (page == MARKED && ret)
        fail_msg("%s: close says %d: %s", what, ret, told.message);
    if (page != MARKED && (ret != -EBADMSG || !strstr(told.message, "somebody else has written")
                           || !strstr(told.message, ": 1 page of its metadata is not")))
        fail_msg("%s: close says %d: %s", what, ret, told.message);
    if (page != MARKED && !result.corruptions)
        fail_msg("%s: check finds nothing", what);
    if (result.lost_size || result.losses)
        fail_msg("%s: %llu bytes are said to be lost: %s", what,
                 (unsigned long long)result.lost_size, findings.text);
    if (page != MARKED && pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &opened, NULL) == 0)
        fail_msg("%s: it was opened", what);
    result = check_image(PCOW_CHECK_REPAIR, &findings);
    if (result.corruptions != result.corruptions_fixed)
        fail_msg("%s: not repaired: %s", what, findings.text);
    result = check_image(0, &findings);
    if (result.corruptions || result.leaks)
        fail_msg("%s: after the repair: %s", what, findings.text);
    expect_content(SNAPSHOTS + 2 + more, what);
}

/* Those that are marked when it is poked, and the page with the marks. */
static bool is_tried(unsigned page, const uint64_t words[METADATA_PAGES])
{
    return page == MARKED
           || (page < METADATA_PAGES && metadata_page_counts(page)
               && checksum_is(words[page], CHECKSUM_STALE));
}

static void test_each_page(void **state)
{
    uint8_t pages[2 * METADATA_PAGES][PAGE];
    uint64_t words[METADATA_PAGES];
    unsigned kinds = 0;
    pcow_image *image;

    (void)state;
    make_image();
    image = open_and_store();
    read_pages(pages);
    pcow_close(image);
    memcpy(words, pages[MARKED], sizeof words);
    for (unsigned page = 0; page < 2 * METADATA_PAGES; page++)
        for (enum fill fill = ZEROS; is_tried(page, words) && fill < FILLS; fill++) {
            try_poke(page, fill, false);
            try_poke(page, fill, true);
            kinds += fill == ZEROS;
        }
    /* Header, its copy, slab table, two of records, two of bitmaps, checksums. */
    assert_int_equal(kinds, 8);
    print_message("%u stray writes\n", tried);
    unlink(IMAGE);
}

/* Nobody wrote: nothing is told, whatever was done; and a page of a killed writer is known, too. */
static void test_after_a_kill(void **state)
{
    pcow_image *image;
    int status;
    pid_t child;

    (void)state;
    for (unsigned stray = 0; stray < 2; stray++) {
        make_image();
        child = fork();
        if (child == 0) {
            open_and_store();
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        if (stray)
            poke(BITMAP_OFFSET / PAGE, ZEROS);
        if (stray)
            MUST_FAIL(-EBADMSG, pcow_finish(image, &error));
        else
            MUST(pcow_finish(image, &error));
        pcow_close(image);
        assert_int_equal(check_image(0, &findings).corruptions != 0, stray);
        unlink(IMAGE);
    }
}

/* Class page-cache; the next call of this kind fails, from this offset of the file on. */
struct failing {
    struct observer observer;
    bool armed;
    enum observed fails;
    uint64_t from;
};

static int fail_once(struct observer *observer, const struct observation *seen)
{
    struct failing *failing = (struct failing *)observer;

    if (!failing->armed || seen->what != failing->fails || seen->offset < failing->from)
        return 0;
    failing->armed = false;
    return -EIO;
}

/* The kernel drops a page that it could not write, and reads the older one: no stray write. */
static void test_dropped_by_the_kernel(void **state)
{
    for (unsigned page = BITMAP_OFFSET / PAGE; page < BITMAP_OFFSET / PAGE + 2; page++) {
        struct failing failing = {
            .observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = fail_once},
            .fails = OBSERVED_SYNC,
        };
        pcow_image *image;

        (void)state;
        make_image();
        MUST(image_open(IMAGE, PCOW_OPEN_WRITE, NULL, &failing.observer, &image, &error));
        store(image, SNAPSHOTS, 40);
        store(image, SNAPSHOTS, 77);
        failing.armed = true;
        MUST_FAIL(-EIO, pcow_flush(image, &error));
        poke(page, OLDER);
        MUST(pcow_finish(image, &error));
        pcow_close(image);
        if (check_image(0, &findings).corruptions)
            fail_msg("%s", findings.text);
        expect_content(SNAPSHOTS + 1, "dropped");
        unlink(IMAGE);
    }
}

/* What was stored and could not be settled is taken for not done: memory is no proof any more. */
static void test_unsure(void **state)
{
    struct failing failing = {
        .observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = fail_once},
        .fails = OBSERVED_MAP,
        .from = GROUP_SIZE,
    };
    pcow_image *image;

    (void)state;
    make_image();
    MUST(image_open(IMAGE, PCOW_OPEN_WRITE, NULL, &failing.observer, &image, &error));
    assert_false(image->file.unsure);
    failing.armed = true;
    assert_int_equal(file_sync_range(&image->file, owner_offset(SLABS_PER_GROUP), 8, 0), -EIO);
    assert_true(image->file.unsure);
    pcow_close(image);
    unlink(IMAGE);
}

/* Something behind the end of a name, up to its last byte: it was so when the image was opened. */
static void test_behind_a_name(void **state)
{
    struct layer_record record;
    uint64_t offset = LAYER_TABLE_OFFSET, stale = checksum_encode(CHECKSUM_STALE, 0);
    pcow_image *image;
    int fd;

    (void)state;
    make_image();
    fd = open(IMAGE, O_RDWR | O_CLOEXEC);
    do {
        offset += LAYER_RECORD_SIZE;
        assert_int_equal(pread(fd, &record, sizeof record, (off_t)offset), sizeof record);
    } while (strcmp(record.name, "s3") != 0);
    record.name[sizeof record.name - 1] = 'x';
    record.crc = layer_record_crc(&record);
    assert_int_equal(pwrite(fd, &record, sizeof record, (off_t)offset), sizeof record);
    /* As a killed writer leaves it. */
    offset = mirror_offset(0, CHECKSUMS_PAGE) + offset / PAGE * sizeof stale;
    assert_int_equal(pwrite(fd, &stale, sizeof stale, (off_t)offset), sizeof stale);
    close(fd);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_finish(image, &error));
    pcow_close(image);
    assert_int_equal(check_image(0, &findings).corruptions, 0);
    unlink(IMAGE);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(test_each_page), TEST(test_after_a_kill),
                                       TEST(test_dropped_by_the_kernel), TEST(test_unsure),
                                       TEST(test_behind_a_name)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
