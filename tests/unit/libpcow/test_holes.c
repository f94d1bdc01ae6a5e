/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Pages of a base without blocks are loaded, on a full pool with few mappings, beside who stores to
 * the same slab, makes system calls there, or looks for a store. See monitor/holes.c.
 */
#include "late_call.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "persist/copy.h"

#define SLABS 12u
#define OWN_SLABS 9u                   /* the others are the base's alone */
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define HALF (PCOW_SLAB_SIZE / 2)
#define FEW_MAPPINGS 120u
#define MORE_FOR_HOLES 256u            /* see monitor/holes.c */
#define MANY_MAPPINGS 60000u

static _Atomic unsigned moves_refused; /* so many of the next ones, */
static bool takes_away;                /* after the kernel has unmapped the place */

void *__real_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);
void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);

/* As the kernel at its limit of mappings. */
void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new)
{
    if (moves_refused && flags & MREMAP_FIXED) {
        moves_refused--;
        if (takes_away)
            munmap(new, new_size);
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return __real_mremap(old, old_size, new_size, flags, new);
}

static int pool_setup(void **state)
{
    return pool_mount(state, "120m");
}

/*
 * The first half of each slab is own and mapped for stores, but of the last ones; in the second
 * half, the base's, every other page is a hole.
 */
struct guest {
    pcow_image *image;
    pcow_map *map;
    unsigned char *memory;
};

static void make_base(void)
{
    static const char zeros[PCOW_SLAB_SIZE];
    pcow_image *image = must_create(path_in_pool("base.pcow"), SIZE, 4096, NULL);

    for (uint64_t at = 0; at < SIZE; at += PCOW_SLAB_SIZE) {
        MUST(pcow_write(image, at, zeros, sizeof zeros, &error));
        for (uint64_t page = HALF; page < PCOW_SLAB_SIZE; page += 2 * PCOW_PAGE_SIZE)
            MUST(pcow_write(image, at + page, "x", 1, &error));
    }
    pcow_close(image);
    pool_make_sparse("base.pcow");
}

static uint64_t hole_of(unsigned slab)
{
    return slab * PCOW_SLAB_SIZE + HALF + PCOW_PAGE_SIZE;
}

static unsigned char load(const struct guest *guest, uint64_t offset)
{
    return *(const volatile unsigned char *)(guest->memory + offset);
}

static enum slab_state state_of(const struct guest *guest, unsigned slab)
{
    return slab_state(&guest->map->slabs[slab].status);
}

static void take_mappings(const struct guest *guest, unsigned budget)
{
    for (unsigned slab = 0; slab < 2; slab++)
        for (uint64_t page = HALF;
             page < PCOW_SLAB_SIZE && vmas_used(guest->map) + 2 <= budget + MORE_FOR_HOLES;
             page += PCOW_PAGE_SIZE)
            assert_int_equal(load(guest, slab * PCOW_SLAB_SIZE + page),
                             page / PCOW_PAGE_SIZE % 2 ? 0 : 'x');
}

static void write_halves(pcow_image *image)
{
    static unsigned char half[HALF];

    memset(half, 0x11, sizeof half);
    for (unsigned slab = 0; slab < OWN_SLABS; slab++)
        MUST(pcow_write(image, slab * PCOW_SLAB_SIZE, half, sizeof half, &error));
}

static struct pcow_map_options options_of(enum pcow_engine engine, unsigned budget)
{
    return (struct pcow_map_options){
        .engine = engine,
        .full_policy = PCOW_FULL_FAIL,
        .vma_budget = budget,
        .serves_sigbus = serve_bus(),
    };
}

static struct guest begin(enum pcow_engine engine, unsigned budget)
{
    const struct pcow_map_options how = options_of(engine, budget);
    struct pcow_create_options options = {.base = NULL};
    struct guest guest;

    make_base();
    options.base = path_in_pool("base.pcow");
    MUST(pcow_create(path_in_pool("top.pcow"), &options, &error));
    guest.image = must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
    /* Not by a map, which would take the other half along. */
    write_halves(guest.image);
    MUST(pcow_map_create(guest.image, &how, &guest.map, &error));
    guest.memory = pcow_map_address(guest.map);
    for (unsigned slab = 0; slab < OWN_SLABS; slab++) {
        MUST(pcow_map_resolve(guest.map, slab * PCOW_SLAB_SIZE, HALF, true, &error));
        memset(guest.memory + slab * PCOW_SLAB_SIZE, 0x11, HALF);
    }
    pool_fill();
    take_mappings(&guest, budget);
    return guest;
}

#ifndef __SANITIZE_THREAD__
/* All of it is own, and was copied as the base is. */
static struct guest begin_copied(unsigned budget)
{
    const struct pcow_map_options how = options_of(PCOW_ENGINE_SIGNAL, budget);
    struct guest guest;

    make_base();
    guest.image = must_open(path_in_pool("base.pcow"), PCOW_OPEN_WRITE);
    write_halves(guest.image);
    pcow_close(guest.image);
    pool_make_sparse("base.pcow");
    guest.image = must_open(path_in_pool("base.pcow"), PCOW_OPEN_WRITE);
    MUST(pcow_map_create(guest.image, &how, &guest.map, &error));
    guest.memory = pcow_map_address(guest.map);
    pool_fill();
    take_mappings(&guest, budget);
    return guest;
}
#endif

static void end(struct guest *guest)
{
    pcow_map_destroy(guest->map);
    pcow_close(guest->image);
    unlink(path_in_pool("top.pcow"));
    unlink(path_in_pool("base.pcow"));
    unlink(path_in_pool("filler"));
    pool_resize("120m");
}

/* A slab without own pages has become a copy, and only such a one. */
static void load_a_hole(const struct guest *guest, unsigned slab)
{
    assert_int_equal(load(guest, hole_of(slab)), 0);
    assert_int_equal(state_of(guest, slab), slab < OWN_SLABS ? SLAB_MAPPED : SLAB_BOUNCE);
}

/* ---- who is under way ------------------------------------------------------------------------ */

static void begin_call(struct late_call *call, const struct guest *guest, uint64_t offset)
{
    MUST(pcow_map_resolve(guest->map, offset, PCOW_PAGE_SIZE, true, &error));
    late_call_begin(call, guest->memory + offset);
}

static void end_call(struct late_call *call, const struct guest *guest)
{
    uint8_t *to = call->to;

    late_call_end(call, 0x22);
    assert_int_equal(load(guest, (uint64_t)(to - guest->memory)), 0x22);
}

/* Another thread loads a hole of the slab meanwhile. */
static void store_beside_a_load(struct guest guest)
{
    struct late_call call;

    begin_call(&call, &guest, 5 * PCOW_SLAB_SIZE);
    load_a_hole(&guest, 5);
    end_call(&call, &guest);
    end(&guest);
}

static void test_call_under_way(void **state)
{
    (void)state;
    store_beside_a_load(begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS));
}

#ifndef __SANITIZE_THREAD__            /* lets no SIGBUS be handled in a handler of SIGBUS */
/* The image itself was copied so: of its own pages some have no blocks either. */
static void test_call_under_way_in_a_copied_image(void **state)
{
    (void)state;
    store_beside_a_load(begin_copied(FEW_MAPPINGS));
}
#endif

/* The kernel has refused to map the slab anew, so nothing is mapped there. */
static void test_call_under_way_in_an_unmapped_slab(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS);
    uint64_t at = 5 * PCOW_SLAB_SIZE;
    struct late_call call;

    (void)state;
    begin_call(&call, &guest, at);
    chain_claim(guest.image->chain, 5);
    layout_unmap_slab(guest.map, 5);
    chain_release(guest.image->chain, 5);
    assert_int_equal(state_of(&guest, 5), SLAB_UNMAPPED);
    assert_int_equal(load(&guest, at + HALF), 'x');
    end_call(&call, &guest);
    end(&guest);
}

/* The kernel has no mapping left: it refuses to move the copy, once or always. */
static void test_no_move(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        struct guest guest = begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS);
        struct pcow_map_stats stats;

        takes_away = i % 2;
        moves_refused = i / 2 ? UINT_MAX : 1;
        for (unsigned slab = OWN_SLABS; slab < SLABS; slab++)
            for (uint64_t page = 0; page < PCOW_SLAB_SIZE; page += 100 * PCOW_PAGE_SIZE)
                assert_int_equal(load(&guest, slab * PCOW_SLAB_SIZE + page),
                                 page >= HALF && page / PCOW_PAGE_SIZE % 2 == 0 ? 'x' : 0);
        assert_int_equal(load(&guest, hole_of(10)), 0);
        assert_int_equal(load(&guest, 10 * PCOW_SLAB_SIZE + HALF), 'x');
        /* One that is shown does not take away another. */
        if (i == 2) {
            assert_int_equal(pcow_map_show_holes(guest.map, hole_of(11), 3 * PCOW_PAGE_SIZE), 1);
            assert_true(copy_touch(guest.memory + hole_of(11)));
            assert_true(copy_touch(guest.memory + hole_of(11) + 2 * PCOW_PAGE_SIZE));
        }
        moves_refused = 0;
        pcow_map_get_stats(guest.map, &stats);
        assert_true(count_mappings(guest.memory, SIZE) <= stats.vmas);
        end(&guest);
    }
}

static void test_stores_go_on(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct guest guest;
        struct pcow_map_stats before, after;

        if (!is_for_sanitizer(engine))
            continue;
        guest = begin(engine, FEW_MAPPINGS);
        pcow_map_get_stats(guest.map, &before);
        for (unsigned slab = 2; slab < OWN_SLABS; slab++) {
            uint64_t own = slab * PCOW_SLAB_SIZE + 8 * PCOW_PAGE_SIZE;

            /* The minor engine may keep it. */
            assert_int_equal(load(&guest, hole_of(slab)), 0);
            assert_true(pcow_map_can_store(guest.map, own));
            __atomic_store_n(guest.memory + own, 0x33, __ATOMIC_RELAXED);
            assert_int_equal(load(&guest, own), 0x33);
            assert_int_equal(load(&guest, own + PCOW_PAGE_SIZE), 0x11);
            for (uint64_t page = HALF; page < PCOW_SLAB_SIZE; page += PCOW_PAGE_SIZE)
                assert_int_equal(load(&guest, slab * PCOW_SLAB_SIZE + page),
                                 page / PCOW_PAGE_SIZE % 2 ? 0 : 'x');
        }
        pcow_map_get_stats(guest.map, &after);
        assert_int_equal(after.write_traps, before.write_traps);
        for (unsigned slab = OWN_SLABS; slab < SLABS; slab++)
            assert_int_equal(load(&guest, hole_of(slab)), 0);
        pool_resize("160m");
        /* Where a hole is shown, or over a copy. */
        for (unsigned slab = 2; slab < SLABS; slab++)
            for (uint64_t page = HALF; page < HALF + 32 * PCOW_PAGE_SIZE;
                 page += 2 * PCOW_PAGE_SIZE)
                __atomic_store_n(guest.memory + slab * PCOW_SLAB_SIZE + page, 0x44,
                                 __ATOMIC_RELAXED);
        MUST(pcow_snapshot_create(guest.image, "s", &error));
        pcow_map_get_stats(guest.map, &after);
        assert_true(count_mappings(guest.memory, SIZE) <= after.vmas + 10 * SLABS);
        for (unsigned slab = 2; slab < OWN_SLABS; slab++) {
            uint64_t own = slab * PCOW_SLAB_SIZE + 8 * PCOW_PAGE_SIZE;

            assert_int_equal(load(&guest, own), 0x33);
            assert_int_equal(load(&guest, slab * PCOW_SLAB_SIZE + HALF), 0x44);
            __atomic_store_n(guest.memory + own, 0x55, __ATOMIC_RELAXED);
            assert_int_equal(load(&guest, own), 0x55);
            assert_int_equal(load(&guest, own + PCOW_PAGE_SIZE), 0x11);
        }
        end(&guest);
    }
}

/* A call has failed; when it is asked why, what it loads from can be loaded, for any reason. */
static void test_requests(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, MANY_MAPPINGS);
    uint64_t at[4] = {hole_of(8), hole_of(9), hole_of(10), hole_of(11)};
    int pipes[2];

    (void)state;
    assert_int_equal(pipe(pipes), 0);
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(write(pipes[1], guest.memory + at[i], 1), -1);
        assert_int_equal(errno, EFAULT);
    }
    assert_int_equal(pcow_map_show_holes(guest.map, at[0], 1), 1);
    /* Another one was here first. */
    assert_int_equal(pcow_map_show_holes(guest.map, at[0], 1), 0);
    assert_int_equal(load(&guest, at[1]), 0);
    pool_resize("160m");
    __atomic_store_n(guest.memory + at[2], 7, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(pcow_map_show_holes(guest.map, at[i], 1), 0);
        assert_int_equal(write(pipes[1], guest.memory + at[i], 1), 1);
    }
    close(pipes[0]);
    close(pipes[1]);
    end(&guest);
}

/* Mappings of a copy, and of what is stored over it, from one snapshot to the next. */
static void test_snapshots(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS);

    (void)state;
    for (unsigned slab = 2; slab < SLABS; slab++)
        load_a_hole(&guest, slab);
    pool_resize("600m");
    guest.map->vma_budget = MANY_MAPPINGS;
    for (unsigned i = 0; i < 8; i++) {
        struct pcow_map_stats stats;
        unsigned mappings;
        char name[8];

        for (unsigned slab = 2; slab < SLABS; slab++)
            for (uint64_t page = HALF; page < HALF + 160 * PCOW_PAGE_SIZE;
                 page += 16 * PCOW_PAGE_SIZE)
                __atomic_store_n(guest.memory + slab * PCOW_SLAB_SIZE + page, (unsigned char)i,
                                 __ATOMIC_RELAXED);
        snprintf(name, sizeof name, "s%u", i);
        MUST(pcow_snapshot_create(guest.image, name, &error));
        pcow_map_get_stats(guest.map, &stats);
        mappings = count_mappings(guest.memory, SIZE);
        /* Those of slabs that are to be mapped anew are counted as the chain has them. */
        assert_true(mappings <= stats.vmas + 10 * SLABS);
        /* Not some more with each snapshot: 20 a slab, when they were. */
        assert_true(stats.vmas <= mappings + 20 * SLABS);
    }
    end(&guest);
}

/* A watch copies what is loaded: of a hole nothing can be loaded. */
static void test_watch(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_KVM, MANY_MAPPINGS);

    (void)state;
    MUST(pcow_map_watch(guest.map, &error));
    assert_int_equal(load(&guest, 9 * PCOW_SLAB_SIZE + HALF), 'x');
    assert_true(guest.map->watching);
    assert_int_equal(load(&guest, hole_of(9)), 0);
    assert_true(guest.map->watching);
    end(&guest);
}

/* ---- when there is no copy ------------------------------------------------------------------- */

static void test_what_is_mapped_is_not_known(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS);

    (void)state;
    guest.map->unknown = true;
    assert_int_equal(load(&guest, hole_of(3)), 0);
    guest.map->unknown = false;
    assert_int_equal(state_of(&guest, 3), SLAB_MAPPED);
    end(&guest);
}

#ifndef __SANITIZE_THREAD__
static void test_lost_neighbour(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS);
    struct pcow_extent extent;

    (void)state;
    MUST(pcow_get_extent(guest.image, 4 * PCOW_SLAB_SIZE - PCOW_PAGE_SIZE, PCOW_PAGE_SIZE, &extent,
                         &error));
    assert_int_equal(truncate(path_in_pool("base.pcow"), (off_t)extent.file_offset), 0);
    pool_fill();
    assert_int_equal(load(&guest, hole_of(3)), 0);
    assert_int_equal(load(&guest, 3 * PCOW_SLAB_SIZE + HALF), 'x');
    assert_false(copy_touch(guest.memory + 4 * PCOW_SLAB_SIZE - PCOW_PAGE_SIZE));
    assert_int_equal(pcow_map_show_holes(guest.map, 4 * PCOW_SLAB_SIZE - PCOW_PAGE_SIZE, 1),
                     -EFAULT);
    end(&guest);
}
#endif

/* ---- when there is no hole any more ---------------------------------------------------------- */

#ifndef __SANITIZE_THREAD__
static sigjmp_buf out;
static bool filled;

static void fill_first(int signal, siginfo_t *info, void *context)
{
    if (!filled)
        pool_resize("160m");
    filled = true;
    /* As another thread's load. */
    (void)copy_touch(info->si_addr);
    (void)signal;
    if (!pcow_serve_sigbus(info, context))
        siglongjmp(out, 1);
}

static void test_another_load_fills_it(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, MANY_MAPPINGS);
    struct sigaction action = {.sa_sigaction = fill_first, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before;
    volatile bool failed = true;

    (void)state;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
    if (sigsetjmp(out, 1) == 0) {
        assert_int_equal(load(&guest, hole_of(5)), 0);
        failed = false;
    }
    sigaction(SIGBUS, &before, NULL);
    assert_true(filled);
    assert_false(failed);
    end(&guest);
}
#endif

/* ---- blocks that are smaller than a page ----------------------------------------------------- */

static int disk_setup(void **state)
{
    return pool_mount_disk(state, "mkfs.ext4 -q -b 1024 -m 0", "128M");
}

/* A part of a page has no block; the slab becomes a copy, as it has more pieces than mappings. */
static void test_part_of_a_page(void **state)
{
    static unsigned char data[PCOW_SLAB_SIZE];
    struct pcow_extent extent;
    const unsigned char *memory;
    pcow_image *image;
    pcow_map *map;
    int fd;

    (void)state;
    memset(data, 5, sizeof data);
    image = must_create(path_in_pool("base.pcow"), 4 * PCOW_SLAB_SIZE, 4096, NULL);
    for (unsigned slab = 0; slab < 4; slab++)
        MUST(pcow_write(image, slab * PCOW_SLAB_SIZE, data, sizeof data, &error));
    MUST(pcow_get_extent(image, 2 * PCOW_SLAB_SIZE + PCOW_PAGE_SIZE, PCOW_PAGE_SIZE, &extent,
                         &error));
    pcow_close(image);
    fd = open(path_in_pool("base.pcow"), O_RDWR | O_CLOEXEC);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                               (off_t)extent.file_offset, 1024),
                     0);
    assert_int_equal(fsync(fd), 0);
    close(fd);
    image = must_create(path_in_pool("top.pcow"), 0, 0, path_in_pool("base.pcow"));
    for (uint64_t at = 2 * PCOW_PAGE_SIZE; at < 4 * PCOW_SLAB_SIZE; at += 4 * PCOW_PAGE_SIZE)
        MUST(pcow_write(image, at, "y", 1, &error));
    pcow_close(image);
    image = must_open(path_in_pool("top.pcow"), 0);
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 40);
    memory = pcow_map_address(map);
    for (unsigned slab = 0; slab < 4; slab++) {
        const volatile unsigned char *page = memory + slab * PCOW_SLAB_SIZE + PCOW_PAGE_SIZE;

        assert_int_equal(page[0], slab == 2 ? 0 : 5);
        assert_int_equal(page[1024], 5);
        assert_int_equal(page[PCOW_PAGE_SIZE], 'y');
    }
    pcow_map_destroy(map);
    pcow_close(image);
}

#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_call_under_way),
        POOL_TEST(test_call_under_way_in_an_unmapped_slab),
        POOL_TEST(test_no_move),
        POOL_TEST(test_stores_go_on),
        POOL_TEST(test_requests),
        POOL_TEST(test_snapshots),
        POOL_TEST(test_watch),
        POOL_TEST(test_what_is_mapped_is_not_known),
#ifndef __SANITIZE_THREAD__
        POOL_TEST(test_lost_neighbour),
        POOL_TEST(test_another_load_fills_it),
        POOL_TEST(test_call_under_way_in_a_copied_image),
#endif
        cmocka_unit_test_setup_teardown(test_part_of_a_page, disk_setup, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
