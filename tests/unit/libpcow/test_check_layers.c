/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * pcow_check(): layer records, the tree, the counters of the header; and damage of any kind at
 * random.
 */
#include "check_support.h"

#include <signal.h>
#include <sys/wait.h>

#define STATE 0
#define PARENT 8
#define VIRTUAL_SIZE 16
#define PARENT_LIMIT 24
#define STATE_SIZE 32
#define NAME 56
#define CRC 252
#define WORD(field) offsetof(struct header, field)

/* Like expect_content(), but a snapshot whose name was lost is called recovered-<id>. */
static void expect_content_by_id(void)
{
    pcow_image *image = must_open(IMAGE, 0);
    struct pcow_snapshot *list;
    size_t count;

    MUST(pcow_snapshot_list(image, &list, &count, &error));
    pcow_close(image);
    assert_int_equal(count, 2);
    for (unsigned i = 0; i < 2; i++) {
        char recovered[32];

        assert_int_equal(list[i].id, i + 1);
        assert_int_equal(list[i].parent_id, i);
        assert_int_equal(list[i].virtual_size, SIZE);
        snprintf(recovered, sizeof recovered, "recovered-%u", i + 1);
        if (strcmp(list[i].name, view_name[i]))
            assert_string_equal(list[i].name, recovered);
        expect_view(list[i].name, i);
    }
    assert_true(list[1].current);
    free(list);
    expect_view(NULL, 2);
}

static void test_every_word_of_every_record(void **state)
{
    static const size_t field[] = {STATE, PARENT, VIRTUAL_SIZE, PARENT_LIMIT, STATE_SIZE};

    (void)state;
    for (uint32_t slot = 0; slot < 3; slot++)
        for (size_t i = 0; i < sizeof field / sizeof field[0]; i++)
            for (unsigned byte = 0; byte < 8; byte += 3) {
                make_image();
                flip(record_offset(slot, field[i]) + byte, 0x2a);
                expect_repair(field[i] == PARENT_LIMIT ? "parent_limit" : "layer");
                expect_content_by_id();
            }
    expect_usable();
}

static void test_damaged_names(void **state)
{
    struct findings *found;
    pcow_image *image;

    (void)state;
    make_image();
    flip(record_offset(1, NAME), 1);
    expect_repair("name");
    expect_view("recovered-2", 1);
    expect_content_by_id();
    make_image();
    flip(record_offset(0, CRC), 0x80);
    expect_repair("name");
    expect_view("recovered-1", 0);
    /* The name that it would be given is taken. */
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_rename(image, "s2", "recovered-1", &error));
    pcow_close(image);
    flip(record_offset(0, CRC), 0x80);
    expect_repair("name");
    expect_view("recovered-1", 1);
    expect_view("recovered-1-2", 0);
    expect_usable();
    /* The active layer has a description that does not count. */
    make_image();
    flip(record_offset(2, NAME), 1);
    flip(record_offset(2, CRC), 1);
    found = run_check(0);
    assert_int_equal(found->count, 0);
}

static void test_one_name_twice(void **state)
{
    struct layer_record record;

    (void)state;
    make_image();
    peek(record_offset(1, 0), &record, sizeof record);
    strcpy(record.name, "s1");
    record.crc = layer_record_crc(&record);
    poke(record_offset(1, 0), &record, sizeof record);
    expect_repair("one name");
    expect_view("s1", 0);
    expect_view("recovered-2", 1);
    expect_usable();
}

/* A media error that was cleared: a record of zeros. */
static void test_wiped_records(void **state)
{
    uint8_t zeros[LAYER_RECORD_SIZE] = {0};

    (void)state;
    for (uint32_t slot = 0; slot < 3; slot++) {
        make_image();
        poke(record_offset(slot, 0), zeros, sizeof zeros);
        expect_repair("has no record");
        expect_content_by_id();
        expect_usable();
    }
}

static void test_all_records_wiped(void **state)
{
    uint8_t zeros[3 * LAYER_RECORD_SIZE] = {0};
    struct findings *found;

    (void)state;
    make_image();
    poke(record_offset(0, 0), zeros, sizeof zeros);
    found = expect_repair("has no record");
    assert_int_equal(found->result.lost_size, 0);
    expect_content_by_id();
    expect_usable();
}

static void test_impossible_words(void **state)
{
    static const struct {
        size_t field;
        uint64_t value;
    } damage[] = {
        {PARENT, 3},
        {PARENT, 2},
        {PARENT, MAX_LAYER_ID},
        {PARENT, UINT64_C(1) << 40},
        {VIRTUAL_SIZE, 0},
        {VIRTUAL_SIZE, SIZE + 4096},
        {VIRTUAL_SIZE, PCOW_MAX_VIRTUAL_SIZE + PCOW_SLAB_SIZE},
        {PARENT_LIMIT, 5},
        {STATE_SIZE, PCOW_MAX_VIRTUAL_SIZE * 2},
        {STATE_SIZE, 77},
        {STATE, 0xf0000002},
        {STATE, LAYER_SNAPSHOT << 28},
    };

    (void)state;
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++) {
        make_image();
        poke_word(record_offset(1, damage[i].field), damage[i].value);
        expect_repair(damage[i].value == 77 ? "VM state" : "layer");
        expect_content_by_id();
    }
    expect_usable();
}

static void test_deleted_parent(void **state)
{
    (void)state;
    make_image();
    poke_word(record_offset(1, STATE), word_value(layer_state_word(2, LAYER_FREE, 0, 0)));
    expect_repair("deleted");
    expect_content_by_id();
    expect_usable();
}

static void test_two_records_of_one_layer(void **state)
{
    struct layer_record record;
    struct findings *found;

    (void)state;
    /* A rename that was interrupted before it freed the old record. */
    make_image();
    peek(record_offset(0, 0), &record, sizeof record);
    strcpy(record.name, "new");
    record.crc = layer_record_crc(&record);
    record.state = layer_state_word(1, LAYER_SNAPSHOT, 0, 1);
    poke(record_offset(3, 0), &record, sizeof record);
    poke_word(WORD(layer_slots), 4);
    found = run_check(0);
    assert_int_equal(found->result.corruptions, 0);
    assert_int_equal(found->result.leaks, 1);
    assert_non_null(strstr(found->text, "rename"));
    run_check(PCOW_CHECK_REPAIR);
    expect_clean();
    expect_view("new", 0);
    expect_view("s2", 1);
    expect_view(NULL, 2);
    expect_usable();
    /* The same sequence: no operation leaves that. */
    make_image();
    record.state = layer_state_word(1, LAYER_SNAPSHOT, 0, 0);
    poke(record_offset(3, 0), &record, sizeof record);
    poke_word(WORD(layer_slots), 4);
    expect_repair("both describe");
    expect_view("new", 0);
    expect_usable();
}

static void test_interrupted_operations(void **state)
{
    struct findings *found;
    pcow_image *image;

    (void)state;
    /* Create, after its commit: the frozen layer is still called open, and may not be whole. */
    make_image();
    poke_word(record_offset(1, STATE), word_value(layer_state_word(2, LAYER_OPEN, 0, 0)));
    found = run_check(0);
    assert_int_equal(found->result.corruptions + found->result.leaks, 0);
    assert_non_null(strstr(found->text, "'s2' was interrupted"));
    expect_view("s1", 0);
    expect_view(NULL, 2);
    run_check(PCOW_CHECK_REPAIR);
    expect_view("s1", 0);
    expect_view(NULL, 2);
    pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
    expect_view(NULL, 2);
    expect_usable();
    MUST_FAIL(-ENOENT, pcow_open(IMAGE, 0, "s2", &image, &error));
    /* Delete of a leaf: hidden, but not yet freed. */
    make_image();
    poke_word(record_offset(3, PARENT), LAYER_S1);
    poke_word(record_offset(3, VIRTUAL_SIZE), SIZE);
    poke_word(record_offset(3, PARENT_LIMIT), SIZE);
    {
        struct layer_record record;

        peek(record_offset(1, 0), &record, sizeof record);
        strcpy(record.name, "leaf");
        record.crc = layer_record_crc(&record);
        poke(record_offset(3, 40), (char *)&record + 40, LAYER_RECORD_SIZE - 40);
    }
    poke_word(record_offset(3, STATE), word_value(layer_state_word(4, LAYER_HIDDEN, 0, 0)));
    poke_word(WORD(next_layer_id), 5);
    poke_word(WORD(layer_slots), 4);
    found = run_check(0);
    assert_int_equal(found->result.corruptions, 0);
    assert_int_equal(found->result.leaks, 1);
    run_check(PCOW_CHECK_REPAIR);
    expect_content();
    expect_usable();
}

static unsigned count_hidden(uint32_t slots)
{
    unsigned count = 0;

    for (uint32_t slot = 0; slot < slots; slot++) {
        uint64_t word;

        peek(record_offset(slot, STATE), &word, sizeof word);
        count += (word_value(word) >> 28 & 0xf) == LAYER_HIDDEN;
    }
    return count;
}

static void make_hidden(uint32_t count)
{
    enum { FIRST_ID = 4, FIRST_SLOT = 3 };

    make_image();
    for (uint32_t i = 0; i < count; i++) {
        struct layer_record record;

        peek(record_offset(1, 0), &record, sizeof record);
        record.parent = word_encode(i == 0 ? LAYER_S1 : FIRST_ID + i - 1);
        record.virtual_size = record.parent_limit = word_encode(SIZE);
        record.state_size = word_encode(PCOW_SLAB_SIZE);
        record.state = layer_state_word(FIRST_ID + i, LAYER_HIDDEN, 0, 0);
        record.crc = layer_record_crc(&record);
        poke(record_offset(FIRST_SLOT + i, 0), &record, sizeof record);
    }
    poke_word(WORD(next_layer_id), FIRST_ID + count);
    poke_word(WORD(layer_slots), FIRST_SLOT + count);
    assert_int_equal(run_check(0)->result.corruptions, 0);
}

/*
 * Each layer costs passes over the file, which can be large without a block: nobody waits for all
 * of them at once.
 */
/* ---- layers that only a damaged word makes dead ----------------------------------------------- */

static uint32_t active_layer(void)
{
    uint64_t word;

    peek(WORD(active_layer), &word, sizeof word);
    return (uint32_t)word_value(word);
}

/* Where the record of a layer is. */
static uint32_t find_slot(uint32_t id)
{
    for (uint32_t slot = 0; slot < 16; slot++) {
        uint64_t word;

        peek(record_offset(slot, STATE), &word, sizeof word);
        if (word && (word_value(word) & MAX_LAYER_ID) == id && word_value(word) >> 28 & 0xf)
            return slot;
    }
    fail_msg("layer %u has no record", id);
    return 0;
}

/* Do the bytes lie anywhere in the file that keeps what was dropped? */
static bool is_kept(const uint8_t *bytes, size_t length)
{
    static uint8_t file[16 * MIB];
    int fd = open(scratch("image.pcow.rescue"), O_RDONLY);
    ssize_t size;

    assert_true(fd >= 0);
    size = read(fd, file, sizeof file);
    close(fd);
    assert_true(size > 0 && (size_t)size < sizeof file);
    return memmem(file, (size_t)size, bytes, length);
}

/* Of 8 pages of layer 2, which are nowhere else: told as damage, refused, and kept. */
static void expect_doubtful(const uint8_t *pages)
{
    struct findings *found = run_check(0);
    struct pcow_check_result refused;

    if (!strstr(found->text, "belongs to layer 2, of which a damaged word told whether it is"))
        fail_msg("not told: %s", found->text);
    assert_int_equal(found->result.lost_size, 8 * 4096);
    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &refused, &error));
    assert_true(refused.refused);
    found = run_check(PCOW_CHECK_REPAIR);
    assert_int_equal(found->result.lost_size, 8 * 4096);
    assert_true(is_kept(pages, 8 * 4096));
    expect_clean();
}

/* A snapshot in the making is alive only by what the active layer stands on. */
static void test_doubtful_snapshot_in_the_making(void **state)
{
    (void)state;
    make_image();
    poke_word(record_offset(1, STATE),
              word_value(layer_state_word(LAYER_S2, LAYER_OPEN, 0, 0)));
    assert_int_equal(run_check(0)->result.corruptions, 0);
    flip(record_offset(2, PARENT), 0x10);
    expect_doubtful(content[1] + 600 * 4096);
    expect_view("s1", 0);
}

/* One that is being deleted, by who stands on it: nothing tells which of two leaves that is. */
static void test_doubtful_hidden(void **state)
{
    uint64_t seed = 5;
    pcow_image *image;

    (void)state;
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_revert(image, "s1", &error));
    write_pages(image, content[2], 100, 2, &seed);
    MUST(pcow_snapshot_create(image, "s3", &error));
    MUST(pcow_snapshot_revert(image, "s2", &error));
    pcow_close(image);
    poke_word(record_offset(find_slot(LAYER_S2), STATE),
              word_value(layer_state_word(LAYER_S2, LAYER_HIDDEN, 0, 0)));
    assert_int_equal(run_check(0)->result.corruptions, 0);
    flip(record_offset(find_slot(active_layer()), PARENT), 0x10);
    expect_doubtful(content[1] + 600 * 4096);
    expect_view("s1", 0);
}

static void test_very_many_hidden(void **state)
{
    enum { HIDDEN = 200, SLOTS = 3 + HIDDEN };

    (void)state;
    make_hidden(HIDDEN);
    for (unsigned before = HIDDEN, after; before > 0; before = after) {
        expect_content();
        pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
        after = count_hidden(SLOTS);
        assert_in_range(before - after, 1, 64);
    }
    assert_int_equal(run_check(0)->result.leaks, 0);
    expect_content();
    expect_usable();
}

/* Nor for as many passes over a file of 32 TiB. */
static void test_hidden_in_a_large_file(void **state)
{
    enum { HIDDEN = 20, SLOTS = 3 + HIDDEN };

    (void)state;
    make_hidden(HIDDEN);
    assert_int_equal(truncate(IMAGE, INT64_C(32) << 40), 0);
    pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
    assert_in_range(HIDDEN - count_hidden(SLOTS), 1, 4);
    expect_content();
}

static void test_counters(void **state)
{
    static const struct {
        size_t field;
        uint64_t value;
    } damage[] = {
        {WORD(next_layer_id), 2},
        {WORD(next_layer_id), 3},
        {WORD(next_layer_id), 0},
        {WORD(next_layer_id), UINT64_C(1) << 30},
        {WORD(next_layer_id), (UINT64_C(1) << 32) + 5},
        {WORD(layer_slots), 0},
        {WORD(layer_slots), 2},
        {WORD(layer_slots), 70000},
        {WORD(layer_slots), 4000},
        {WORD(generation), 0},
        {WORD(base_slot), 3},
    };

    (void)state;
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++) {
        make_image();
        poke_word(damage[i].field, damage[i].value);
        expect_repair("");
        expect_content();
        expect_usable();
        /* Without the copy as well. */
        make_image();
        poke_word(damage[i].field, damage[i].value);
        flip(HEADER_COPY_OFFSET + damage[i].field, 0x10);
        flip(HEADER_COPY_OFFSET + 41, 1);
        expect_repair("");
        expect_content();
        expect_usable();
    }
}

static void test_wrong_active_layer(void **state)
{
    (void)state;
    /* A snapshot must not be written to: the open layer is found, or one is made. */
    make_image();
    poke_word(WORD(active_layer), LAYER_S1);
    expect_repair("active");
    expect_content();
    expect_usable();
    make_image();
    poke_word(WORD(active_layer), 0);
    flip(HEADER_COPY_OFFSET + WORD(active_layer), 1);
    expect_repair("active");
    expect_content();
    make_image();
    poke_word(WORD(active_layer), LAYER_S2);
    poke_word(record_offset(2, STATE), word_value(layer_state_word(3, LAYER_FREE, 0, 0)));
    expect_repair("newest snapshot");
    expect_view("s1", 0);
    expect_view("s2", 1);
    expect_view(NULL, 1);
    expect_usable();
}

static void test_unknown_active_layer(void **state)
{
    (void)state;
    /* An id that nobody has: the open layer is meant. */
    make_image();
    poke_word(WORD(active_layer), 100);
    expect_repair("has no record");
    expect_content();
    expect_usable();
    /* Both damaged: the slabs of the active layer tell that it exists. */
    make_image();
    flip(record_offset(2, STATE), 1);
    flip(record_offset(0, STATE), 1);
    expect_repair("the active layer 3 has no record");
    expect_content_by_id();
    expect_usable();
}

/* A snapshot that says it stands on the active layer would change with it. */
static void test_snapshot_on_the_active_layer(void **state)
{
    struct layer_record record;

    (void)state;
    make_image();
    peek(record_offset(1, 0), &record, sizeof record);
    strcpy(record.name, "odd");
    record.crc = layer_record_crc(&record);
    record.state = layer_state_word(4, LAYER_SNAPSHOT, 0, 0);
    record.parent = word_encode(LAYER_ACTIVE);
    poke(record_offset(3, 0), &record, sizeof record);
    poke_word(WORD(next_layer_id), 5);
    poke_word(WORD(layer_slots), 4);
    expect_repair("lost its parent");
    expect_content();
    expect_usable();
}

static void test_records_that_do_not_count(void **state)
{
    struct layer_record record = {.state = layer_state_word(4, LAYER_OPEN, 0, 0), .parent = 7};

    (void)state;
    /* Free, but open() reads its words. */
    make_image();
    poke_word(WORD(layer_slots), 5);
    poke_word(WORD(next_layer_id), 5);
    poke_word(record_offset(3, STATE), word_value(layer_state_word(4, LAYER_FREE, 0, 0)));
    flip(record_offset(3, PARENT), 7);
    expect_repair("is free");
    expect_content();
    /* What an interrupted operation left. */
    poke(record_offset(3, 0), &record, sizeof record);
    expect_repair("interrupted operation");
    expect_content();
    /* Nothing tells whose they are, and nothing is missing. */
    flip(record_offset(3, STATE), 1);
    flip(record_offset(4, STATE), 1);
    expect_repair("nothing tells whose it is");
    expect_content();
    expect_usable();
}

static void test_layer_tables(void **state)
{
    struct owner table = {.kind = OWNER_TABLE, .number = 1};
    uint64_t word = owner_encode(table);

    (void)state;
    make_image();
    poke(owner_offset(20), &word, sizeof word);
    expect_clean();
    poke(owner_offset(21), &word, sizeof word);
    expect_repair("layer table 1");
    assert_int_equal(find_slab(OWNER_TABLE, 0, 1), 20);
    expect_content();
    expect_usable();
    /* A later table needs those before it. */
    make_image();
    table.number = 3;
    word = owner_encode(table);
    poke(owner_offset(20), &word, sizeof word);
    expect_repair("layer table 2 is missing");
    assert_true(find_slab(OWNER_TABLE, 0, 1) && find_slab(OWNER_TABLE, 0, 2));
    expect_content();
    expect_usable();
}

/*
 * An interrupted repair is done again: killed at any moment, the next one ends at the same content.
 */
static void test_repair_is_killed(void **state)
{
    uint64_t seed = random_seed();

    (void)state;
    for (unsigned round = 0; round < 60; round++) {
        pid_t child;

        make_image();
        flip(WORD(layer_slots), 1);
        flip(100, 1);
        flip(record_offset(0, CRC), 1);
        flip(record_offset(1, STATE), 1);
        flip(record_offset(2, PARENT), 1);
        flip(record_offset(2, VIRTUAL_SIZE), 1);
        child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct pcow_check_result result;

            pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, NULL);
            _exit(0);
        }
        usleep((useconds_t)(random_next(&seed) % 3000));
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
        run_check(PCOW_CHECK_REPAIR);
        expect_clean();
        expect_content_by_id();
    }
}

/* Whatever is damaged: check ends, and what it says it has repaired it has repaired. */
static void test_random_damage(void **state)
{
    uint64_t seed = random_seed();
    unsigned usable = 0;

    (void)state;
    for (unsigned round = 0; round < test_steps(300); round++) {
        static const struct { uint64_t offset, length;
        } area[] = {
            {0, 1200},
            {HEADER_COPY_OFFSET, 600},
            {SLAB_TABLE_OFFSET, 200},
            {LAYER_TABLE_OFFSET, 3 * LAYER_RECORD_SIZE},
            {BITMAP_OFFSET, 600},
        };
        struct pcow_error error = {0};
        struct findings *found;
        pcow_image *image;
        int ret;

        make_image();
        for (uint64_t hits = 1 + random_next(&seed) % 4; hits > 0; hits--) {
            unsigned where = (unsigned)(random_next(&seed) % 5);
            uint64_t offset = area[where].offset + random_next(&seed) % area[where].length;

            if (random_next(&seed) % 2) {
                flip(offset, (uint8_t)(1 + random_next(&seed) % 255));
            } else {
                uint64_t value = random_next(&seed) >> random_next(&seed) % 64;

                /* With a right checksum, it gets further. */
                poke_word(offset & ~UINT64_C(7), value);
            }
        }
        {
            struct pcow_check_result result;

            /* Header and copy hit at once: no more than a clear answer is possible. */
            ret = pcow_check(IMAGE, 0, NULL, NULL, &result, &error);
            if (ret) {
                assert_true(ret == -EMEDIUMTYPE || ret == -ENOTSUP);
                continue;
            }
        }
        found = run_check(PCOW_CHECK_REPAIR);
        if (found->result.corruptions_fixed != found->result.corruptions)
            continue;
        usable++;
        found = run_check(0);
        if (found->result.corruptions || found->result.leaks)
            fail_msg("round %u: %s", round, found->text);
        ret = pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error);
        if (ret && ret != -EROFS && ret != -ENOENT && ret != -ESTALE)
            fail_msg("round %u: %s", round, error.message);
        pcow_close(image);
    }
    assert_true(usable > 100 || test_steps(300) < 300);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)
        TEST(test_every_word_of_every_record),
        TEST(test_damaged_names),
        TEST(test_one_name_twice),
        TEST(test_wiped_records),
        TEST(test_all_records_wiped),
        TEST(test_impossible_words),
        TEST(test_deleted_parent),
        TEST(test_two_records_of_one_layer),
        TEST(test_interrupted_operations),
        TEST(test_doubtful_snapshot_in_the_making),
        TEST(test_doubtful_hidden),
        TEST(test_very_many_hidden),
        TEST(test_hidden_in_a_large_file),
        TEST(test_counters),
        TEST(test_wrong_active_layer),
        TEST(test_unknown_active_layer),
        TEST(test_snapshot_on_the_active_layer),
        TEST(test_records_that_do_not_count),
        TEST(test_layer_tables),
        TEST(test_repair_is_killed),
        TEST(test_random_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
