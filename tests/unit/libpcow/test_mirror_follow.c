/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mirror follows a writer that runs: what was stored a minute ago is judged, though nobody has
 * closed the image; and beside who stores no page gets a checksum that it does not have.
 */
#include "checking.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "format/format2.h"
#include "image/mirror_follow.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"

#define SLABS 600u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define THREADS 2u
#define ROUNDS 30u
#define SOME_NS 5000000L
#define MOST_LOOKS 5000u
#define IMAGE scratch("image.pcow")

struct guest {
    pcow_image *image;
    pcow_map *map;
    uint8_t *memory;
};

static void pause_ns(long ns)
{
    nanosleep(&(struct timespec){0, ns}, NULL);
}

static struct guest begin(void)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};
    struct guest guest = {.image = must_create(IMAGE, SIZE, 0, NULL)};

    MUST(pcow_map_create(guest.image, &options, &guest.map, &error));
    guest.memory = pcow_map_address(guest.map);
    return guest;
}

/* As if a minute had passed, all the time from now on. */
static void follow_at_once(const struct guest *guest)
{
    __atomic_store_n(&guest->map->ahead.mirror.interval_ns, 0, __ATOMIC_RELAXED);
    ahead_wake(guest->map);
}

static void store(const struct guest *guest, uint64_t page, uint8_t value)
{
    __atomic_store_n(guest->memory + page * PCOW_PAGE_SIZE, value, __ATOMIC_RELAXED);
}

static bool is_followed(unsigned page)
{
    uint64_t offset = (uint64_t)page * PCOW_PAGE_SIZE;

    return offset >= BITMAP_OFFSET || (offset >= SLAB_TABLE_OFFSET && offset < LAYER_TABLE_OFFSET);
}

/* Of group 0. */
struct state {
    unsigned valid, stale;             /* pages, of those that it follows */
};

/*
 * No guest stores. The thread that works ahead may, to pages that it marks before: as for any
 * reader, the word tells.
 */
static struct state look_at_mirror(const struct guest *guest)
{
    static uint8_t content[PCOW_PAGE_SIZE], copy[PCOW_PAGE_SIZE];
    uint64_t words[METADATA_PAGES], word;
    struct state state = {0};
    int fd = open(IMAGE, O_RDONLY | O_CLOEXEC);

    assert_int_equal(pread(fd, words, sizeof words, (off_t)mirror_offset(0, CHECKSUMS_PAGE)),
                     sizeof words);
    for (unsigned page = 0; page < METADATA_PAGES; page++) {
        if (!is_followed(page))
            continue;
        state.stale += checksum_is(words[page], CHECKSUM_STALE);
        if (!checksum_is(words[page], CHECKSUM_VALID))
            continue;
        state.valid++;
        assert_int_equal(pread(fd, content, sizeof content, (off_t)page * PCOW_PAGE_SIZE),
                         sizeof content);
        assert_int_equal(pread(fd, copy, sizeof copy, (off_t)mirror_offset(0, page)), sizeof copy);
        assert_int_equal(pread(fd, &word, sizeof word,
                               (off_t)(mirror_offset(0, CHECKSUMS_PAGE) + page * sizeof word)),
                         sizeof word);
        if (word != words[page])
            continue;
        assert_memory_equal(content, copy, sizeof content);
        assert_int_equal(words[page],
                         checksum_encode(CHECKSUM_VALID,
                                         mirror_checksum(&guest->image->file, 0, page, content)));
    }
    close(fd);
    return state;
}

static void wait_until_followed(const struct guest *guest)
{
    for (unsigned looks = 0; look_at_mirror(guest).stale; looks++) {
        assert_true(looks < MOST_LOOKS);
        pause_ns(1000000);
    }
}

static void copy_image(const char *to)
{
    char command[1400];

    snprintf(command, sizeof command, "cp %s %s", IMAGE, to);
    assert_int_equal(system(command), 0);
}

/* A bit that says that a page is there. */
static void lose_a_page(const char *path)
{
    uint64_t word = 0;
    uint64_t at = BITMAP_OFFSET;

    do {
        at += sizeof word;
        must_transfer(path, &word, sizeof word, at, false);
    } while (!word);
    word &= word - 1;
    must_transfer(path, &word, sizeof word, at, true);
}

static unsigned corruptions_of(const char *path)
{
    struct pcow_check_result found;

    MUST(pcow_check(path, 0, NULL, NULL, &found, &error));
    return (unsigned)found.corruptions;
}

/* What a host that goes down leaves of a VM that runs. */
static void test_judged_after_a_crash(void **state)
{
    struct guest guest = begin();
    char left[600];

    (void)state;
    snprintf(left, sizeof left, "%s", scratch("left.pcow"));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(&guest, slab * PAGES_PER_SLAB + slab % 7, 1);
    assert_true(look_at_mirror(&guest).stale > 5);
    copy_image(left);
    lose_a_page(left);
    assert_int_equal(corruptions_of(left), 0);
    follow_at_once(&guest);
    wait_until_followed(&guest);
    assert_true(look_at_mirror(&guest).valid > 5);
    copy_image(left);
    assert_int_equal(corruptions_of(left), 0);
    lose_a_page(left);
    assert_true(corruptions_of(left) > 0);
    pcow_map_destroy(guest.map);
    pcow_close(guest.image);
    must_be_clean(IMAGE);
}

/* A page that is stored to once more is no longer judged, until the next time. */
static void test_stored_to_again(void **state)
{
    struct guest guest = begin();
    struct state before, after;

    (void)state;
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(&guest, slab * PAGES_PER_SLAB, 1);
    follow_at_once(&guest);
    wait_until_followed(&guest);
    __atomic_store_n(&guest.map->ahead.mirror.interval_ns, UINT64_MAX, __ATOMIC_RELAXED);
    pause_ns(SOME_NS);
    before = look_at_mirror(&guest);
    store(&guest, 100, 1);
    after = look_at_mirror(&guest);
    assert_int_equal(after.stale, 1);
    assert_int_equal(after.valid, before.valid - 1);
    follow_at_once(&guest);
    wait_until_followed(&guest);
    pcow_map_destroy(guest.map);
    pcow_close(guest.image);
    must_be_clean(IMAGE);
}

/* ---- beside who stores ----------------------------------------------------------------------- */

struct storing {
    const struct guest *guest;
    pthread_t thread;
    unsigned number;
    bool stop;
    uint64_t seed;
};

/* Every slab has pages of each thread, so they share pages of metadata. */
static void *store_all_the_time(void *opaque)
{
    struct storing *storing = opaque;

    while (!__atomic_load_n(&storing->stop, __ATOMIC_RELAXED)) {
        uint64_t page = random_next(&storing->seed) % (SLABS * PAGES_PER_SLAB);

        store(storing->guest, page / THREADS * THREADS + storing->number, 1);
    }
    return NULL;
}

static void store_for_a_while(const struct guest *guest, struct storing storing[THREADS])
{
    for (unsigned i = 0; i < THREADS; i++) {
        storing[i].stop = false;
        assert_int_equal(
            pthread_create(&storing[i].thread, NULL, store_all_the_time, &storing[i]), 0);
    }
    pause_ns(SOME_NS);
    for (unsigned i = 0; i < THREADS; i++)
        __atomic_store_n(&storing[i].stop, true, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(storing[i].thread, NULL);
    look_at_mirror(guest);
}

static void test_beside_who_stores(void **state)
{
    struct guest guest = begin();
    struct storing storing[THREADS];
    unsigned valid = 0;

    (void)state;
    for (unsigned i = 0; i < THREADS; i++)
        storing[i] = (struct storing){.guest = &guest, .number = i, .seed = i + 1};
    follow_at_once(&guest);
    for (unsigned round = 0; round < ROUNDS; round++) {
        char name[16];

        store_for_a_while(&guest, storing);
        valid += look_at_mirror(&guest).valid > 0;
        if (round % 3)
            continue;
        /* Slabs get other owners, and bitmaps others' pages. */
        snprintf(name, sizeof name, "s%u", round);
        MUST(pcow_snapshot_create(guest.image, name, &error));
        store_for_a_while(&guest, storing);
        if (round % 2)
            MUST(pcow_snapshot_revert(guest.image, name, &error));
        else
            MUST(pcow_snapshot_delete(guest.image, name, NULL, &error));
        look_at_mirror(&guest);
    }
    assert_true(valid > 0);
    wait_until_followed(&guest);
    pcow_map_destroy(guest.map);
    pcow_close(guest.image);
    must_be_clean(IMAGE);
}

/* Nobody wakes the thread but who stores. */
static void test_by_itself(void **state)
{
    struct guest guest = begin();
    uint64_t marks = 0;

    (void)state;
    store(&guest, 0, 1);
    __atomic_store_n(&guest.map->ahead.mirror.interval_ns, 20 * SOME_NS, __ATOMIC_RELAXED);
    for (unsigned round = 1; round <= 5; round++) {
        store(&guest, round * 32, 1);
        assert_true(mirror_marks(&guest.image->file) > marks);
        marks = mirror_marks(&guest.image->file);
        wait_until_followed(&guest);
    }
    pcow_map_destroy(guest.map);
    pcow_close(guest.image);
    must_be_clean(IMAGE);
}

/* The end tells also of a page that had been followed. */
static void test_overwritten_after(void **state)
{
    struct guest guest = begin();

    (void)state;
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(&guest, slab * PAGES_PER_SLAB, 1);
    follow_at_once(&guest);
    wait_until_followed(&guest);
    lose_a_page(IMAGE);
    pcow_map_destroy(guest.map);
    MUST_FAIL(-EBADMSG, pcow_finish(guest.image, &error));
    pcow_close(guest.image);
}

/* If it is our memory that was overwritten, page, copy and checksum have the better of it. */
static void test_overwritten_memory(void **state)
{
    struct guest guest = begin();
    uint64_t slab;

    (void)state;
    for (unsigned i = 0; i < SLABS; i++)
        store(&guest, i * PAGES_PER_SLAB, 7);
    follow_at_once(&guest);
    wait_until_followed(&guest);
    slab = slab_ref_slab(guest.image->chain->head[100]);
    pcow_map_destroy(guest.map);
    guest.image->valid[slab].word[0] &= ~UINT64_C(1);
    MUST(pcow_finish(guest.image, &error));
    pcow_close(guest.image);
    must_be_clean(IMAGE);
    guest.image = must_open(IMAGE, 0);
    assert_reads(guest.image, 100 * PCOW_SLAB_SIZE, "\a", 1);
    pcow_close(guest.image);
}

/* What somebody else has overwritten gets no checksum; who closes the image tells of it. */
static void test_overwritten(void **state)
{
    struct guest guest = begin();

    (void)state;
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(&guest, slab * PAGES_PER_SLAB, 1);
    lose_a_page(IMAGE);
    follow_at_once(&guest);
    pause_ns(20 * SOME_NS);
    assert_int_equal(look_at_mirror(&guest).stale, 1);
    pcow_map_destroy(guest.map);
    MUST_FAIL(-EBADMSG, pcow_finish(guest.image, &error));
    pcow_close(guest.image);
}

#define SCRATCH_TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        SCRATCH_TEST(test_judged_after_a_crash),
        SCRATCH_TEST(test_stored_to_again),
        SCRATCH_TEST(test_beside_who_stores),
        SCRATCH_TEST(test_overwritten),
        SCRATCH_TEST(test_overwritten_after),
        SCRATCH_TEST(test_overwritten_memory),
        SCRATCH_TEST(test_by_itself),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
