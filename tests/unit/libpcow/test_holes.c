/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Pages of a base without blocks are loaded, on a full pool with few mappings, beside who stores to
 * the same slab, makes system calls there, or looks for a store. See monitor/holes.c.
 */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "persist/copy.h"

#define SLABS 12u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define HALF (PCOW_SLAB_SIZE / 2)
#define FEW_MAPPINGS 120u
#define MORE_FOR_HOLES 256u            /* see monitor/holes.c */
#define MANY_MAPPINGS 60000u
#define SOME_NS 100000000L

static int pool_setup(void **state)
{
    return pool_mount(state, "120m");
}

static const char *path_in_pool(const char *name)
{
    static char path[2][600];
    static unsigned turn;

    turn = (turn + 1) % 2;
    snprintf(path[turn], sizeof path[turn], "%s/%s", pool_directory(), name);
    return path[turn];
}

/*
 * The first half of each slab is own and mapped for stores; in the second one, the base's, every
 * other page is a hole.
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
    const char *pool = pool_directory();
    char command[1400];

    for (uint64_t at = 0; at < SIZE; at += PCOW_SLAB_SIZE) {
        MUST(pcow_write(image, at, zeros, sizeof zeros, &error));
        for (uint64_t page = HALF; page < PCOW_SLAB_SIZE; page += 2 * PCOW_PAGE_SIZE)
            MUST(pcow_write(image, at + page, "x", 1, &error));
    }
    pcow_close(image);
    snprintf(command, sizeof command,
             "cp --sparse=always %s/base.pcow %s/copy && mv %s/copy %s/base.pcow", pool, pool, pool,
             pool);
    assert_int_equal(system(command), 0);
}

static void pause_ns(long ns)
{
    const struct timespec time = {0, ns};

    nanosleep(&time, NULL);
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

static struct guest begin(enum pcow_engine engine, unsigned budget)
{
    struct pcow_create_options options = {.base = NULL};
    const struct pcow_map_options how = {
        .engine = engine,
        .full_policy = PCOW_FULL_FAIL,
        .vma_budget = budget,
        .serves_sigbus = serve_bus(),
    };
    static unsigned char half[HALF];
    struct guest guest;

    make_base();
    options.base = path_in_pool("base.pcow");
    MUST(pcow_create(path_in_pool("top.pcow"), &options, &error));
    guest.image = must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
    /* Not by a map, which would take the other half along. */
    memset(half, 0x11, sizeof half);
    for (unsigned slab = 0; slab < SLABS; slab++)
        MUST(pcow_write(guest.image, slab * PCOW_SLAB_SIZE, half, sizeof half, &error));
    MUST(pcow_map_create(guest.image, &how, &guest.map, &error));
    guest.memory = pcow_map_address(guest.map);
    for (unsigned slab = 0; slab < SLABS; slab++) {
        MUST(pcow_map_resolve(guest.map, slab * PCOW_SLAB_SIZE, HALF, true, &error));
        memset(guest.memory + slab * PCOW_SLAB_SIZE, 0x11, HALF);
    }
    pool_fill();
    /* These take what mappings there are. */
    for (unsigned slab = 0; slab < 2; slab++)
        for (uint64_t page = HALF;
             page < PCOW_SLAB_SIZE && vmas_used(guest.map) + 2 <= budget + MORE_FOR_HOLES;
             page += PCOW_PAGE_SIZE)
            assert_int_equal(load(&guest, slab * PCOW_SLAB_SIZE + page),
                             page / PCOW_PAGE_SIZE % 2 ? 0 : 'x');
    return guest;
}

static void end(struct guest *guest)
{
    pcow_map_destroy(guest->map);
    pcow_close(guest->image);
    unlink(path_in_pool("top.pcow"));
    unlink(path_in_pool("base.pcow"));
    unlink(path_in_pool("filler"));
    pool_resize("120m");
}

/* Its slab has become a copy, but for what is mapped for stores. */
static void load_a_hole(const struct guest *guest, unsigned slab)
{
    assert_int_equal(load(guest, hole_of(slab)), 0);
    assert_int_equal(state_of(guest, slab), SLAB_BOUNCE);
}

/* ---- who is under way ------------------------------------------------------------------------ */

struct call {
    void *from, *to;
    ssize_t moved;
};

static void *store_by_kernel(void *opaque)
{
    struct call *call = opaque;
    struct iovec local = {call->from, PCOW_PAGE_SIZE}, remote = {call->to, PCOW_PAGE_SIZE};

    /* Like O_DIRECT it looks up the page, and then stores to it whatever is mapped by then. */
    call->moved = process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
    return NULL;
}

static void test_call_under_way(void **state)
{
    static unsigned char data[PCOW_PAGE_SIZE];
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, FEW_MAPPINGS);
    uint64_t at = 5 * PCOW_SLAB_SIZE;
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.mode = UFFDIO_REGISTER_MODE_MISSING};
    struct uffdio_copy copy = {.src = (uintptr_t)data, .len = sizeof data};
    struct call call = {.to = guest.memory + at};
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    pthread_t thread;

    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(ioctl(fd, UFFDIO_API, &api), 0);
    call.from = mmap(NULL, sizeof data, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(call.from, MAP_FAILED);
    range.range = (struct uffdio_range){(uintptr_t)call.from, sizeof data};
    assert_int_equal(ioctl(fd, UFFDIO_REGISTER, &range), 0);
    MUST(pcow_map_resolve(guest.map, at, PCOW_PAGE_SIZE, true, &error));
    assert_int_equal(pthread_create(&thread, NULL, store_by_kernel, &call), 0);
    pause_ns(SOME_NS);
    load_a_hole(&guest, 5);
    memset(data, 0x22, sizeof data);
    copy.dst = (uintptr_t)call.from;
    assert_int_equal(ioctl(fd, UFFDIO_COPY, &copy), 0);
    pthread_join(thread, NULL);
    assert_int_equal(call.moved, PCOW_PAGE_SIZE);
    assert_int_equal(load(&guest, at), 0x22);
    munmap(call.from, sizeof data);
    close(fd);
    end(&guest);
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
        for (unsigned slab = 2; slab < SLABS; slab++) {
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
        pool_resize("160m");
        /* To pages of the copy. */
        for (unsigned slab = 2; slab < SLABS; slab++)
            for (uint64_t page = HALF; page < HALF + 32 * PCOW_PAGE_SIZE; page += 2 * PCOW_PAGE_SIZE)
                __atomic_store_n(guest.memory + slab * PCOW_SLAB_SIZE + page, 0x44,
                                 __ATOMIC_RELAXED);
        MUST(pcow_snapshot_create(guest.image, "s", &error));
        pcow_map_get_stats(guest.map, &after);
        assert_true(count_mappings(guest.memory, SIZE) <= after.vmas);
        for (unsigned slab = 2; slab < SLABS; slab++) {
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

/* Each sees that its call failed; the first one has the hole shown, for both. */
static void test_two_calls(void **state)
{
    struct guest guest = begin(PCOW_ENGINE_SIGNAL, MANY_MAPPINGS);
    uint64_t before = pcow_map_holes_shown(guest.map), at = hole_of(11);
    int pipes[2];

    (void)state;
    assert_int_equal(pipe(pipes), 0);
    for (unsigned call = 0; call < 2; call++) {
        assert_int_equal(write(pipes[1], guest.memory + at + call * 4 * PCOW_PAGE_SIZE, 1), -1);
        assert_int_equal(errno, EFAULT);
    }
    assert_true(pcow_map_show_holes(guest.map, at, 5 * PCOW_PAGE_SIZE));
    assert_false(pcow_map_show_holes(guest.map, at, 5 * PCOW_PAGE_SIZE));
    assert_true(pcow_map_holes_shown(guest.map) > before);
    assert_int_equal(write(pipes[1], guest.memory + at + 4 * PCOW_PAGE_SIZE, 1), 1);
    before = pcow_map_holes_shown(guest.map);
    assert_int_equal(load(&guest, at + 2 * PCOW_PAGE_SIZE), 0);
    assert_int_equal(pcow_map_holes_shown(guest.map), before);
    close(pipes[0]);
    close(pipes[1]);
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
    assert_false(pcow_map_show_holes(guest.map, 4 * PCOW_SLAB_SIZE - PCOW_PAGE_SIZE, 1));
    end(&guest);
}

/* ---- when there is no hole any more ---------------------------------------------------------- */

#ifndef __SANITIZE_THREAD__            /* lets no SIGBUS be handled in a handler of SIGBUS */
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

#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_call_under_way),
        POOL_TEST(test_stores_go_on),
        POOL_TEST(test_two_calls),
        POOL_TEST(test_watch),
        POOL_TEST(test_what_is_mapped_is_not_known),
        POOL_TEST(test_lost_neighbour),
#ifndef __SANITIZE_THREAD__
        POOL_TEST(test_another_load_fills_it),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
