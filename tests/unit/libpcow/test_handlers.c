/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Handlers of the program that store to a map. Wherever a signal comes, also in the midst of a trap
 * or of a call, the handler must not wait for what its own thread has claimed.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define SLABS 4u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define HANG_SECONDS 100

static volatile unsigned char *stored_to;  /* by the handler; NULL: nothing */
static atomic_uint handled;
static atomic_bool interrupt;              /* at the next mapping that this thread makes: */
static pthread_t interrupted;

static void handle(int number)
{
    (void)number;
    if (stored_to)
        *stored_to = 0x77;
    atomic_fetch_add(&handled, 1);
}

void *__real_mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset);

void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    if (pthread_equal(pthread_self(), interrupted) && atomic_exchange(&interrupt, false))
        raise(SIGUSR1);
    return __real_mmap64(address, length, protection, flags, fd, offset);
}

static int setup(void **state)
{
    struct sigaction action = {.sa_handler = handle};

    sigemptyset(&action.sa_mask);
    interrupted = pthread_self();
    alarm(HANG_SECONDS);
    return sigaction(SIGUSR1, &action, NULL) ? -1 : scratch_setup(state);
}

static int teardown(void **state)
{
    stored_to = NULL;
    atomic_store(&interrupt, false);
    alarm(0);
    signal(SIGUSR1, SIG_DFL);
    return scratch_teardown(state);
}

/* What a thread may be at when the signal comes. */
enum what { STORE, COPY, RESOLVE, PREPARE, TRAP, RESTORE, DELETE, WHATS };

static void do_what(pcow_image *image, pcow_map *map, enum what what)
{
    unsigned char *memory = pcow_map_address(map);

    atomic_store(&interrupt, true);
    switch (what) {
    case STORE:
        memory[3 * MIB] = 1;
        break;
    case COPY:
        memory[64 * KIB] = 1;
        break;
    case RESOLVE:
        MUST(pcow_map_resolve(map, 64 * KIB, 4096, true, &error));
        break;
    case PREPARE:
        MUST(pcow_map_prepare(map, 64 * KIB, 4096, true, &error));
        break;
    case TRAP:
        assert_int_equal(pcow_map_trap(map, 64 * KIB, true), 0);
        break;
    case RESTORE:
        MUST(pcow_map_restore(map, 0, PCOW_SLAB_SIZE, &error));
        break;
    default:
        /* What is own and not mapped is mapped anew by it. */
        chain_claim(map->image->chain, 0);
        atomic_store(&interrupt, false);
        assert_int_equal(layout_own(map, 0, 0, 64, NULL), 0);
        chain_release(map->image->chain, 0);
        atomic_store(&interrupt, true);
        MUST(pcow_snapshot_delete(image, "s", NULL, &error));
    }
    if (atomic_exchange(&interrupt, false))
        fail_msg("nothing was interrupted in %d", (int)what);
}

static void test_in_the_midst(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (enum what what = 0; what < WHATS; what++) {
            pcow_image *image = must_create(scratch("top.pcow"), SIZE, 0, NULL);
            const uint64_t at = what == STORE ? 3 * MIB : 0;
            unsigned char bytes[256 * KIB] = {5};
            unsigned before;
            pcow_map *map;

            MUST(pcow_write(image, 0, bytes, sizeof bytes, &error));
            MUST(pcow_snapshot_create(image, "s", &error));
            map = must_map_by(image, engine, 0);
            before = atomic_load(&handled);
            stored_to = (volatile unsigned char *)pcow_map_address(map) + at + 100 * 4096;
            do_what(image, map, what);
            assert_int_equal(atomic_load(&handled), before + 1);
            assert_int_equal(*stored_to, 0x77);
            assert_int_equal(*((unsigned char *)pcow_map_address(map)), 5);
            stored_to = NULL;
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(scratch("top.pcow"));
            unlink(scratch("top.pcow"));
        }
}

struct waiter {
    unsigned char *memory;
    pthread_t thread;
    atomic_bool done;
};

static void *store_until_full(void *opaque)
{
    struct waiter *waiter = opaque;

    for (uint64_t at = 0; at < SIZE; at += 4096)
        waiter->memory[at] = 1;
    atomic_store(&waiter->done, true);
    return NULL;
}

/*
 * Who waits for space takes signals, and may store in the handler, to the same slab, where there is
 * a block.
 */
static void test_while_waiting(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct waiter waiter = {0};
        struct pcow_event event = {0};
        unsigned before = atomic_load(&handled);
        char path[600];
        pcow_image *image;
        pcow_map *map;

        snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
        image = must_create(path, SIZE, 0, NULL);
        map = must_map_by(image, engine, 0);
        waiter.memory = pcow_map_address(map);
        waiter.memory[1] = 1;
        stored_to = waiter.memory + 2;
        assert_int_equal(pthread_create(&waiter.thread, NULL, store_until_full, &waiter), 0);
        for (unsigned i = 0; i < 1000 && !pcow_map_next_event(map, &event); i++)
            usleep(10000);
        assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
        for (unsigned i = 0; i < 20; i++) {
            assert_int_equal(pthread_kill(waiter.thread, SIGUSR1), 0);
            usleep(1000);
        }
        for (unsigned i = 0; i < 1000 && atomic_load(&handled) == before; i++)
            usleep(10000);
        assert_true(atomic_load(&handled) > before);
        assert_false(atomic_load(&waiter.done));
        assert_int_equal(waiter.memory[2], 0x77);
        pool_resize("64m");
        pthread_join(waiter.thread, NULL);
        stored_to = NULL;
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(path);
        unlink(path);
        pool_resize("5m");
    }
}

/* ---- a thread that is cancelled -------------------------------------------------------------- */

static void *call_when_cancelled(void *map)
{
    pthread_cancel(pthread_self());
    pcow_map_resolve(map, PCOW_SLAB_SIZE + 300 * UINT64_C(4096), 4096, true, NULL);
    return NULL;
}

static void *store_when_cancelled(void *map)
{
    pthread_cancel(pthread_self());
    ((volatile unsigned char *)pcow_map_address(map))[2 * PCOW_SLAB_SIZE + 300 * UINT64_C(4096)] =
        1;
    pthread_testcancel();
    return NULL;
}

/* It ends after what it was at, and leaves nothing claimed. */
static void test_cancelled(void **state)
{
    static void *(*const calls[])(void *) = {call_when_cancelled, store_when_cancelled};

    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(scratch("top.pcow"), SIZE, 0, NULL);
        pcow_map *map = must_map_by(image, engine, 0);

        for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
            pthread_t thread;

            assert_int_equal(pthread_create(&thread, NULL, calls[i], map), 0);
            assert_int_equal(pthread_join(thread, NULL), 0);
        }
        for (unsigned slab = 0; slab < SLABS; slab++)
            MUST(pcow_map_resolve(map, slab * PCOW_SLAB_SIZE + 310 * UINT64_C(4096), 4096, true,
                                  &error));
        MUST(pcow_snapshot_create(image, "s", &error));
        pcow_map_destroy(map);
        pcow_close(image);
        unlink(scratch("top.pcow"));
    }
}

static int pool_setup(void **state)
{
    struct sigaction action = {.sa_handler = handle};

    sigemptyset(&action.sa_mask);
    alarm(HANG_SECONDS);
    return sigaction(SIGUSR1, &action, NULL) ? -1 : pool_mount(state, "5m");
}

static int pool_teardown(void **state)
{
    alarm(0);
    signal(SIGUSR1, SIG_DFL);
    return pool_unmount(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_in_the_midst, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancelled, setup, teardown),
        cmocka_unit_test_setup_teardown(test_while_waiting, pool_setup, pool_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
