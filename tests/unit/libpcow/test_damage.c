/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A rich image (a base, a tree of snapshots, VM state, a fork), of which each page of metadata that
 * holds anything is damaged in each way, with a mirror and without; and one with a mirror that is
 * cut short at each 64 KiB. Prints the tables of "Damaged images" in the documentation.
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

/* ---- 4 KiB ----------------------------------------------------------------------------------- */

enum fill { ZEROS, ONES, RANDOM, OLDER, NEIGHBOUR, FILLS };
static const char *const fill_name[] = {"zeros", "ones", "random", "older", "neighbour"};

enum { HEADER, COPY, SLAB_TABLE, RECORDS, BITMAPS, STRUCTURES };
static const char *const structure_name[] = {"header", "copy of the header", "slab table",
                                             "layer records", "page bitmaps"};

/* H harmless, u unseen, R repaired, L lost and told, X lost and not told; . the same as before */
struct judged {
    char of[STRUCTURES][FILLS + 1];
};

static const uint8_t *page_of(unsigned page)
{
    return rich->bytes + (uint64_t)page * PAGE;
}

static bool is_used(unsigned page)
{
    const uint8_t *content = page_of(page);

    return metadata_page_counts(page) && (content[0] || memcmp(content, content + 1, PAGE - 1));
}

static unsigned structure_of(unsigned page)
{
    uint64_t offset = (uint64_t)page * PAGE;

    return offset >= BITMAP_OFFSET        ? BITMAPS
           : offset >= LAYER_TABLE_OFFSET ? RECORDS
           : offset >= SLAB_TABLE_OFFSET  ? SLAB_TABLE
                                          : page;
}

static void overwrite(uint64_t offset, const void *from, size_t length)
{
    int fd = open(IMAGE, O_WRONLY);

    assert_int_equal(pwrite(fd, from, length, (off_t)offset), length);
    close(fd);
}

static bool damage_in_place(unsigned page, enum fill fill)
{
    uint8_t content[PAGE];
    uint64_t seed = page + 77;

    memset(content, fill == ONES ? 0xff : 0, sizeof content);
    if (fill == RANDOM)
        fill_pattern(content, sizeof content, &seed);
    if (fill == OLDER)
        memcpy(content, rich->older + (uint64_t)page * PAGE, sizeof content);
    if (fill == NEIGHBOUR)
        memcpy(content, page_of(page + 1), sizeof content);
    if (!memcmp(content, page_of(page), sizeof content))
        return false;
    overwrite((uint64_t)page * PAGE, content, sizeof content);
    return true;
}

static bool damage(unsigned page, enum fill fill)
{
    rich_put_back(rich);
    return damage_in_place(page, fill);
}

static bool metadata_is_as_before(void)
{
    static uint8_t now[2 * PCOW_SLAB_SIZE];
    int fd = open(IMAGE, O_RDONLY);

    assert_int_equal(pread(fd, now, sizeof now, 0), sizeof now);
    close(fd);
    return memcmp(now, rich->bytes, sizeof now) == 0;
}

static bool opens(const char *path, const char *snapshot)
{
    pcow_image *image;

    if (pcow_open(path, 0, snapshot, &image, NULL))
        return false;
    pcow_close(image);
    return true;
}

/* Neither the image nor a snapshot of it, nor what stands on one. */
static bool anything_opens(void)
{
    bool any = opens(IMAGE, NULL) || opens(scratch("fork.pcow"), NULL);

    for (uint32_t id = 1; id <= RICH_LAYERS && !any; id++)
        any = !rich->layer[id].dead && opens(IMAGE, rich->layer[id].name);
    return any;
}

static struct pcow_check_result check_unlocked(void)
{
    struct pcow_check_result result;

    findings.text[0] = 0;
    MUST(pcow_check(IMAGE, PCOW_CHECK_FORCE_SHARE, add_finding, &findings, &result, &error));
    return result;
}

static void expect_word(const char *what, const char *word)
{
    if (!strstr(findings.text, word))
        fail_msg("%s: not %s, but %s", what, word, findings.text);
}

/* Of a file slab, as far as its owner word or its bitmap is damaged. */
static void expect_slab(const char *what, const struct owner *owner)
{
    const char *name = rich->layer[owner->layer].name;
    char whose[160];

    if (owner->kind == OWNER_NONE)
        return;
    if (owner->layer == RICH_LAYERS)
        snprintf(whose, sizeof whose, "of the active layer");
    else
        snprintf(whose, sizeof whose, "of snapshot '%s'", name);
    expect_word(what, whose);
    expect_word(what, owner->kind == OWNER_STATE ? "VM state bytes " : "guest bytes ");
}

/* Where it lies, what it is, and what it was about: layers by their names, and ranges. */
static void expect_words(unsigned page, const char *what)
{
    static const char *const name[] = {"header at byte 0 ", "copy of the header at byte 4096 ",
                                       "page of the slab table at byte ", "page of layer records at byte ",
                                       "page of bitmaps at byte "};
    unsigned structure = structure_of(page);
    char where[32];

    snprintf(where, sizeof where, " byte %llu ", (unsigned long long)page * PAGE);
    expect_word(what, where);
    expect_word(what, name[structure]);
    for (uint64_t slab = 1; slab < rich->slabs && structure == SLAB_TABLE; slab++)
        expect_slab(what, &rich->owner[slab]);
    for (uint64_t slab = 1; slab < rich->slabs && structure == BITMAPS; slab++)
        expect_slab(what, &rich->owner[slab]);
    for (uint32_t id = 1; id < RICH_LAYERS && structure == RECORDS; id++)
        if (!rich->layer[id].dead)
            expect_word(what, rich->layer[id].name);
}

static char judge(bool mirror, unsigned page, const char *what)
{
    struct pcow_check_result found = check_image(0, &findings), found_without, repaired;
    bool any;

    found_without = check_unlocked();
    if (found_without.corruptions_certain != found.corruptions
        || found_without.leaks != found.leaks || found_without.lost_size != found.lost_size)
        fail_msg("%s: without a lock other things are found: %s", what, findings.text);
    if (!found.corruptions && !found.leaks)
        return rich_is_right(rich) ? 'H' : 'u';
    if (mirror)
        expect_words(page, what);
    any = anything_opens();
    if (mirror && (any || found.losses))
        fail_msg("%s: %s, and %llu losses are told: %s", what,
                 any ? "something of it was opened" : "nothing opens",
                 (unsigned long long)found.losses, findings.text);
    repaired = check_image(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &findings);
    assert_int_equal(repaired.losses, found.losses);
    assert_int_equal(repaired.corruptions, repaired.corruptions_fixed);
    repaired = check_image(0, &findings);
    if (repaired.corruptions || repaired.leaks)
        fail_msg("%s: after the repair: %s", what, findings.text);
    if (mirror && !metadata_is_as_before())
        fail_msg("%s: the metadata is not what it was", what);
    return rich_is_right(rich) ? 'R' : found.losses ? 'L' : 'X';
}

static void try_all(bool mirror, struct judged *judged)
{
    memset(judged, 0, sizeof *judged);
    for (unsigned page = 0; page < METADATA_PAGES; page++)
        for (enum fill fill = ZEROS; is_used(page) && fill < FILLS; fill++) {
            char *to = &judged->of[structure_of(page)][fill], what[64];

            /* One page of each structure is used. */
            assert_int_equal(*to, 0);
            snprintf(what, sizeof what, "page %u, %s", page, fill_name[fill]);
            *to = damage(page, fill) ? judge(mirror, page, what) : '.';
        }
}

static void print(const struct judged *judged)
{
    print_message("  %-20s", "4 KiB of");
    for (enum fill fill = ZEROS; fill < FILLS; fill++)
        print_message(" %10s", fill_name[fill]);
    for (unsigned i = 0; i < STRUCTURES; i++) {
        print_message("\n  %-20s", structure_name[i]);
        for (enum fill fill = ZEROS; fill < FILLS; fill++)
            print_message(" %10c", judged->of[i][fill]);
    }
    print_message("\n");
}

static void test_pages(bool mirror, const struct judged *expected)
{
    struct judged judged;

    rich = rich_make(mirror);
    assert_true(rich_is_right(rich));
    try_all(mirror, &judged);
    print(&judged);
    for (unsigned i = 0; i < STRUCTURES; i++)
        assert_string_equal(judged.of[i], expected->of[i]);
    rich_free(rich);
}

static void test_pages_without_mirror(void **state)
{
    /* The neighbour of the header is its copy. */
    static const struct judged expected = {{"RRRR.", "RRRHR", "LLLLL", "LLLLL", "LuuLL"}};

    (void)state;
    test_pages(false, &expected);
}

static void test_pages_with_mirror(void **state)
{
    static const struct judged expected = {{"RRRR.", "RRRRR", "RRRRR", "RRRRR", "RRRRR"}};

    (void)state;
    test_pages(true, &expected);
}

/* ---- beside a writer, and after one that was killed ------------------------------------------ */

static void store_page(pcow_image *image, uint64_t page)
{
    uint8_t content[PAGE];

    rich_page(RICH_LAYERS, page, content);
    MUST(pcow_write(image, page * PAGE, content, PAGE, &error));
}

/* Of a page that it has not changed, damage is noticed by who opens a snapshot meanwhile. */
static void test_snapshots_beside_a_writer(void **state)
{
    const char *name;
    unsigned noticed = 0;

    (void)state;
    rich = rich_make(true);
    name = rich->layer[1].name;
    for (unsigned page = 2; page < METADATA_PAGES; page++) {
        pcow_image *writer;
        bool opened;

        if (!is_used(page))
            continue;
        rich_put_back(rich);
        writer = must_open(IMAGE, PCOW_OPEN_WRITE);
        assert_true(opens(IMAGE, name) && opens(scratch("fork.pcow"), NULL));
        assert_true(damage_in_place(page, RANDOM));
        opened = opens(IMAGE, name);
        assert_int_equal(opened, opens(scratch("fork.pcow"), NULL));
        assert_int_equal(opened, !check_unlocked().corruptions_certain);
        noticed += !opened;
        overwrite((uint64_t)page * PAGE, page_of(page), PAGE);
        store_page(writer, 0);
        assert_true(opens(IMAGE, name));
        pcow_close(writer);
        assert_true(opens(IMAGE, name));
    }
    assert_true(noticed > 2);
    rich_free(rich);
}

/* As by mkfs in the wrong place: all is in the mirror. */
static void test_begin_is_gone(void **state)
{
    static const uint8_t zeros[MIB];

    (void)state;
    rich = rich_make(true);
    for (size_t length = 2 * PAGE; length <= sizeof zeros; length *= 4) {
        struct pcow_check_result result;

        rich_put_back(rich);
        overwrite(0, zeros, length);
        assert_false(anything_opens());
        result = check_image(PCOW_CHECK_REPAIR, &findings);
        if (result.losses || result.corruptions != result.corruptions_fixed)
            fail_msg("%zu bytes: %s", length, findings.text);
        assert_true(metadata_is_as_before());
        assert_true(rich_is_right(rich));
    }
    rich_free(rich);
}

/* To each slab of the newest layer, by a child that is killed. */
static void write_and_die(void)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        pcow_image *image;

        if (pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL))
            _exit(1);
        for (uint64_t page = 0; page < RICH_PAGES; page += PAGES_PER_SLAB)
            store_page(image, page);
        _exit(pcow_flush(image, NULL) ? 3 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/*
 * A writer that was killed leaves pages without a checksum. What a snapshot has in them was there
 * before: where it is gone, it is lost, and no mere leak.
 */
static void test_damaged_after_a_kill(void **state)
{
    static const uint8_t zeros[PAGE];
    struct pcow_check_result result;

    (void)state;
    rich = rich_make(true);
    write_and_die();
    result = check_image(0, &findings);
    assert_int_equal(result.corruptions + result.leaks_doubtful, 0);
    overwrite(BITMAP_OFFSET, zeros, PAGE);
    result = check_image(0, &findings);
    assert_int_equal(result.corruptions, 0);
    assert_true(result.leaks_doubtful > 0 && result.leaks_doubtful < result.leaks);
    assert_true(result.losses > 0);
    assert_int_equal(result.leaks_unflushed, 0);
    rich_free(rich);
}

/*
 * What a snapshot or the newest layer had before the last writer came, and what the mirror still
 * tells: the next writer does not go on with it, and a repair asks for a word.
 */
static void test_writer_after_a_kill(void **state)
{
    static const uint8_t zeros[PAGE];
    static const uint64_t lost[] = {BITMAP_OFFSET, SLAB_TABLE_OFFSET};

    (void)state;
    rich = rich_make(true);
    for (unsigned way = 0; way < 2; way++) {
        struct pcow_check_result result;
        struct pcow_error refusal;
        pcow_image *image;

        rich_put_back(rich);
        write_and_die();
        pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
        rich_put_back(rich);
        write_and_die();
        overwrite(lost[way], zeros, PAGE);
        result = check_image(0, &findings);
        assert_true(result.corruptions + result.leaks_doubtful > 0);
        assert_int_equal(pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &refusal), -EBADMSG);
        if (!strstr(refusal.message, "its last writer was killed"))
            fail_msg("%s", refusal.message);
        assert_int_equal(check_image(0, &findings).leaks_doubtful, result.leaks_doubtful);
        assert_true(check_image(PCOW_CHECK_REPAIR, &findings).refused);
        check_image(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &findings);
        pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
    }
    rich_free(rich);
}

/* What a layer had lost by being shrunk, before it became a snapshot, is not missed. */
static void test_shrunk_before_a_snapshot(void **state)
{
    uint8_t content[PAGE];
    int status;
    pid_t child;

    (void)state;
    memset(content, 7, sizeof content);
    pcow_image *image = must_create(IMAGE, 64 * MIB, 0, NULL);

    for (uint64_t at = 0; at < 32 * MIB; at += PAGE)
        MUST(pcow_write(image, at, content, sizeof content, &error));
    pcow_close(image);
    child = fork();
    if (child == 0) {
        pcow_map *map;

        if (pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL)
            || pcow_resize(image, 2 * MIB, true, NULL) || pcow_resize(image, 64 * MIB, false, NULL)
            || pcow_snapshot_create(image, "s1", NULL)
            || pcow_map_create(image, &(struct pcow_map_options){.prepared_slabs = 8}, &map, NULL))
            _exit(1);
        for (unsigned i = 8; i < 20; i++)
            ((volatile uint8_t *)pcow_map_address(map))[i * PCOW_SLAB_SIZE] = 1;
        usleep(100000);
        _exit(pcow_map_flush(map, 0, 64 * MIB, NULL) ? 3 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    if (check_image(0, &findings).leaks_doubtful)
        fail_msg("%s", findings.text);
    pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
}

static bool is_settled(void)
{
    uint64_t words[METADATA_PAGES];
    bool settled;
    int fd = open(IMAGE, O_RDONLY);

    assert_int_equal(pread(fd, words, sizeof words, (off_t)mirror_offset(0, CHECKSUMS_PAGE)),
                     sizeof words);
    close(fd);
    settled = words[CHECKSUMS_UNORDERED] == 0;
    for (unsigned page = 0; page < METADATA_PAGES; page++)
        settled &= !metadata_page_counts(page) || !checksum_is(words[page], CHECKSUM_STALE);
    return settled;
}

/* Who makes an image on a snapshot leaves all checksums of the base, if nobody writes to that. */
static void test_mark_of_a_snapshot(void **state)
{
    struct pcow_create_options options = {0};
    pcow_image *writer;
    char base[512], layer[64];

    (void)state;
    rich = rich_make(true);
    snprintf(base, sizeof base, "%s", IMAGE);
    snprintf(layer, sizeof layer, "%s", rich->layer[2].name);
    options.base = base;
    options.base_snapshot = layer;
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    store_page(writer, 0);
    pcow_close(writer);
    assert_true(is_settled());
    MUST(pcow_create(scratch("other.pcow"), &options, &error));
    assert_true(is_settled());
    unlink(scratch("other.pcow"));
    MUST(pcow_snapshot_unpin(IMAGE, layer, &error));
    assert_true(is_settled());
    /* beside a writer it is his, and what a killed one has left stays to be judged */
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_create(scratch("other.pcow"), &options, &error));
    assert_false(is_settled());
    store_page(writer, 0);
    pcow_close(writer);
    assert_true(is_settled());
    write_and_die();
    MUST(pcow_create(scratch("third.pcow"), &options, &error));
    assert_false(is_settled());
    rich_free(rich);
}

/* Which of them is right, nobody can tell: a repair is asked for in words. */
static void test_page_and_its_mirror(void **state)
{
    static const uint8_t zeros[PAGE];
    uint8_t random[PAGE];
    uint64_t zero = 0, seed = 11;

    (void)state;
    fill_pattern(random, PAGE, &seed);
    rich = rich_make(true);
    for (unsigned way = 0; way < 5; way++) {
        unsigned page = (unsigned)(BITMAP_OFFSET / PAGE);
        uint64_t word = mirror_offset(0, CHECKSUMS_PAGE) + page * sizeof zero;
        struct pcow_check_result result;

        rich_put_back(rich);
        overwrite(BITMAP_OFFSET, zeros, PAGE);
        if (way == 4)
            overwrite(BITMAP_OFFSET, random, PAGE);
        if (way == 0)
            overwrite(mirror_offset(0, page), &word, sizeof word);
        else if (way > 2)
            overwrite(mirror_offset(0, page), way == 4 ? random : zeros, PAGE);
        else
            overwrite(word, way == 1 ? &zero : &word, sizeof zero);
        assert_false(anything_opens() && way != 1);
        result = check_image(0, &findings);
        assert_true(result.corruptions > 0 && result.losses > 0);
        result = check_image(PCOW_CHECK_REPAIR, &findings);
        assert_true(result.refused && result.corruptions_fixed == 0);
        result = check_image(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &findings);
        assert_int_equal(result.corruptions, result.corruptions_fixed);
        result = check_image(0, &findings);
        if (result.corruptions || result.leaks)
            fail_msg("after the repair: %s", findings.text);
    }
    rich_free(rich);
}

/* ---- cut short ------------------------------------------------------------------------------- */

struct cut {
    const char *what;
    unsigned tried, as_told[3];                /* by enum pcow_certainty */
};

/*
 * Found, told in the way that it should, repaired, and open again. more: the header is damaged,
 * too, and known from its copy; and so is the mirror of a page that holds nothing.
 */
static void try_cut(uint64_t length, bool more, struct cut *cut)
{
    const uint64_t all = rich_data(rich) + rich_states(rich), lost = rich_behind(rich, length),
                   records = LAYER_TABLE_OFFSET + RICH_LAYERS * LAYER_RECORD_SIZE;
    enum pcow_certainty certainty = length > BITMAP_OFFSET                     ? PCOW_EXACT
                                    : length > LAYER_TABLE_OFFSET - 64 * KIB ? PCOW_AT_MOST
                                                                             : PCOW_ESTIMATE;
    uint64_t least = certainty == PCOW_EXACT      ? lost
                     : length > records           ? all
                     : certainty == PCOW_AT_MOST ? rich_data(rich)
                                                  : 0;
    struct pcow_check_result result, repaired;
    pcow_image *image;

    rich_put_back(rich);
    if (more) {
        overwrite(0, "damaged", 8);
        overwrite(mirror_offset(0, LAYER_TABLE_OFFSET / PAGE + 1), "damaged", 8);
    }
    assert_int_equal(truncate(IMAGE, (off_t)length), 0);
    result = check_image(0, &findings);
    if (result.lost_certainty != certainty || result.lost_size < least
        || result.lost_size > (certainty == PCOW_EXACT ? lost : rich->size)
        || (!result.losses && (lost || certainty != PCOW_EXACT)))
        fail_msg("cut at %llu KiB: %llu bytes are said to be lost (%d), not %llu (%d): %s",
                 (unsigned long long)(length / KIB), (unsigned long long)result.lost_size,
                 result.lost_certainty, (unsigned long long)least, certainty, findings.text);
    if ((lost || more || length % PCOW_SLAB_SIZE) && pcow_open(IMAGE, 0, NULL, &image, NULL) == 0)
        fail_msg("cut at %llu KiB: it was opened", (unsigned long long)(length / KIB));
    cut->tried++;
    cut->as_told[certainty]++;
    repaired = check_image(PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &findings);
    assert_int_equal(repaired.corruptions, repaired.corruptions_fixed);
    assert_int_equal(repaired.lost_size, result.lost_size);
    repaired = check_image(0, &findings);
    if (repaired.corruptions || repaired.leaks)
        fail_msg("cut at %llu KiB: after the repair: %s", (unsigned long long)(length / KIB),
                 findings.text);
    pcow_close(must_open(IMAGE, 0));
    if (certainty == PCOW_EXACT && length % MIB == 0)
        rich_expect_rest(rich, length);
}

static void test_cut_with_mirror(void **state)
{
    struct cut cuts[] = {{.what = "metadata (2 MiB)"}, {.what = "mirror, checksums (4 MiB)"},
                         {.what = "data"}};

    (void)state;
    rich = rich_make(true);
    for (uint64_t length = 64 * KIB; length < rich->size; length += 64 * KIB)
        try_cut(length, false, &cuts[length < PCOW_SLAB_SIZE                  ? 0
                              : length < MIRROR_HEADS * PCOW_SLAB_SIZE ? 1
                                                                       : 2]);
    print_message("  %-27s %6s %8s %8s %9s\n", "cut in the", "tried", "exact", "at most",
                  "estimate");
    for (unsigned i = 0; i < 3; i++)
        print_message("  %-27s %6u %8u %8u %9u\n", cuts[i].what, cuts[i].tried,
                      cuts[i].as_told[PCOW_EXACT], cuts[i].as_told[PCOW_AT_MOST],
                      cuts[i].as_told[PCOW_ESTIMATE]);
    rich_free(rich);
}

/* The repair of the header makes the file longer; what was behind its end is lost all the same. */
static void test_cut_and_damaged(void **state)
{
    struct cut cut = {0};

    (void)state;
    rich = rich_make(true);
    for (uint64_t length = 64 * KIB; length < 10 * MIB; length += 448 * KIB)
        try_cut(length, true, &cut);
    rich_free(rich);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_pages_without_mirror),
        TEST(test_pages_with_mirror),
        TEST(test_snapshots_beside_a_writer),
        TEST(test_damaged_after_a_kill),
        TEST(test_begin_is_gone),
        TEST(test_writer_after_a_kill),
        TEST(test_shrunk_before_a_snapshot),
        TEST(test_mark_of_a_snapshot),
        TEST(test_page_and_its_mirror),
        TEST(test_cut_with_mirror),
        TEST(test_cut_and_damaged),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
