/* SPDX-License-Identifier: BSD-3-Clause */
/* The file that keeps what a repair drops. */
#include "checking.h"
#include "rich.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "check/check.h"

#define IMAGE scratch("image.pcow")
#define RESCUE scratch("image.pcow.rescue")

static struct rich *rich;
/* Of each layer the pages, and bytes of VM state, that were found in files of repairs. */
static struct kept {
    bool page[RICH_LAYERS + 1][RICH_PAGES];
    uint64_t unplaced, states, records;
    bool whole, repaired;
    bool told[RICH_LAYERS + 1][RICH_PAGES]; /* is said to be lost, kept or not */
} kept;

static uint8_t first_words[RICH_LAYERS + 1][RICH_PAGES][16];

static void poke(uint64_t offset, const void *from, size_t length)
{
    int fd = open(IMAGE, O_WRONLY);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, from, length, (off_t)offset), length);
    close(fd);
}

/* The owner words of all file slabs from this one on. */
static void lose_owners(uint64_t first)
{
    const uint64_t junk = UINT64_C(0x1234567812345678);

    rich_put_back(rich);
    for (uint64_t slab = first; slab < rich->slabs; slab++)
        if (rich->owner[slab].kind)
            poke(owner_offset(slab), &junk, sizeof junk);
}

static int repair(unsigned flags, struct pcow_check_result *result, struct pcow_error *error)
{
    return pcow_check(IMAGE, PCOW_CHECK_REPAIR | flags, NULL, NULL, result, error);
}

/* ---- reading it ------------------------------------------------------------------------------ */

static uint64_t number(const char *line, const char *key)
{
    const char *at = strstr(line, key);

    return at ? strtoull(at + strlen(key), NULL, 10) : UINT64_MAX;
}

/* Which page of which layer it is: nothing tells but the content. */
static void find_page(const uint8_t *bytes)
{
    for (uint32_t id = 1; id <= RICH_LAYERS; id++)
        for (uint64_t page = 0; page < RICH_PAGES; page++) {
            uint8_t expected[PCOW_PAGE_SIZE];

            if (kept.page[id][page] || !rich->layer[id].page[page]
                || memcmp(bytes, first_words[id][page], sizeof first_words[id][page]))
                continue;
            rich_page(id, page, expected);
            assert_memory_equal(bytes, expected, sizeof expected);
            kept.page[id][page] = true;
            return;
        }
}

static void take_content(const char *lost, uint64_t at, const uint8_t *bytes, uint64_t length)
{
    uint64_t layer = number(lost, "\"layer\": "), offset = number(lost, "\"guest-offset\": ");

    if (strstr(lost, "\"state\"")) {
        uint8_t *expected = malloc(rich->layer[layer].state_size);

        rich_state((uint32_t)layer, rich->layer[layer].state_size, expected);
        assert_memory_equal(bytes, expected + offset + at, length);
        kept.states += length;
        free(expected);
        return;
    }
    if (strstr(lost, "\"snapshot\"") && !strstr(lost, "\"data\"")) {
        kept.records++;
        return;
    }
    for (uint64_t in = 0; in < length; in += PCOW_PAGE_SIZE) {
        uint64_t page = (offset + at + in) / PCOW_PAGE_SIZE;
        uint8_t expected[PCOW_PAGE_SIZE];

        if (offset == UINT64_MAX) {
            find_page(bytes + in);
            kept.unplaced += strstr(lost, "\"data\"") ? PCOW_PAGE_SIZE : 0;
            continue;
        }
        rich_page((uint32_t)layer, page, expected);
        assert_memory_equal(bytes + in, expected, sizeof expected);
        kept.page[layer][page] = true;
    }
}

static void note_told(bool told[RICH_LAYERS + 1][RICH_PAGES], uint64_t layer, uint64_t offset,
                      uint64_t length)
{
    assert_in_range(layer, 1, RICH_LAYERS);
    for (uint64_t at = offset; at < offset + length; at += PCOW_PAGE_SIZE)
        told[layer][at / PCOW_PAGE_SIZE] = true;
}

static void take_lost(const char *line)
{
    if (strstr(line, "\"data\"") && strstr(line, "\"guest-offset\""))
        note_told(kept.told, number(line, "\"layer\": "), number(line, "\"guest-offset\": "),
                  number(line, "\"length\": "));
}

static void read_rescue(const char *path)
{
    static uint8_t bytes[PCOW_SLAB_SIZE];
    char line[2048], lost[2048] = "";
    FILE *file = fopen(path, "r");

    assert_non_null(file);
    assert_non_null(fgets(line, sizeof line, file));
    assert_non_null(strstr(line, "{\"pcow-rescue\": 1, \"uuid\": \""));
    kept.whole = kept.repaired = false;
    while (fgets(line, sizeof line, file)) {
        assert_int_equal(line[strlen(line) - 1], '\n');
        kept.whole |= !!strstr(line, "{\"end\": ");
        kept.repaired |= !!strstr(line, "{\"repaired\": true}");
        if (strstr(line, "{\"lost\": ")) {
            memcpy(lost, line, sizeof lost);
            take_lost(line);
        }
        if (strstr(line, "\"bytes\": ")) {
            uint64_t length = number(line, "\"bytes\": ");

            assert_in_range(length, 1, sizeof bytes);
            assert_int_equal(fread(bytes, 1, length, file), length);
            assert_int_equal(fgetc(file), '\n');
            take_content(lost, number(line, "\"at\": "), bytes, length);
        }
    }
    fclose(file);
}

static uint64_t kept_pages(void)
{
    uint64_t bytes = 0;

    for (uint32_t id = 1; id <= RICH_LAYERS; id++)
        for (uint64_t page = 0; page < RICH_PAGES; page++)
            bytes += kept.page[id][page] * PCOW_PAGE_SIZE;
    return bytes;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_content(void **state)
{
    struct pcow_check_result result;
    struct stat image, file;

    (void)state;
    memset(&kept, 0, sizeof kept);
    lose_owners(1);
    assert_int_equal(chmod(IMAGE, 0640), 0);
    MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
    assert_string_equal(result.rescue_suffix, ".rescue");
    read_rescue(RESCUE);
    assert_true(kept.whole && kept.repaired);
    assert_int_equal(kept_pages(), rich_data(rich));
    /* Whose they were nothing tells; nor of what was free already. */
    assert_in_range(kept.unplaced, rich_data(rich), result.lost_size);
    assert_int_equal(stat(IMAGE, &image), 0);
    assert_int_equal(stat(RESCUE, &file), 0);
    assert_int_equal(file.st_mode, image.st_mode);
    assert_int_equal(file.st_uid, image.st_uid);
    assert_int_equal(file.st_gid, image.st_gid);
}

/* Cut inside: what is left of it is kept, with its place. */
static void test_cut_state(void **state)
{
    struct pcow_check_result result;
    uint64_t slab = 1;

    (void)state;
    memset(&kept, 0, sizeof kept);
    while (rich->owner[slab].kind != OWNER_STATE || rich->owner[slab].number != 1)
        slab++;
    rich_put_back(rich);
    assert_int_equal(truncate(IMAGE, (off_t)((slab << SLAB_BITS) + 64 * KIB)), 0);
    MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
    assert_int_equal(result.lost_size, rich_behind(rich, (slab << SLAB_BITS) + 64 * KIB));
    read_rescue(RESCUE);
    assert_int_equal(kept.states, PCOW_SLAB_SIZE + 64 * KIB);
}

static void test_records(void **state)
{
    struct pcow_check_result result;
    uint8_t junk[PCOW_PAGE_SIZE];

    (void)state;
    memset(&kept, 0, sizeof kept);
    rich_put_back(rich);
    memset(junk, 0xff, sizeof junk);
    poke(LAYER_TABLE_OFFSET, junk, sizeof junk);
    MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
    read_rescue(RESCUE);
    assert_int_equal(result.lost_size, 0);
    assert_in_range(kept.records, RICH_LAYERS - 1, 16);
}

/* A name that is taken is not written over, nor what a link points to. */
static void test_name_is_taken(void **state)
{
    struct pcow_check_result result;
    struct stat before, after;

    (void)state;
    lose_owners(3);
    MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
    assert_int_equal(stat(RESCUE, &before), 0);
    assert_int_equal(rename(RESCUE, scratch("kept")), 0);
    lose_owners(3);
    assert_int_equal(rename(scratch("kept"), RESCUE), 0);
    MUST_FAIL(-EEXIST, repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
    assert_int_equal(stat(RESCUE, &after), 0);
    assert_int_equal(before.st_size, after.st_size);
    assert_int_equal(unlink(RESCUE), 0);
    assert_int_equal(symlink("nowhere", RESCUE), 0);
    MUST_FAIL(-EEXIST, repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
    assert_int_equal(access(scratch("nowhere"), F_OK), -1);
    MUST(pcow_check(IMAGE, 0, NULL, NULL, &result, &error));
    assert_true(result.lost_size > 0);
    assert_int_equal(unlink(RESCUE), 0);
    MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
}

/* ---- interrupted ----------------------------------------------------------------------------- */

/* Whenever it is killed: a second one goes on, and the files of both hold everything. */
static void test_interrupted(void **state)
{
    unsigned step = 0, in_two = 0;
    bool killed;

    (void)state;
    do {
        struct pcow_check_result result;

        memset(&kept, 0, sizeof kept);
        lose_owners(1);
        killed = repair_until(step++);
        MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
        must_be_clean(IMAGE);
        if (access(RESCUE, F_OK) == 0)
            read_rescue(RESCUE);
        if (strcmp(result.rescue_suffix, ".rescue-2") == 0) {
            assert_true(kept.whole && !kept.repaired);
            read_rescue(scratch("image.pcow.rescue-2"));
            assert_true(kept.whole && kept.repaired);
            in_two++;
        }
        assert_int_equal(kept_pages(), rich_data(rich));
    } while (killed);
    print_message("killed at %u steps, in %u of them something was left to be lost\n", step - 1,
                  in_two);
    assert_true(step > 20 && in_two > 5);
}

/* ---- interrupted, of a file that was cut inside a slab ----------------------------------------- */

static bool told_now[RICH_LAYERS + 1][RICH_PAGES];

static void add_loss(void *opaque, const struct pcow_loss *loss)
{
    (void)opaque;
    if (loss->kind == PCOW_LOSS_DATA && loss->layer && loss->guest_offset != PCOW_NOWHERE)
        note_told(told_now, loss->layer, loss->guest_offset, loss->length);
}

/* Does the file say that this page of the slab is data? */
static bool is_named(uint64_t slab, unsigned page)
{
    struct page_set valid;
    uint64_t word;
    int fd = open(IMAGE, O_RDONLY);

    assert_int_equal(pread(fd, &word, sizeof word, (off_t)owner_offset(slab)), sizeof word);
    assert_int_equal(pread(fd, &valid, sizeof valid, (off_t)bitmap_offset(slab)), sizeof valid);
    close(fd);
    return word && page_set_has(&valid, page);
}

/* What lay behind the cut is told: by check, as long as the file names it, or by the rescue file. */
static void expect_told(uint64_t length, unsigned step)
{
    for (uint64_t slab = length >> SLAB_BITS; slab < rich->slabs; slab++) {
        const struct owner *owner = &rich->owner[slab];

        for (unsigned page = 0; page < PAGES_PER_SLAB && owner->kind == OWNER_DATA; page++) {
            uint64_t number = (uint64_t)owner->number * PAGES_PER_SLAB + page;
            bool now = told_now[owner->layer][number];

            if (!rich->layer[owner->layer].page[number] || rich->layer[owner->layer].dead
                || (slab << SLAB_BITS) + (page + 1) * PCOW_PAGE_SIZE <= length)
                continue;
            if (!now && is_named(slab, page))
                fail_msg("killed at step %u: page %llu of layer %u reads as zeros, untold", step,
                         (unsigned long long)number, owner->layer);
            if (!now && !(kept.whole && kept.told[owner->layer][number]))
                fail_msg("killed at step %u: page %llu of layer %u is told by nothing", step,
                         (unsigned long long)number, owner->layer);
        }
    }
}

/* Gives at how many steps it was killed. */
static unsigned interrupt_after_cut(uint64_t length)
{
    unsigned step = 0;
    bool killed;

    do {
        struct pcow_check_result result;

        memset(&kept, 0, sizeof kept);
        memset(told_now, 0, sizeof told_now);
        rich_put_back(rich);
        assert_int_equal(truncate(IMAGE, (off_t)length), 0);
        killed = repair_until(step++);
        MUST(pcow_check_losses(IMAGE, 0, NULL, add_loss, NULL, &result, &error));
        if (access(RESCUE, F_OK) == 0)
            read_rescue(RESCUE);
        expect_told(length, step - 1);
        MUST(repair(PCOW_CHECK_ACCEPT_LOSS, &result, &error));
        must_be_clean(IMAGE);
    } while (killed);
    return step - 1;
}

static void test_interrupted_after_a_cut(void **state)
{
    unsigned cuts = 0, steps = 0;

    (void)state;
    for (uint64_t slab = 1; slab < rich->slabs; slab++) {
        unsigned first = 0, last = PAGES_PER_SLAB - 1;

        if (rich->owner[slab].kind != OWNER_DATA || page_set_empty(&rich->valid[slab]))
            continue;
        while (!page_set_has(&rich->valid[slab], first))
            first++;
        while (!page_set_has(&rich->valid[slab], last))
            last--;
        if (first == last || rich->layer[rich->owner[slab].layer].dead)
            continue;
        steps += interrupt_after_cut((slab << SLAB_BITS) + last * PCOW_PAGE_SIZE);
        cuts++;
    }
    print_message("%u cuts, killed at %u steps\n", cuts, steps);
    assert_true(cuts > 3 && steps > 10 * cuts);
}

/* ---- no room --------------------------------------------------------------------------------- */

/* An image in the pool, of which a repair would drop 2 MiB. */
static void make_in_pool(const char *path)
{
    const uint64_t junk = UINT64_C(0x1234567812345678);
    uint8_t page[PCOW_PAGE_SIZE];
    pcow_image *image = must_create_without_mirror(path, RICH_SIZE);
    int fd;

    memset(page, 9, sizeof page);
    for (uint64_t i = 0; i < 512; i++)
        MUST(pcow_write(image, i * PCOW_PAGE_SIZE, page, sizeof page, &error));
    pcow_close(image);
    fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, &junk, sizeof junk, (off_t)owner_offset(1)), sizeof junk);
    close(fd);
}

static int repair_path(const char *path, struct pcow_check_result *result, struct pcow_error *error)
{
    return pcow_check(path, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, NULL, NULL, result, error);
}

/* The size at which this much of the pool would be free. */
static void leave_free(uint64_t free)
{
    struct statvfs pool;
    char size[32];

    assert_int_equal(statvfs(pool_directory(), &pool), 0);
    snprintf(size, sizeof size, "%llu",
             (unsigned long long)((pool.f_blocks - pool.f_bavail) * pool.f_frsize + free));
    pool_resize(size);
}

static void test_no_room(void **state)
{
    struct pcow_check_result result;
    char path[512], rescue[600];
    struct stat before, after;

    (void)state;
    snprintf(path, sizeof path, "%s/image.pcow", pool_directory());
    snprintf(rescue, sizeof rescue, "%s.rescue", path);
    make_in_pool(path);
    assert_int_equal(stat(path, &before), 0);
    /* With 64 KiB more than it takes guests would find the pool full. */
    for (uint64_t room = 0; room <= PCOW_SLAB_SIZE + 64 * KIB; room += PCOW_SLAB_SIZE / 2) {
        leave_free(room + 64 * KIB);
        MUST_FAIL(-ENOSPC, repair_path(path, &result, &error));
        assert_int_equal(stat(path, &after), 0);
        assert_int_equal(before.st_blocks, after.st_blocks);
        assert_int_equal(access(rescue, F_OK), -1);
    }
    pool_resize("16m");
    MUST(repair_path(path, &result, &error));
    assert_int_equal(result.lost_size, PCOW_SLAB_SIZE);
    assert_int_equal(access(rescue, F_OK), 0);
}

/* It lies beside the name that was given, also if that is a link: there must be room. */
static void test_room_beside_a_link(void **state)
{
    char path[512], link[512], rescue[600];
    struct pcow_check_result result;
    struct pcow_error why;

    (void)state;
    snprintf(path, sizeof path, "%s/image.pcow", pool_directory());
    make_in_pool(path);
    leave_free(64 * KIB);
    assert_int_equal(symlink(path, scratch("link.pcow")), 0);
    MUST(repair_path(scratch("link.pcow"), &result, &error));
    assert_int_equal(access(scratch("link.pcow.rescue"), F_OK), 0);
    /* and the other way round */
    make_in_pool(IMAGE);
    snprintf(link, sizeof link, "%s/link.pcow", pool_directory());
    snprintf(rescue, sizeof rescue, "%s.rescue", link);
    assert_int_equal(symlink(IMAGE, link), 0);
    assert_int_equal(repair_path(link, &result, &why), -ENOSPC);
    assert_non_null(strstr(why.message, "what a repair would drop"));
    assert_int_equal(access(rescue, F_OK), -1);
}

static int setup_pool(void **state)
{
    return pool_mount(state, "16m");
}

static int setup(void **state)
{
    int ret = scratch_setup(state);

    rich = rich_make(false);
    for (uint32_t id = 1; id <= RICH_LAYERS; id++)
        for (uint64_t page = 0; page < RICH_PAGES; page++) {
            uint8_t bytes[PCOW_PAGE_SIZE];

            rich_page(id, page, bytes);
            memcpy(first_words[id][page], bytes, sizeof first_words[id][page]);
        }
    return ret;
}

static int teardown(void **state)
{
    rich_free(rich);
    return scratch_teardown(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_content, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_records, setup, teardown),
        cmocka_unit_test_setup_teardown(test_name_is_taken, setup, teardown),
        cmocka_unit_test_setup_teardown(test_interrupted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_interrupted_after_a_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_room, setup_pool, pool_unmount),
        cmocka_unit_test_setup_teardown(test_room_beside_a_link, setup_pool, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
