/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mirror of the metadata: damage of any 4 KiB of it, of its copy or of its checksums is found
 * and put right without loss, whatever the page holds then; and what a crash leaves is no damage.
 */
#include "checking.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/format2.h"

#define SLABS 600u
#define SIZE (SLABS * 2 * MIB)
#define SNAPSHOTS 20u
#define PAGE 4096u
#define PAGES (2 * METADATA_PAGES)     /* metadata and mirror of group 0 */
#define IMAGE scratch("image.pcow")

static uint8_t pristine[PAGES][PAGE], older[PAGES][PAGE];
/* What each view holds in the first page of each slab. */
static uint8_t model[SNAPSHOTS + 1][SLABS];

static void read_pages(uint8_t to[PAGES][PAGE])
{
    int fd = open(IMAGE, O_RDONLY | O_CLOEXEC);

    assert_int_equal(pread(fd, to, PAGES * PAGE, 0), PAGES * PAGE);
    close(fd);
}

static void write_page(unsigned page, const void *content)
{
    int fd = open(IMAGE, O_WRONLY | O_CLOEXEC);

    assert_int_equal(pwrite(fd, content, PAGE, (off_t)page * PAGE), PAGE);
    close(fd);
}

static void store(pcow_image *image, unsigned view, unsigned slab)
{
    uint8_t content[PAGE];

    model[view][slab] = (uint8_t)(view * 7 + slab + 1);
    memset(content, model[view][slab], sizeof content);
    MUST(pcow_write(image, slab * PCOW_SLAB_SIZE, content, sizeof content, &error));
}

/* Two pages of owner words, two of layer records, ten of bitmaps. */
static void fill_image(pcow_image *image)
{
    char name[16];

    for (unsigned slab = 0; slab < SLABS / 2; slab++)
        store(image, 0, slab);
    for (unsigned view = 0; view < SNAPSHOTS; view++) {
        snprintf(name, sizeof name, "s%u", view);
        MUST(pcow_snapshot_create(image, name, &error));
        memcpy(model[view + 1], model[view], sizeof model[view]);
        for (unsigned slab = view; slab < SLABS; slab += view ? 61 : 1)
            store(image, view + 1, slab);
        if (view == 2) {
            pcow_close(image);
            read_pages(older);
            image = must_open(IMAGE, PCOW_OPEN_WRITE);
        }
    }
    pcow_close(image);
    read_pages(pristine);
}

static void make_image(void)
{
    fill_image(must_create(IMAGE, SIZE, 4 * KIB, NULL));
}

static void expect_view(const char *name, const uint8_t *expected)
{
    pcow_image *image;
    uint8_t content[PAGE];

    MUST(pcow_open(IMAGE, 0, name, &image, &error));
    for (unsigned slab = 0; slab < SLABS; slab++) {
        MUST(pcow_read(image, slab * PCOW_SLAB_SIZE, content, sizeof content, &error));
        assert_int_equal(content[0], expected[slab]);
        assert_int_equal(content[PAGE - 1], expected[slab]);
    }
    pcow_close(image);
}

static void expect_content(void)
{
    char name[16];

    for (unsigned view = 0; view < SNAPSHOTS; view++) {
        snprintf(name, sizeof name, "s%u", view);
        expect_view(name, model[view]);
    }
    expect_view(NULL, model[SNAPSHOTS]);
}

static struct findings findings;

static void expect_clean(const char *what)
{
    struct pcow_check_result result = check_image(0, &findings);

    if (result.corruptions || result.leaks)
        fail_msg("%s: %s", what, findings.text);
}

enum damage { ZEROS, ONES, RANDOM, ONE_BIT, OLDER, NEIGHBOUR, DAMAGES };
static const char *const damage_name[] = {"zeros",   "ones",  "random",
                                          "one bit", "older", "neighbour"};

static bool make_damage(enum damage damage, unsigned page, uint8_t content[PAGE], uint64_t *seed)
{
    switch (damage) {
    case ZEROS: memset(content, 0, PAGE); break;
    case ONES: memset(content, 0xff, PAGE); break;
    case RANDOM: fill_pattern(content, PAGE, seed); break;
    case ONE_BIT:
        memcpy(content, pristine[page], PAGE);
        content[*seed % PAGE] ^= 0x10;
        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        break;
    case OLDER: memcpy(content, older[page], PAGE); break;
    default:
        memcpy(content, pristine[page % METADATA_PAGES == METADATA_PAGES - 1 ? page - 1 : page + 1],
               PAGE);
    }
    return memcmp(content, pristine[page], PAGE) != 0;
}

static bool is_empty(unsigned page)
{
    static const uint8_t zeros[PAGE];

    return memcmp(pristine[page], zeros, PAGE) == 0;
}

/* Of those that hold nothing, the first of each structure and some others. */
static bool is_tried(unsigned page)
{
    unsigned number = page % METADATA_PAGES;

    if (page == METADATA_PAGES + CHECKSUMS_PAGE)
        return true;
    return metadata_page_counts(number) && (!is_empty(page) || number % 37 == 0);
}

static void try_damage(unsigned page, enum damage damage, uint64_t *seed)
{
    bool of_mirror = page >= METADATA_PAGES && page != METADATA_PAGES + CHECKSUMS_PAGE;
    static uint8_t after[PAGES][PAGE];
    struct pcow_check_result result;
    pcow_image *image = NULL;
    uint8_t content[PAGE];
    char what[64];

    if (!make_damage(damage, page, content, seed))
        return;
    snprintf(what, sizeof what, "page %u, %s", page, damage_name[damage]);
    write_page(page, content);
    result = check_image(0, &findings);
    if (!result.corruptions)
        fail_msg("%s: not found", what);
    if (result.lost_size)
        fail_msg("%s: %llu bytes lost", what, (unsigned long long)result.lost_size);
    if (page < METADATA_PAGES && !is_empty(page)) {
        int ret = pcow_open(IMAGE, 0, NULL, &image, NULL);

        if (ret == 0)
            fail_msg("%s: it was opened", what);
    } else if (of_mirror) {
        image = must_open(IMAGE, 0);
        pcow_close(image);
    }
    result = check_image(PCOW_CHECK_REPAIR, &findings);
    if (result.corruptions != result.corruptions_fixed || result.lost_size)
        fail_msg("%s: not repaired: %s", what, findings.text);
    expect_clean(what);
    read_pages(after);
    /* What nothing was ever stored to cannot be told from a lost checksum: it is kept. */
    for (unsigned i = 0; i < PAGES; i++)
        if (metadata_page_counts(i % METADATA_PAGES) && i % METADATA_PAGES != 1
            && !is_empty(page) && memcmp(after[i], pristine[i], PAGE))
            fail_msg("%s: page %u is another one after the repair", what, i);
    for (unsigned i = 0; i < PAGES; i++)
        if (memcmp(after[i], pristine[i], PAGE))
            write_page(i, pristine[i]);
}

static void test_damage_of_each_page(void **state)
{
    uint64_t seed = 7;
    unsigned tried = 0;

    (void)state;
    make_image();
    expect_clean("made");
    expect_content();
    for (unsigned page = 0; page < PAGES; page++)
        for (enum damage damage = 0; is_tried(page) && damage < DAMAGES; damage++, tried++)
            try_damage(page, damage, &seed);
    print_message("%u damages\n", tried);
    expect_content();
    unlink(IMAGE);
}

/* All of it is one slab of the file: it is no witness against what came later. */
static void test_mirror_of_an_older_moment(void **state)
{
    struct pcow_check_result result;
    pcow_image *image;
    uint64_t word;
    int fd;

    (void)state;
    make_image();
    for (unsigned page = METADATA_PAGES; page < PAGES; page++)
        write_page(page, older[page]);
    result = check_image(0, &findings);
    if (!result.corruptions || result.losses || !strstr(findings.text, "of an older moment"))
        fail_msg("%s", findings.text);
    assert_int_not_equal(pcow_open(IMAGE, 0, NULL, &image, NULL), 0);
    /* As a repair leaves it that was interrupted, with all but the header marked. */
    fd = open(IMAGE, O_RDWR | O_CLOEXEC);
    word = checksum_encode(CHECKSUM_STALE, 0);
    for (unsigned page = METADATA_GAP_END; page < METADATA_PAGES; page += 3)
        if (memcmp(pristine[METADATA_PAGES + page], older[METADATA_PAGES + page], PAGE))
            assert_int_equal(pwrite(fd, &word, sizeof word,
                                    (off_t)(mirror_offset(0, CHECKSUMS_PAGE) + page * sizeof word)),
                             sizeof word);
    close(fd);
    result = check_image(PCOW_CHECK_REPAIR, &findings);
    if (result.corruptions != result.corruptions_fixed || result.lost_size)
        fail_msg("%s", findings.text);
    expect_clean("a mirror of an older moment");
    expect_content();
    unlink(IMAGE);
}

/* ---- the same damage of an image without a mirror: a table for the documentation ------------- */

struct row {
    const char *structure;
    unsigned tried, harmless, unseen, repaired, told, untold;
};

/* Does each view read what it should? */
static bool content_is_right(void)
{
    for (unsigned view = 0; view <= SNAPSHOTS; view++) {
        uint8_t content[PAGE];
        pcow_image *image;
        char name[16];
        bool right = true;

        snprintf(name, sizeof name, "s%u", view);
        if (pcow_open(IMAGE, 0, view < SNAPSHOTS ? name : NULL, &image, NULL))
            return false;
        for (unsigned slab = 0; slab < SLABS && right; slab++)
            right = pcow_read(image, slab * PCOW_SLAB_SIZE, content, sizeof content, NULL) == 0
                    && content[0] == model[view][slab] && content[PAGE - 1] == model[view][slab];
        pcow_close(image);
        if (!right)
            return false;
    }
    return true;
}

static void count_damage(struct row *row, const char *saved)
{
    struct pcow_check_result result = check_image(0, &findings);
    bool found = result.corruptions || result.leaks, lost;
    char command[1200];

    row->tried++;
    if (!found) {
        *(content_is_right() ? &row->harmless : &row->unseen) += 1;
        return;
    }
    lost = result.losses;
    check_image(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &findings);
    if (content_is_right())
        row->repaired++;
    else
        *(lost ? &row->told : &row->untold) += 1;
    unlink(scratch("image.pcow.rescue"));
    snprintf(command, sizeof command, "cp --sparse=always %s %s", saved, IMAGE);
    assert_int_equal(system(command), 0);
}

static struct row *row_of(struct row rows[5], unsigned page)
{
    uint64_t offset = (uint64_t)page * PAGE;

    return &rows[offset >= BITMAP_OFFSET        ? 4
                 : offset >= LAYER_TABLE_OFFSET ? 3
                 : offset >= SLAB_TABLE_OFFSET  ? 2
                                                : page];
}

static void print_damage_of(const char *what, bool mirror)
{
    struct row rows[5] = {{.structure = "header"},
                          {.structure = "copy of the header"},
                          {.structure = "slab table"},
                          {.structure = "layer records"},
                          {.structure = "page bitmaps"}};
    char command[1200], saved[600];
    uint64_t seed = 7;

    snprintf(saved, sizeof saved, "%s", scratch("saved"));
    unlink(IMAGE);
    fill_image(mirror ? must_create(IMAGE, SIZE, 4 * KIB, NULL)
                      : must_create_without_mirror(IMAGE, SIZE));
    snprintf(command, sizeof command, "cp --sparse=always %s %s", IMAGE, saved);
    assert_int_equal(system(command), 0);
    print_message("%s\n  %-20s %6s %9s %7s %9s %10s %12s\n", what, "4 KiB of", "tried", "harmless",
                  "unseen", "repaired", "lost, told", "lost, untold");
    for (unsigned page = 0; page < METADATA_PAGES; page++)
        for (enum damage damage = 0; damage < DAMAGES; damage++) {
            uint8_t content[PAGE];

            if (!metadata_page_counts(page) || is_empty(page)
                || !make_damage(damage, page, content, &seed))
                continue;
            write_page(page, content);
            count_damage(row_of(rows, page), saved);
            write_page(page, pristine[page]);
        }
    for (unsigned i = 0; i < 5; i++) {
        print_message("  %-20s %6u %9u %7u %9u %10u %12u\n", rows[i].structure, rows[i].tried,
                      rows[i].harmless, rows[i].unseen, rows[i].repaired, rows[i].told,
                      rows[i].untold);
        if (mirror)
            assert_int_equal(rows[i].tried, rows[i].repaired);
    }
    unlink(saved);
    unlink(IMAGE);
}

static void test_table(void **state)
{
    (void)state;
    print_damage_of("without a mirror", false);
    print_damage_of("with one", true);
}

static void test_what_it_held_is_told(void **state)
{
    static const uint8_t zeros[PAGE];

    (void)state;
    make_image();
    write_page(BITMAP_OFFSET / PAGE, zeros);
    check_image(0, &findings);
    assert_non_null(strstr(findings.text, "page of bitmaps at byte 1048576"));
    assert_non_null(strstr(findings.text, "guest bytes 0 to 127926271 of snapshot"));
    write_page(BITMAP_OFFSET / PAGE, pristine[BITMAP_OFFSET / PAGE]);
    write_page(LAYER_TABLE_OFFSET / PAGE, zeros);
    check_image(0, &findings);
    assert_non_null(strstr(findings.text, "layer records at byte 196608"));
    assert_non_null(strstr(findings.text, "snapshot 's0', snapshot 's1'"));
    unlink(IMAGE);
}

/* Twice damaged: what is left is said, and nothing is taken for right. */
static void test_page_and_mirror(void **state)
{
    static const uint8_t zeros[PAGE];
    unsigned page = BITMAP_OFFSET / PAGE;
    pcow_image *image;

    (void)state;
    make_image();
    write_page(page, zeros);
    write_page(METADATA_PAGES + page, pristine[0]);
    assert_true(check_image(0, &findings).corruptions > 0);
    assert_non_null(strstr(findings.text, "both damaged"));
    assert_non_null(strstr(findings.text, "of layer 1"));
    assert_true(pcow_open(IMAGE, 0, NULL, &image, NULL) < 0);
    unlink(IMAGE);
}

/* A writer that is killed leaves what it stored to stale: no damage, and the next one mends it. */
static void test_killed_writer(void **state)
{
    uint64_t words[METADATA_PAGES];
    pcow_image *image;
    int status, fd;
    pid_t child;

    (void)state;
    make_image();
    child = fork();
    if (child == 0) {
        if (pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL))
            _exit(1);
        for (unsigned slab = 5; slab < 200; slab += 3) {
            uint8_t content[PAGE];

            memset(content, 9, sizeof content);
            if (pcow_write(image, slab * PCOW_SLAB_SIZE, content, sizeof content, NULL))
                _exit(2);
        }
        _exit(pcow_snapshot_create(image, "killed", NULL) ? 3 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    expect_clean("killed");
    pcow_close(must_open(IMAGE, 0));
    fd = open(IMAGE, O_RDONLY | O_CLOEXEC);
    assert_int_equal(pread(fd, words, sizeof words, (off_t)mirror_offset(0, CHECKSUMS_PAGE)),
                     sizeof words);
    assert_true(checksum_is(words[0], CHECKSUM_STALE));
    pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
    assert_int_equal(pread(fd, words, sizeof words, (off_t)mirror_offset(0, CHECKSUMS_PAGE)),
                     sizeof words);
    close(fd);
    for (unsigned page = 0; page < METADATA_PAGES; page++)
        if (metadata_page_counts(page))
            assert_false(checksum_is(words[page], CHECKSUM_STALE));
    expect_clean("opened again");
    unlink(IMAGE);
}

static void store_one_and_die(void)
{
    uint8_t content[PAGE];
    pid_t child = fork();
    pcow_image *image;
    int status;

    memset(content, 9, sizeof content);
    if (child == 0)
        _exit(pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL)
              || pcow_write(image, 5 * PCOW_SLAB_SIZE, content, sizeof content, NULL));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    model[SNAPSHOTS][5] = 9;
}

/* Its header counts a generation more than the mirror's. All that it had not changed is judged. */
static void test_damage_after_a_kill(void **state)
{
    static uint8_t killed[PAGES][PAGE];
    const uint64_t *words = (const uint64_t *)killed[METADATA_PAGES + CHECKSUMS_PAGE];
    uint64_t seed = 3;
    unsigned tried = 0;

    (void)state;
    make_image();
    store_one_and_die();
    read_pages(killed);
    assert_true(checksum_is(words[0], CHECKSUM_STALE));
    memcpy(pristine, killed, sizeof pristine);
    for (unsigned page = 0; page < METADATA_PAGES; page++)
        for (enum damage damage = 0; damage < DAMAGES; damage++) {
            struct pcow_check_result result;
            uint8_t content[PAGE];

            if (!metadata_page_counts(page) || !checksum_is(words[page], CHECKSUM_VALID)
                || !make_damage(damage, page, content, &seed))
                continue;
            write_page(page, content);
            result = check_image(PCOW_CHECK_REPAIR, &findings);
            if (!result.corruptions || result.corruptions != result.corruptions_fixed
                || result.losses || result.lost_size)
                fail_msg("page %u, %s: %s", page, damage_name[damage], findings.text);
            tried++;
            if (tried % 50 == 1)
                expect_content();
            for (unsigned i = 0; i < PAGES; i++)
                write_page(i, killed[i]);
        }
    assert_true(tried > 100);
    unlink(IMAGE);
}

/* A child stores to slabs and is killed; what it flushed counts. */
static void store_and_die(uint8_t fill)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        uint8_t content[PAGE];
        pcow_image *image;

        memset(content, fill, sizeof content);
        if (pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL))
            _exit(1);
        for (unsigned slab = 0; slab < 8; slab++)
            if (pcow_write(image, slab * PCOW_SLAB_SIZE, content, sizeof content, NULL))
                _exit(2);
        _exit(pcow_flush(image, NULL) ? 3 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void expect_stored(uint8_t fill)
{
    uint8_t content[PAGE];
    pcow_image *image = must_open(IMAGE, 0);

    for (unsigned slab = 0; slab < 8; slab++) {
        MUST(pcow_read(image, slab * PCOW_SLAB_SIZE, content, sizeof content, &error));
        assert_int_equal(content[0], fill);
    }
    pcow_close(image);
}

/*
 * The medium lost the checksums of an image whose only writer was killed: its copies are empty
 * still, and must not be taken for what the pages held.
 */
static void test_checksums_lost_after_a_kill(void **state)
{
    static const uint8_t zeros[PAGE];

    (void)state;
    pcow_close(must_create(IMAGE, SIZE, 0, NULL));
    store_and_die(7);
    write_page(METADATA_PAGES + CHECKSUMS_PAGE, zeros);
    assert_true(check_image(0, &findings).corruptions > 0);
    check_image(PCOW_CHECK_REPAIR, &findings);
    expect_stored(7);
    expect_clean("repaired");
    unlink(IMAGE);
}

/*
 * A crash lost the marks, and of the word that says so a bit is wrong: the pages count, also when
 * the repair is killed and done again.
 */
static void test_damaged_word_unordered(void **state)
{
    uint64_t words[METADATA_PAGES];
    struct pcow_error error;
    bool killed = true;

    (void)state;
    for (unsigned step = 0; killed; step++) {
        pcow_image *image = must_create(IMAGE, SIZE, 0, NULL);

        store(image, 0, 1);
        pcow_close(image);
        read_pages(pristine);
        memcpy(words, pristine[METADATA_PAGES + CHECKSUMS_PAGE], sizeof words);
        store_and_die(9);
        words[CHECKSUMS_UNORDERED] = word_encode(1) ^ 8;
        write_page(METADATA_PAGES + CHECKSUMS_PAGE, words);
        assert_int_equal(pcow_open(IMAGE, 0, NULL, &image, &error), -EBADMSG);
        killed = repair_until(step);
        check_image(PCOW_CHECK_REPAIR, &findings);
        expect_stored(9);
        expect_clean("repaired");
        unlink(IMAGE);
    }
}

/* Who reads beside a writer is told nothing of what is stale at the moment. */
static void test_beside_a_writer(void **state)
{
    struct pcow_check_result result;
    pcow_image *image, *beside;

    (void)state;
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    store(image, SNAPSHOTS, 3);
    MUST(pcow_open(IMAGE, PCOW_OPEN_FORCE_SHARE, NULL, &beside, &error));
    pcow_close(beside);
    MUST(pcow_open(IMAGE, 0, "s3", &beside, &error));
    pcow_close(beside);
    findings.text[0] = 0;
    MUST(pcow_check(IMAGE, PCOW_CHECK_FORCE_SHARE, add_finding, &findings, &result, &error));
    assert_int_equal(result.corruptions, 0);
    pcow_close(image);
    expect_clean("closed");
    unlink(IMAGE);
}

/* A snapshot is marked by who makes an image on it, beside the writer or without one. */
static void test_mark_of_another_process(void **state)
{
    struct pcow_create_options options = {.base = IMAGE, .base_snapshot = "s3"};

    (void)state;
    make_image();
    MUST(pcow_create(scratch("top.pcow"), &options, &error));
    expect_clean("pinned without a writer");
    pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
    expect_clean("opened");
    options.base_snapshot = "s4";
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    store(image, SNAPSHOTS, 3);
    MUST(pcow_create(scratch("top2.pcow"), &options, &error));
    pcow_close(image);
    expect_clean("pinned beside a writer");
    expect_content();
    unlink(scratch("top.pcow"));
    unlink(scratch("top2.pcow"));
    unlink(IMAGE);
}

/* One without it works as before. */
static void test_image_without(void **state)
{
    pcow_image *image = must_create_without_mirror(IMAGE, SIZE);
    struct pcow_info info;

    (void)state;
    store(image, 0, 1);
    pcow_get_info(image, &info);
    assert_int_equal(info.read_only_compatible_features, 0);
    assert_int_equal(info.file_size % (64 * PCOW_SLAB_SIZE), 0);
    pcow_close(image);
    expect_clean("without");
    unlink(IMAGE);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_damage_of_each_page),
        TEST(test_mirror_of_an_older_moment), TEST(test_table),
        TEST(test_what_it_held_is_told),
        TEST(test_page_and_mirror),     TEST(test_killed_writer),
        TEST(test_beside_a_writer),     TEST(test_mark_of_another_process),
        TEST(test_checksums_lost_after_a_kill), TEST(test_damaged_word_unordered),
        TEST(test_damage_after_a_kill), TEST(test_image_without),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
