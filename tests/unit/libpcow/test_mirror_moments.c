/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mirror follows a writer at any moment: whatever the library does just then to the file, a
 * word that is valid is that of page and copy, before and after. In class pmem page and copy are on
 * the medium before it.
 */
#include "checking.h"
#include "support.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/format2.h"
#include "image/known.h"
#include "image/mirror_follow.h"
#include "operations/operations.h"

#define SLABS 200u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define ROUNDS 9u
#define WRITES 40u
#define LARGE 300000u
#define EACH 4u                        /* one event of so many */
#define IMAGE scratch("image.pcow")

static pcow_image *image;              /* that is followed; NULL: none is */
static struct mirror_round mirror_round;
static bool inside;
static uint64_t seed;
static unsigned long taken;
static int fd;

static bool is_followed(unsigned page)
{
    uint64_t offset = (uint64_t)page * PCOW_PAGE_SIZE;

    return offset >= BITMAP_OFFSET || (offset >= SLAB_TABLE_OFFSET && offset < LAYER_TABLE_OFFSET);
}

static void judge(void)
{
    static uint8_t content[PCOW_PAGE_SIZE], copy[PCOW_PAGE_SIZE];
    uint64_t words[METADATA_PAGES];

    /* Not there yet. */
    if (pread(fd, words, sizeof words, (off_t)mirror_offset(0, CHECKSUMS_PAGE)) != sizeof words)
        return;
    for (unsigned page = 0; page < METADATA_PAGES; page++) {
        if (!checksum_is(words[page], CHECKSUM_VALID) || !is_followed(page))
            continue;
        assert_false(mirror_is_marked(&image->file, page));
        assert_int_equal(pread(fd, content, sizeof content, (off_t)page * PCOW_PAGE_SIZE),
                         sizeof content);
        assert_int_equal(pread(fd, copy, sizeof copy, (off_t)mirror_offset(0, page)), sizeof copy);
        assert_memory_equal(content, copy, sizeof content);
        assert_int_equal(words[page],
                         checksum_encode(CHECKSUM_VALID,
                                         mirror_checksum(&image->file, 0, page, content)));
    }
}

static uint64_t below(uint64_t limit)
{
    return random_next(&seed) % limit;
}

static void follow(void)
{
    unsigned before = mirror_round.count;

    judge();
    if (below(EACH) == 0)
        while (mirror_take_pages(&image->file, &(struct mirror_known){known_page, image},
                                 &mirror_round))
            ;
    taken += mirror_round.count - before;
    if (below(EACH) == 0)
        assert_int_equal(mirror_end_round(&image->file, &mirror_round), 0);
    judge();
}

static int look(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    if (inside || !image || observation->what == OBSERVED_OPEN
        || observation->what == OBSERVED_CLOSE)
        return 0;
    inside = true;
    follow();
    inside = false;
    return 0;
}

static void write_some(const unsigned char *data)
{
    for (unsigned i = 0; i < WRITES; i++) {
        uint64_t page = below(SLABS) * PAGES_PER_SLAB + below(400);

        MUST(pcow_write(image, page * PCOW_PAGE_SIZE, data,
                        below(3) ? PCOW_PAGE_SIZE : LARGE, &error));
        inside = true;
        follow();
        inside = false;
    }
}

static void follow_all_the_time(enum pcow_persistence persistence)
{
    struct observer observer = {.persistence = persistence, .look = look};
    unsigned char *data = calloc(1, LARGE);
    pcow_image *opened;

    assert_non_null(data);
    seed = 1;
    taken = 0;
    mirror_round = (struct mirror_round){0};
    pcow_close(must_create(IMAGE, SIZE, 0, NULL));
    fd = open(IMAGE, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    MUST(image_open(IMAGE, PCOW_OPEN_WRITE, NULL, &observer, &opened, &error));
    image = opened;
    for (unsigned round = 0; round < ROUNDS; round++) {
        char name[16];

        snprintf(name, sizeof name, "s%u", round);
        write_some(data);
        MUST(pcow_snapshot_create(image, name, &error));
        write_some(data);
        if (round % 3 == 0)
            MUST(pcow_snapshot_revert(image, name, &error));
        else if (round % 3 == 1)
            MUST(pcow_snapshot_delete(image, name, NULL, &error));
    }
    image = NULL;
    MUST(pcow_finish(opened, &error));
    assert_int_equal(opened->file.overwritten.checksums, 0);
    pcow_close(opened);
    close(fd);
    free(data);
    must_be_clean(IMAGE);
    assert_true(taken > 100);
}

static void test_pmem(void **state)
{
    (void)state;
    follow_all_the_time(PCOW_PERSISTENCE_PMEM);
}

static void test_volatile(void **state)
{
    (void)state;
    follow_all_the_time(PCOW_PERSISTENCE_VOLATILE);
}

/* ---- what a killed writer has not flushed ---------------------------------------------------- */

#define PAGE_OF_BITMAPS (BITMAP_OFFSET / PCOW_PAGE_SIZE)

static bool kills;                     /* as soon as the word of a bitmap is to be flushed */
static unsigned flushed, flushed_before_valid;

static bool place_of(const struct observation *observation, uint64_t *offset)
{
    struct file *file =
        (struct file *)((char *)(uintptr_t)observation->persist - offsetof(struct file, persist));

    return observation->address && file_find_window_at(file, observation->address, offset);
}

static int look_for_flush(struct observer *observer, const struct observation *observation)
{
    uint64_t offset, word = mirror_offset(0, CHECKSUMS_PAGE) + PAGE_OF_BITMAPS * sizeof(uint64_t);

    (void)observer;
    if (!observation->persist || !place_of(observation, &offset))
        return 0;
    if (observation->what == OBSERVED_FLUSH && offset <= BITMAP_OFFSET + PCOW_PAGE_SIZE - 1
        && offset + observation->length > BITMAP_OFFSET) {
        if (kills)
            _exit(0);
        flushed += observation->length >= PCOW_PAGE_SIZE;
    }
    if (observation->what == OBSERVED_STORE && offset == word
        && checksum_is(*(const uint64_t *)observation->from, CHECKSUM_VALID))
        flushed_before_valid = flushed;
    return 0;
}

static void test_flushed_before(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PMEM, .look = look_for_flush};
    pcow_image *opened = must_create(IMAGE, SIZE, 0, NULL);
    int status;
    pid_t child;

    (void)state;
    mirror_round = (struct mirror_round){0};
    MUST(pcow_write(opened, 0, "", 1, &error));
    pcow_close(opened);
    child = fork();
    if (child == 0) {
        if (image_open(IMAGE, PCOW_OPEN_WRITE, NULL, &observer, &opened, NULL))
            _exit(1);
        kills = true;
        pcow_write(opened, 20 * PCOW_PAGE_SIZE, "", 1, NULL);
        _exit(2);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    MUST(image_open(IMAGE, PCOW_OPEN_WRITE, NULL, &observer, &opened, &error));
    while (
        mirror_take_pages(&opened->file, &(struct mirror_known){known_page, opened}, &mirror_round))
        ;
    assert_true(mirror_round.count > 0);
    flushed = flushed_before_valid = 0;
    assert_int_equal(mirror_end_round(&opened->file, &mirror_round), 0);
    assert_int_equal(flushed_before_valid, 1);
    pcow_close(opened);
    must_be_clean(IMAGE);
}

#define SCRATCH_TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        SCRATCH_TEST(test_pmem),
        SCRATCH_TEST(test_volatile),
        SCRATCH_TEST(test_flushed_before),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
