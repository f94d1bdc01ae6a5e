/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The queue of events: while there is room, each event that is posted arrives, whoever else posts
 * and however the threads are scheduled.
 */
#include "support.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define THREADS 4
#define EACH    20000

static struct event_queue queue;
static atomic_uint arrived[THREADS];
static atomic_bool given_up;

/* Has one event in the queue at any time, so that it is never full. */
static void *post(void *number)
{
    uintptr_t me = (uintptr_t)number;

    for (unsigned i = 1; i <= EACH; i++) {
        events_post(&queue, PCOW_EVENT_ERROR, -(int)i, me);
        while (atomic_load(&arrived[me]) != i) {
            if (atomic_load(&given_up))
                return NULL;
            sched_yield();
        }
    }
    return NULL;
}

static void test_none_lost(void **state)
{
    pthread_t threads[THREADS];
    struct pcow_event event;
    uint64_t idle = 0;

    (void)state;
    assert_int_equal(events_init(&queue), 0);
    for (uintptr_t t = 0; t < THREADS; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, post, (void *)t), 0);
    for (unsigned got = 0; got < THREADS * EACH && idle < 50000000;) {
        if (!events_next(&queue, &event)) {
            idle++;
            continue;
        }
        idle = 0;
        got++;
        assert_true(event.offset < THREADS);
        assert_int_equal(event.error, -(int)atomic_fetch_add(&arrived[event.offset], 1) - 1);
    }
    atomic_store(&given_up, true);
    for (unsigned t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
        assert_int_equal(atomic_load(&arrived[t]), EACH);
    }
    events_destroy(&queue);
}

/* More than it holds: those that come too late are dropped, the others arrive in their order. */
static void test_full(void **state)
{
    struct pcow_event event;
    int expected = 0;

    (void)state;
    assert_int_equal(events_init(&queue), 0);
    for (int i = 0; i < 2 * (int)EVENT_QUEUE_SIZE; i++)
        events_post(&queue, PCOW_EVENT_ERROR, -i, 0);
    while (events_next(&queue, &event))
        assert_int_equal(event.error, -expected++);
    assert_int_equal(expected, EVENT_QUEUE_SIZE);
    events_destroy(&queue);
}

static void *store(void *memory)
{
    *(volatile unsigned char *)memory = 2;
    return NULL;
}

/* The thread of the watch cannot read any more: that is told, and when it can again it serves. */
static void test_watch_that_cannot_read(void **state)
{
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_KVM, 0);
    volatile unsigned char *memory = pcow_map_address(map);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC), saved;
    struct uffdio_range last = {(uintptr_t)memory + 8 * MIB, 2 * MIB};
    struct pcow_event event = {0};
    pthread_t thread;

    (void)state;
    memory[0] = 1;
    MUST(pcow_map_watch(map, &error));
    saved = dup(map->uffd);
    assert_true(null >= 0 && saved >= 0);
    /*
     * It sits in read() with the old file, until something is to be served; the next one finds the
     * other.
     */
    assert_true(dup2(null, map->uffd) >= 0);
    assert_int_equal(pthread_create(&thread, NULL, store, (void *)(memory + 8 * MIB)), 0);
    for (unsigned i = 0; i < 1000 && !pcow_map_next_event(map, &event); i++)
        usleep(10000);
    assert_int_equal(event.kind, PCOW_EVENT_ERROR);
    assert_int_equal(event.error, -EIO);
    assert_true(dup2(saved, map->uffd) >= 0);
    /* Who was served last could not be woken through the wrong file. */
    assert_int_equal(ioctl(saved, UFFDIO_WAKE, &last), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    MUST(pcow_map_watch(map, &error));
    assert_int_equal(kernel_store((unsigned char *)memory + 16 * MIB, 3), 1);
    assert_int_equal(memory[0] + memory[8 * MIB] + memory[16 * MIB], 6);
    close(saved);
    close(null);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_none_lost),
        cmocka_unit_test(test_full),
        cmocka_unit_test_setup_teardown(test_watch_that_cannot_read, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
