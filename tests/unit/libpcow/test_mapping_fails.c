/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * mmap() that fails in the midst of something: what was mapped before may be stored to, and must be
 * known to flushes and snapshots. The program is linked so that its calls of mmap() pass by here.
 */
#include "support.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "operations/operations.h"

#define SIZE (8 * MIB)
#define PAGE 4096

static struct {
    unsigned char *volatile page;      /* the one at which nothing alone can be mapped, once; or */
    unsigned char *volatile slab;      /* that cannot be mapped to a file as one, once; or */
    unsigned char *volatile all;       /* the range in which nothing can be mapped; or */
    /* files cannot be mapped in the range, and when nothing is mapped there any more: */
    unsigned char *volatile range;
    void (*volatile then)(void);
} broken;

void *__real_mmap64(void *address, size_t length, int protection, int flags, int fd,
                    off64_t offset);
void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd,
                    off64_t offset);

void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    unsigned char *at = address, *range = broken.range;
    void *mapped;

    if (broken.all && at >= broken.all && at < broken.all + SIZE) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (at && at == broken.slab && length == PCOW_SLAB_SIZE && fd >= 0) {
        broken.slab = NULL;
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (at && at == broken.page && length == PAGE) {
        broken.page = NULL;
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (!range || at < range || at >= range + SIZE)
        return __real_mmap64(address, length, protection, flags, fd, offset);
    if (fd >= 0) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    mapped = __real_mmap64(address, length, protection, flags, fd, offset);
    broken.range = NULL;
    broken.then();
    return mapped;
}

static struct {
    struct observer observer;
    atomic_uint syncs;
    atomic_bool waits;                 /* the next msync() of the range */
    unsigned char *memory;
    sem_t is_waiting, may_go, is_over;
} world;

static int look(struct observer *observer, const struct observation *seen)
{
    const unsigned char *address = seen->address;

    (void)observer;
    if (seen->what == OBSERVED_SYNC)
        atomic_fetch_add(&world.syncs, 1);
    if (seen->what == OBSERVED_MSYNC && address >= world.memory && address < world.memory + SIZE
        && atomic_exchange(&world.waits, false)) {
        sem_post(&world.is_waiting);
        sem_wait(&world.may_go);
    }
    return 0;
}

/* The thread that works ahead may meet the lost page. */
static void handle_unreadable(int number, siginfo_t *info, void *context)
{
    if (!pcow_serve_sigbus(info, context))
        signal(number, SIG_DFL);
}

/* Class page-cache; a slab that a snapshot holds. */
static pcow_map *map_frozen(enum pcow_engine engine, pcow_image **image)
{
    static unsigned char ones[2 * MIB];
    struct sigaction action = {.sa_sigaction = handle_unreadable,
                               .sa_flags = SA_SIGINFO | SA_NODEFER};
    pcow_map *map;

    assert_int_equal(sigaction(SIGBUS, &action, NULL), 0);
    unlink(scratch("vm.pcow"));
    *image = must_create(scratch("vm.pcow"), SIZE, 0, NULL);
    memset(ones, 1, sizeof ones);
    MUST(pcow_write(*image, 0, ones, sizeof ones, &error));
    MUST(pcow_snapshot_create(*image, "old", &error));
    pcow_close(*image);
    memset(&world, 0, sizeof world);
    world.observer = (struct observer){.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};
    sem_init(&world.is_waiting, 0, 0);
    sem_init(&world.may_go, 0, 0);
    sem_init(&world.is_over, 0, 0);
    MUST(image_open(scratch("vm.pcow"), PCOW_OPEN_WRITE, NULL, &world.observer, image, &error));
    map = must_map_by(*image, engine, 0);
    world.memory = pcow_map_address(map);
    return map;
}

/* A cluster is mapped for stores around a lost page, by several calls: the second fails. */
static void test_around_a_lost_page(void **state)
{
    (void)state;
    for (enum pcow_engine engine = PCOW_ENGINE_SIGNAL; engine <= PCOW_ENGINE_KVM; engine++) {
        pcow_image *image, *view;
        pcow_map *map = map_frozen(engine, &image);
        volatile unsigned char *memory = world.memory;
        unsigned char byte;

        memory[5 * PAGE] = 2;
        MUST(pcow_map_flush(map, 0, SIZE, &error));
        MUST(pcow_map_lose(map, 5 * PAGE, &error));
        memory[6 * PAGE] = 2;
        broken.page = world.memory + 5 * PAGE;
        /* The guest comes back to the cluster, so that all of it is mapped. */
        MUST_FAIL(-ENOMEM, pcow_map_resolve(map, 7 * PAGE, PAGE, true, &error));
        assert_null(broken.page);
        memory[0] = 3;
        atomic_store(&world.syncs, 0);
        MUST(pcow_map_flush(map, 0, PAGE, &error));
        assert_true(atomic_load(&world.syncs) > 0 || page_set_has(&map->slabs[0].writable, 0));
        MUST(pcow_snapshot_create(image, "new", &error));
        memory[0] = 4;
        MUST(pcow_open(scratch("vm.pcow"), 0, "new", &view, &error));
        MUST(pcow_read(view, 0, &byte, 1, &error));
        assert_int_equal(byte, 3);
        pcow_close(view);
        assert_int_equal(memory[0], 4);
        pcow_map_destroy(map);
        pcow_close(image);
    }
}

static void *flush(void *opaque)
{
    struct pcow_error ignored;
    int ret = pcow_map_flush(opaque, 0, PAGE, &ignored);

    sem_post(&world.is_over);
    return ret ? opaque : NULL;
}

static void let_flush_end(void)
{
    sem_post(&world.may_go);
    sem_wait(&world.is_over);
}

/*
 * A flush asks for a page at which nothing is mapped at that moment, as its slab could not be
 * mapped anew: that is no answer.
 */
static void test_flush_of_what_was_unmapped(void **state)
{
    (void)state;
    pcow_image *image;
    pcow_map *map = map_frozen(PCOW_ENGINE_SIGNAL, &image);
    volatile unsigned char *memory = world.memory;
    pthread_t thread;
    void *failed;

    memory[0] = 9;
    atomic_store(&world.syncs, 0);
    atomic_store(&world.waits, true);
    assert_int_equal(pthread_create(&thread, NULL, flush, map), 0);
    sem_wait(&world.is_waiting);
    map->vma_budget = 1;               /* so that the whole slab is mapped anew */
    broken.then = let_flush_end;
    broken.range = world.memory;
    MUST_FAIL(-ENOMEM, pcow_map_resolve(map, 200 * PAGE, PAGE, true, &error));
    assert_null(broken.range);
    assert_int_equal(map->slabs[0].pieces, 1);
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_true(atomic_load(&world.syncs) > 0);
    assert_int_equal(memory[0], 9);
    pcow_map_destroy(map);
    pcow_close(image);
}

static void expect_in_snapshot(const char *name, uint64_t offset, unsigned char expected)
{
    pcow_image *view;
    unsigned char byte;

    MUST(pcow_open(scratch("vm.pcow"), 0, name, &view, &error));
    MUST(pcow_read(view, offset, &byte, 1, &error));
    assert_int_equal(byte, expected);
    pcow_close(view);
}

/*
 * A slab has become whole, and cannot be mapped as one: whoever asked for a page can store to it,
 * and the next snapshot keeps it.
 */
static void test_whole_slab(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("vm.pcow"), SIZE, 0, NULL);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_KVM, 0);
    volatile unsigned char *memory = pcow_map_address(map);
    unsigned page = 0;

    image->file.huge = true;
    for (unsigned last = 496; last < PAGES_PER_SLAB; last += 16)
        memory[last * PAGE] = 1;
    broken.slab = pcow_map_address(map);
    for (; page < 496 && broken.slab; page++) {
        MUST(pcow_map_resolve(map, page * PAGE, PAGE, true, &error));
        assert_true(page_set_has(&map->slabs[0].writable, page));
        memory[page * PAGE] = 1;
    }
    assert_null(broken.slab);
    assert_false(slab_is_unmapped(&map->slabs[0].status));
    memory[500 * PAGE] = 5;
    MUST(pcow_snapshot_create(image, "new", &error));
    memory[500 * PAGE] = 99;
    expect_in_snapshot("new", 500 * PAGE, 5);
    pcow_map_destroy(map);
    pcow_close(image);
}

/*
 * Nothing can be mapped in the range when a snapshot is made, and what is mapped for stores is not
 * known.
 */
static void test_snapshot_without_mappings(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(scratch("vm.pcow"), SIZE, 0, NULL);
        pcow_map *map = must_map_by(image, engine, 0);
        volatile unsigned char *memory = pcow_map_address(map);
        struct pcow_error said;

        memory[0] = 5;
        memory[PCOW_SLAB_SIZE] = 5;
        map->vma_budget = 1;
        broken.all = pcow_map_address(map);
        pcow_map_resolve(map, 100 * PAGE, PAGE, true, &said);
        map->unknown = true;
        MUST(pcow_snapshot_create(image, "new", &error));
        broken.all = NULL;
        memory[0] = 99;
        assert_int_equal(memory[PCOW_SLAB_SIZE], 5);
        memory[PCOW_SLAB_SIZE] = 99;
        expect_in_snapshot("new", 0, 5);
        expect_in_snapshot("new", PCOW_SLAB_SIZE, 5);
        assert_int_equal(memory[0], 99);
        assert_int_equal(memory[PCOW_SLAB_SIZE], 99);
        pcow_map_destroy(map);
        pcow_close(image);
        unlink(scratch("vm.pcow"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_around_a_lost_page, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_flush_of_what_was_unmapped, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_whole_slab, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_snapshot_without_mappings, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
