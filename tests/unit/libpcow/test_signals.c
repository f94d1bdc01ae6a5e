/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Signals of others among ours: handlers that were there before, that come later, and storms from
 * outside.
 */
#include "support.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE (64 * MIB)

static atomic_uint earlier_calls, earlier_faults, later_calls;
static struct sigaction below_later;
/* a page that somebody else protects, and his handler makes accessible */
static uint8_t *guarded;

static void earlier_handler(int number, siginfo_t *info, void *context)
{
    (void)context;
    atomic_fetch_add(&earlier_calls, 1);
    if (number == SIGSEGV && info->si_code > 0) {
        atomic_fetch_add(&earlier_faults, 1);
        if ((uint8_t *)info->si_addr < guarded || (uint8_t *)info->si_addr >= guarded + 4096)
            abort();
        mprotect(guarded, 4096, PROT_READ | PROT_WRITE);
    }
}

/* Put on top by code that knows nothing of libpcow but does as one should. */
static void later_handler(int number, siginfo_t *info, void *context)
{
    atomic_fetch_add(&later_calls, 1);
    below_later.sa_sigaction(number, info, context);
}

static void install(int number, void (*handler)(int, siginfo_t *, void *),
                    struct sigaction *previous)
{
    struct sigaction action = {.sa_sigaction = handler,
                               .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};

    sigemptyset(&action.sa_mask);
    assert_int_equal(sigaction(number, &action, previous), 0);
}

static void map_overlay(pcow_image **image, pcow_map **map)
{
    uint8_t *fill = malloc(SIZE);
    pcow_image *base;

    unlink(scratch("base.pcow"));
    unlink(scratch("vm.pcow"));
    base = must_create(scratch("base.pcow"), SIZE, 0, NULL);
    assert_non_null(fill);
    memset(fill, 0x5a, SIZE);
    MUST(pcow_write(base, 0, fill, SIZE / 2, &error));
    free(fill);
    pcow_close(base);
    *image = must_create(scratch("vm.pcow"), 0, 0, scratch("base.pcow"));
    MUST(pcow_map_create(*image, &(struct pcow_map_options){.engine = PCOW_ENGINE_SIGNAL}, map,
                         &error));
}

static atomic_bool storm_over;
static atomic_uint progress;

/*
 * The next signals when the victim has gone on: faster than that, the handlers would nest until the
 * stack ends.
 */
static void *storm(void *opaque)
{
    pthread_t victim = *(pthread_t *)opaque;

    while (!atomic_load(&storm_over)) {
        unsigned before = atomic_load(&progress);

        pthread_kill(victim, SIGSEGV);
        pthread_kill(victim, SIGUSR1);
        pthread_kill(victim, SIGBUS);
        while (atomic_load(&progress) == before && !atomic_load(&storm_over))
            sched_yield();
    }
    return NULL;
}

static void store_and_compare(uint8_t *memory)
{
    for (uint64_t at = 0; at < SIZE; at += 68 * KIB) {
        uint8_t expected = at < SIZE / 2 ? 0x5a : 0;

        atomic_fetch_add(&progress, 1);
        assert_int_equal(memory[at + 1], expected);
        memory[at] = (uint8_t)(at >> 12);
        assert_int_equal(memory[at], (uint8_t)(at >> 12));
        assert_int_equal(memory[at + 1], expected);
    }
}

static void test_storm_between_two_handlers(void **state)
{
    pthread_t self = pthread_self(), thread;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    install(SIGSEGV, earlier_handler, NULL);
    install(SIGBUS, earlier_handler, NULL);
    install(SIGUSR1, earlier_handler, NULL);
    guarded = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(guarded, MAP_FAILED);
    map_overlay(&image, &map);
    install(SIGSEGV, later_handler, &below_later);

    atomic_store(&storm_over, false);
    assert_int_equal(pthread_create(&thread, NULL, storm, &self), 0);
    store_and_compare(pcow_map_address(map));
    atomic_store(&storm_over, true);
    pthread_join(thread, NULL);
    /* all of the storm went to whom it was for, and none of our traps did */
    assert_true(atomic_load(&earlier_calls) > 0);
    assert_int_equal(atomic_load(&earlier_faults), 0);
    assert_true(atomic_load(&later_calls) > 0);

    /* a fault that is not ours */
    guarded[7] = 1;
    assert_int_equal(atomic_load(&earlier_faults), 1);
    assert_int_equal(guarded[7], 1);

    /* our handler has one on top of it: it stays, and works for the next map */
    pcow_map_destroy(map);
    pcow_close(image);
    map_overlay(&image, &map);
    store_and_compare(pcow_map_address(map));
    pcow_map_destroy(map);
    pcow_close(image);
    install(SIGSEGV, below_later.sa_sigaction, NULL);
    munmap(guarded, 4096);
}

/* Runs in a child. */
static void end_by_signal(int number)
{
    pcow_image *image;
    pcow_map *map;

    signal(number, SIG_DFL);
    map_overlay(&image, &map);
    ((volatile uint8_t *)pcow_map_address(map))[5] = 1;
    kill(getpid(), number);
    _exit(3);
}

static void test_a_signal_from_outside_ends_what_it_ended_before(void **state)
{
    int status;
    pid_t child;

    (void)state;
    child = fork();
    if (child == 0)
        end_by_signal(SIGSEGV);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSEGV);
}

/* Runs in a child. */
static void ignore_signal(void)
{
    volatile uint8_t *memory;
    pcow_image *image;
    pcow_map *map;

    signal(SIGSEGV, SIG_IGN);
    map_overlay(&image, &map);
    memory = pcow_map_address(map);
    memory[5] = 1;
    kill(getpid(), SIGSEGV);
    memory[3 * MIB] = 1;
    _exit(memory[5] == 1 && memory[3 * MIB] == 1 ? 0 : 4);
}

static void test_one_that_was_ignored_is_ignored(void **state)
{
    int status;
    pid_t child;

    (void)state;
    child = fork();
    if (child == 0)
        ignore_signal();
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#define ELSEWHERE (1 * MIB)               /* of the same slab: a trap of its own */

/* The request is there when it stores; the first call that looks for one ends the thread. */
static void *store_and_be_cancelled(void *opaque)
{
    volatile uint8_t *memory = opaque;

    pthread_cancel(pthread_self());
    memory[0] = 1;
    memory[ELSEWHERE] = 1;
    pthread_testcancel();
    return NULL;
}

/*
 * A thread that ends in the middle of a trap would leave the slab claimed, and everybody else
 * waiting for it.
 */
static void test_a_cancelled_thread_ends_after_its_trap(void **state)
{
    uint8_t *memory;
    pthread_t thread;
    pcow_image *image;
    pcow_map *map;
    void *result;

    (void)state;
    map_overlay(&image, &map);
    memory = pcow_map_address(map);
    assert_int_equal(pthread_create(&thread, NULL, store_and_be_cancelled, memory), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, PTHREAD_CANCELED);
    assert_int_equal(memory[0], 1);
    assert_int_equal(memory[ELSEWHERE], 1);
    alarm(10);
    memory[4096] = 2;
    alarm(0);
    assert_int_equal(memory[4096], 2);
    assert_int_equal(memory[4097], 0x5a);
    pcow_map_destroy(map);
    pcow_close(image);
}

static atomic_bool all_stored;

/* One trap after the other: no page is the next of the one before. */
static void *store_everywhere(void *opaque)
{
    uint8_t *memory = opaque;

    for (uint64_t i = 0; i < SIZE / 4096; i++)
        memory[i * 641 % (SIZE / 4096) * 4096] = 1;
    atomic_store(&all_stored, true);
    return NULL;
}

/*
 * Its handler looks at each map on the list. ThreadSanitizer knows if it looks at one that is being
 * freed.
 */
static void test_maps_come_and_go_while_another_one_traps(void **state)
{
    unsigned rounds = 0;
    pcow_image *image, *other;
    pcow_map *map, *first;
    pthread_t thread;

    (void)state;
    unlink(scratch("other.pcow"));
    other = must_create(scratch("other.pcow"), 4 * MIB, 0, NULL);
    MUST(pcow_map_create(other, NULL, &first, &error));
    map_overlay(&image, &map);
    atomic_store(&all_stored, false);
    assert_int_equal(pthread_create(&thread, NULL, store_everywhere, pcow_map_address(map)), 0);
    do {
        pcow_map_destroy(first);       /* its place on the list is before the other one's */
        MUST(pcow_map_create(other, NULL, &first, &error));
        *(volatile uint8_t *)pcow_map_address(first) = 1;
        rounds++;
    } while (!atomic_load(&all_stored));
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(rounds > 1);
    pcow_map_destroy(first);
    pcow_close(other);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_signal_from_outside_ends_what_it_ended_before),
        cmocka_unit_test(test_one_that_was_ignored_is_ignored),
        cmocka_unit_test(test_a_cancelled_thread_ends_after_its_trap),
        cmocka_unit_test(test_maps_come_and_go_while_another_one_traps),
        cmocka_unit_test(test_storm_between_two_handlers),
    };

    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
