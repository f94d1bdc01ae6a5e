/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshots and reverts that move the page tables of the guest's range out of the way. The program
 * is linked so that its calls of mremap() and munmap() pass by here: moves can fail, the thread
 * that unmaps can be held up, and loads can come in between.
 */
#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define SLABS 17u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define PARTLY 14u                     /* every other page of it is own */
#define ABSENT 15u
#define UNUSED 16u                     /* own, but the guest does not touch it but for one byte */
/* slabs: 0 to 9 lie one after the other in the file, 10 to 13 do not */
#define MOVED 14u

static struct {
    _Atomic bool armed;
    _Atomic size_t longest;            /* that can be moved, bytes */
    _Atomic unsigned moves;
    _Atomic size_t moved;              /* bytes */
    const volatile unsigned char *_Atomic loads;     /* after each move, from all of this */
    _Atomic unsigned wrong;
    _Atomic bool hold;                 /* whoever unmaps a slab */
    _Atomic bool squat;                /* others take what is unmapped, at once */
    unsigned char *_Atomic taken[SLABS];
    _Atomic unsigned squatters;
    sem_t held, go_on;
    char path[600];
} step;

void *__real_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);
void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);
int __real_munmap(void *address, size_t length);
int __wrap_munmap(void *address, size_t length);

static unsigned char expected(uint64_t page, unsigned generation)
{
    uint64_t slab = page / PAGES_PER_SLAB;

    if (slab == ABSENT || (slab == PARTLY && page % 2))
        return 0;
    if (slab == UNUSED)
        generation = 0;
    return (unsigned char)(1 + (page * 7 + generation * 31) % 255);
}

static unsigned count_wrong(const volatile unsigned char *memory, unsigned generation)
{
    unsigned wrong = 0;

    for (uint64_t page = 0; page < SIZE / PCOW_PAGE_SIZE; page++)
        wrong += memory[page * PCOW_PAGE_SIZE] != expected(page, generation)
                 || memory[page * PCOW_PAGE_SIZE + 4095] != 0;
    return wrong;
}

void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new)
{
    void *result;

    if (!step.armed)
        return __real_mremap(old, old_size, new_size, flags, new);
    if (old_size > step.longest) {
        errno = EFAULT;
        return MAP_FAILED;
    }
    result = __real_mremap(old, old_size, new_size, flags, new);
    step.moves++;
    step.moved += result == MAP_FAILED ? 0 : old_size;
    if (step.loads)
        step.wrong += count_wrong(step.loads, 1);
    return result;
}

int __wrap_munmap(void *address, size_t length)
{
    if (step.hold && length == PCOW_SLAB_SIZE) {
        step.hold = false;
        sem_post(&step.held);
        sem_wait(&step.go_on);
    }
    if (!step.squat || length != PCOW_SLAB_SIZE || step.squatters == SLABS)
        return __real_munmap(address, length);
    if (__real_munmap(address, length))
        return -1;
    step.taken[step.squatters] = mmap(address, length, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (step.taken[step.squatters] != MAP_FAILED)
        memset(step.taken[step.squatters++], 0x5a, PCOW_PAGE_SIZE);
    return 0;
}

static void begin(void)
{
    step.armed = step.hold = step.squat = false;
    step.squatters = 0;
    step.loads = NULL;
    step.wrong = 0;
    step.longest = SIZE_MAX;
    sem_init(&step.held, 0, 0);
    sem_init(&step.go_on, 0, 0);
}

static int setup(void **state)
{
    begin();
    if (scratch_setup(state))
        return -1;
    snprintf(step.path, sizeof step.path, "%s", scratch("image"));
    return 0;
}

static int setup_huge(void **state)
{
    begin();
    if (pool_mount(state, "256m,huge=always"))
        return -1;
    snprintf(step.path, sizeof step.path, "%s/image", pool_directory());
    return 0;
}

static void write_slab(pcow_image *image, uint64_t slab, unsigned char *buffer)
{
    if (slab == ABSENT)
        return;
    for (uint64_t page = 0; page < PAGES_PER_SLAB; page++) {
        uint64_t number = slab * PAGES_PER_SLAB + page;

        buffer[0] = expected(number, 0);
        if (slab != PARTLY || page % 2 == 0)
            MUST(pcow_write(image, number * PCOW_PAGE_SIZE, buffer, PCOW_PAGE_SIZE, &error));
    }
}

static pcow_image *make_image(void)
{
    static const unsigned others[] = {12, 10, 14, 11, 15, 16, 13};
    pcow_image *image = must_create(step.path, SIZE, 0, NULL);
    unsigned char buffer[PCOW_PAGE_SIZE] = {0};

    for (unsigned slab = 0; slab < 10; slab++)
        write_slab(image, slab, buffer);
    for (unsigned i = 0; i < sizeof others / sizeof *others; i++)
        write_slab(image, others[i], buffer);
    return image;
}

static void store_all(pcow_map *map, unsigned generation)
{
    volatile unsigned char *memory = pcow_map_address(map);

    for (uint64_t page = 0; page < SIZE / PCOW_PAGE_SIZE; page++)
        if (expected(page, 1) != expected(page, 2))
            memory[page * PCOW_PAGE_SIZE] = expected(page, generation);
    /* The slab is mapped for stores, and nothing else of it is in the page table. */
    memory[UNUSED * PCOW_SLAB_SIZE] = expected(UNUSED * PAGES_PER_SLAB, 0);
}

static void must_show(pcow_map *map, unsigned generation)
{
    assert_int_equal(count_wrong(pcow_map_address(map), generation), 0);
}

/* What the snapshot holds, by another handle. */
static void must_have_frozen(const char *name, unsigned generation)
{
    pcow_image *frozen;
    unsigned char byte;

    MUST(pcow_open(step.path, 0, name, &frozen, &error));
    for (uint64_t page = 0; page < SIZE / PCOW_PAGE_SIZE; page++) {
        MUST(pcow_read(frozen, page * PCOW_PAGE_SIZE, &byte, 1, &error));
        assert_int_equal(byte, expected(page, generation));
    }
    pcow_close(frozen);
}

static void snapshot(pcow_image *image, const char *name)
{
    step.moves = 0;
    step.moved = 0;
    step.armed = true;
    MUST(pcow_snapshot_create(image, name, &error));
    step.armed = false;
}

static void wait_until_unmapped(const pcow_map *map)
{
    for (unsigned i = 0; i < 2000 && retire_is_due(map); i++)
        usleep(5000);
    assert_false(retire_is_due(map));
}

static void finish(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(step.path);
    assert_int_equal(unlink(step.path), 0);
}

static void test_snapshot_and_revert(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = make_image();
        pcow_map *map = must_map_by(image, engine, 0);
        struct pcow_map_stats before, after;

        store_all(map, 1);
        pcow_map_get_stats(map, &before);
        snapshot(image, "one");
        /* One move for what lies in one piece, one each for the others. */
        assert_int_equal(step.moved, MOVED * PCOW_SLAB_SIZE);
        assert_in_range(step.moves, 1 + 4, 2 + 4);         /* two if it lies across 1 GiB */
        wait_until_unmapped(map);
        pcow_map_get_stats(map, &after);
        assert_true(after.vmas <= before.vmas);
        must_show(map, 1);
        store_all(map, 2);
        must_show(map, 2);
        must_have_frozen("one", 1);
        step.moved = 0;
        step.armed = true;
        MUST(pcow_snapshot_revert(image, "one", &error));
        step.armed = false;
        /* the thread may have completed another one */
        assert_true(step.moved >= MOVED * PCOW_SLAB_SIZE);
        must_show(map, 1);
        store_all(map, 3);
        must_show(map, 3);
        must_have_frozen("one", 1);
        finish(image, map);
    }
}

static void test_loads_between(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);

    (void)state;
    store_all(map, 1);
    step.loads = pcow_map_address(map);
    snapshot(image, "one");
    step.loads = NULL;
    assert_true(step.moves > 0);
    assert_int_equal(step.wrong, 0);
    store_all(map, 2);
    must_show(map, 2);
    must_have_frozen("one", 1);
    finish(image, map);
}

/* Nothing can be moved, or no more than one slab at once: a snapshot all the same. */
static void test_kernel_refuses(void **state)
{
    (void)state;
    for (unsigned slabs = 0; slabs < 2; slabs++) {
        pcow_image *image = make_image();
        pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);

        step.longest = slabs * PCOW_SLAB_SIZE;
        store_all(map, 1);
        snapshot(image, "one");
        assert_int_equal(step.moves, slabs * MOVED);
        store_all(map, 2);
        must_show(map, 2);
        must_have_frozen("one", 1);
        MUST(pcow_snapshot_revert(image, "one", &error));
        must_show(map, 1);
        finish(image, map);
    }
}

/*
 * The thread is not through with the first when the second snapshot comes; and when the image is
 * closed.
 */
static void test_still_busy(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);

    (void)state;
    store_all(map, 1);
    step.hold = true;
    snapshot(image, "one");
    assert_int_equal(step.moved, MOVED * PCOW_SLAB_SIZE);
    sem_wait(&step.held);
    store_all(map, 2);
    snapshot(image, "two");
    assert_int_equal(step.moved, 0);
    store_all(map, 3);
    must_show(map, 3);
    must_have_frozen("one", 1);
    must_have_frozen("two", 2);
    sem_post(&step.go_on);
    wait_until_unmapped(map);
    snapshot(image, "three");
    assert_true(step.moved >= MOVED * PCOW_SLAB_SIZE);
    finish(image, map);
}

/* What is unmapped is nobody's the next moment, and may be somebody else's. */
static void test_others_move_in(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);

    (void)state;
    store_all(map, 1);
    step.squat = true;
    snapshot(image, "one");
    assert_int_equal(step.moved, MOVED * PCOW_SLAB_SIZE);
    wait_until_unmapped(map);
    step.squat = false;
    store_all(map, 2);
    snapshot(image, "two");
    finish(image, map);
    assert_in_range(step.squatters, 1, SLABS);
    for (unsigned i = 0; i < step.squatters; i++) {
        assert_int_equal(step.taken[i][0], 0x5a);
        assert_int_equal(step.taken[i][PCOW_PAGE_SIZE - 1], 0x5a);
        munmap(step.taken[i], PCOW_SLAB_SIZE);
    }
}

/*
 * Copy-on-read has everything mapped anew at a snapshot. What was moved counts until it is gone,
 * and once.
 */
static void test_count_of_mappings(void **state)
{
    pcow_image *image = make_image();
    struct pcow_map_stats stats;
    pcow_map *map;

    (void)state;
    MUST(pcow_set_copy_on_read(image, true, &error));
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    for (unsigned i = 0; i < 10; i++) {
        unsigned pieces = 0;
        char name[16];

        snprintf(name, sizeof name, "s%u", i);
        store_all(map, 1 + i % 2);
        snapshot(image, name);
        assert_true(step.moved > 0);
        wait_until_unmapped(map);
        must_show(map, 1 + i % 2);
        for (unsigned v = 0; v < SLABS; v++)
            pieces += map->slabs[v].pieces;
        pcow_map_get_stats(map, &stats);
        /* And the stretch of those that are not used. */
        assert_int_equal(stats.vmas, pieces + 1);
    }
    finish(image, map);
}

/* Each run that is moved takes a mapping until it is unmapped: none that others need. */
static void test_budget(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    struct pcow_map_stats stats;

    (void)state;
    store_all(map, 1);
    pcow_map_get_stats(map, &stats);
    map->shares_vmas = false;
    map->vma_budget = stats.vmas + 4;
    snapshot(image, "one");
    pcow_map_get_stats(map, &stats);
    assert_true(stats.vmas <= map->vma_budget);
    assert_int_equal(step.moved, 0);
    store_all(map, 2);
    must_show(map, 2);
    must_have_frozen("one", 1);
    /* Enough for some of them: traps must not run short meanwhile. */
    map->vma_budget = (stats.vmas + 13) / 3 * 4 + 4;
    step.hold = true;
    snapshot(image, "two");
    sem_wait(&step.held);
    pcow_map_get_stats(map, &stats);
    assert_true(step.moved > 0);
    assert_true(stats.vmas + 4 < map->vma_budget);
    sem_post(&step.go_on);
    finish(image, map);
}

/* What is locked in memory stays so: where it was, not where nobody looks. */
static void test_locked(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);

    (void)state;
    store_all(map, 1);
    /* A sanitizer makes nothing of mlock(). */
    if (syscall(SYS_mlock, pcow_map_address(map), SIZE)) {
        finish(image, map);
        skip();
    }
    snapshot(image, "one");
    assert_int_equal(step.moved, 0);
    store_all(map, 2);
    must_show(map, 2);
    must_have_frozen("one", 1);
    finish(image, map);
}

/*
 * Slabs in one mapping; what lies beyond a border of 1 GiB is a move of its own. Of less than eight
 * the tables are looked at, and here they are left.
 */
static uint64_t moved_without_a_look(const pcow_map *map, uint64_t slabs)
{
    const uint64_t gib = UINT64_C(1) << 30;
    uint64_t before = (gib - (uintptr_t)pcow_map_address(map) % gib) / PCOW_SLAB_SIZE;
    uint64_t first = before < slabs ? before : slabs;

    return (first >= 8 ? first : 0) + (slabs - first >= 8 ? slabs - first : 0);
}

/* One entry for a slab is changed sooner than it is moved. */
static void test_huge(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    unsigned huge = 0;

    (void)state;
    store_all(map, 1);
    for (unsigned v = 10; v < MOVED; v++)
        huge += density_is_huge(&map->density, pcow_map_address(map) + v * PCOW_SLAB_SIZE);
    /*
     * before Linux 6.7 the kernel does not tell; test_whole sees to it that there are such entries
     */
    if (huge == 0) {
        finish(image, map);
        skip();
    }
    assert_int_equal(huge, MOVED - 10);
    snapshot(image, "one");
    assert_int_equal(step.moved, moved_without_a_look(map, 10) * PCOW_SLAB_SIZE);
    store_all(map, 2);
    must_show(map, 2);
    must_have_frozen("one", 1);
    step.moves = 0;
    step.armed = true;
    MUST(pcow_snapshot_revert(image, "one", &error));
    step.armed = false;
    must_show(map, 1);
    finish(image, map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_snapshot_and_revert, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_loads_between, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_kernel_refuses, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_still_busy, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_others_move_in, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_count_of_mappings, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_budget, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_locked, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_huge, setup_huge, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
