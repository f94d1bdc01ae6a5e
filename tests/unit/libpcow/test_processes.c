/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a trap must not do: serve a child, execute what is data, or go on in a map that has been
 * taken away.
 */
#include "support.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "image/image.h"
#include "monitor/monitor.h"
#include "operations/operations.h"

#define SIZE (8 * MIB)
#define UNTOUCHED (5 * MIB)

static pcow_image *make_image(pcow_map **map)
{
    pcow_image *image;

    unlink(scratch("vm.pcow"));
    image = must_create(scratch("vm.pcow"), SIZE, 0, NULL);
    MUST(pcow_map_create(image, NULL, map, &error));
    *(volatile uint8_t *)pcow_map_address(*map) = 1;
    return image;
}

static void remove_image(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("vm.pcow"));
}

/*
 * AddressSanitizer leaves a child the locks of its allocator as another thread had them; TSan lets
 * it have no threads.
 */
static void needs_children_that_allocate(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();
#endif
}

/* How a child ends that does this. */
static int in_child(void (*work)(pcow_image *image, pcow_map *map), pcow_image *image,
                    pcow_map *map)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        alarm(20);
        work(image, map);
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void store_anew(pcow_image *image, pcow_map *map)
{
    (void)image;
    ((volatile uint8_t *)pcow_map_address(map))[UNTOUCHED] = 1;
}

static void close_all(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
}

static void change(pcow_image *image, pcow_map *map)
{
    if (pcow_snapshot_create(image, "s", NULL) != -EPERM
        || pcow_map_flush(map, 0, SIZE, NULL) != -EPERM)
        _exit(1);
    pcow_map_destroy(map);
    if (pcow_write(image, UNTOUCHED, "x", 1, NULL) != -EPERM)
        _exit(2);
}

/*
 * It may read, by what was opened before the fork; a map needs an image that it has opened itself.
 */
static void read_and_map(pcow_image *image, pcow_map *map)
{
    char byte = 0;

    (void)map;
    if (pcow_read(image, 0, &byte, 1, NULL) || byte != 1)
        _exit(1);
    if (pcow_map_create(image, NULL, &map, NULL) != -EPERM || pcow_flush(image, NULL))
        _exit(2);
}

static void write_as_server(pcow_image *image, pcow_map *map)
{
    (void)map;
    pcow_adopt(image);
    if (pcow_write(image, UNTOUCHED, "x", 1, NULL) || pcow_flush(image, NULL)
        || pcow_map_create(image, NULL, &map, NULL))
        _exit(1);
    close_all(image, map);
}

static void map_another(pcow_image *image, pcow_map *map)
{
    volatile uint8_t *memory;
    pcow_image *own = NULL;
    pcow_map *own_map;

    (void)image;
    (void)map;
    if (pcow_open(scratch("child.pcow"), PCOW_OPEN_WRITE, NULL, &own, NULL)
        || pcow_map_create(own, NULL, &own_map, NULL))
        _exit(1);
    memory = pcow_map_address(own_map);
    for (uint64_t offset = 0; offset < SIZE; offset += 4096)
        memory[offset] = 7;
    close_all(own, own_map);
}

static void test_store_by_a_child(void **state)
{
    struct sigaction action = {.sa_handler = SIG_DFL}, before;
    pcow_image *image;
    pcow_map *map;
    int status;

    (void)state;
    /* not cmocka's below ours */
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    image = make_image(&map);
    status = in_child(store_anew, image, map);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    store_anew(image, map);
    remove_image(image, map);
    sigaction(SIGSEGV, &before, NULL);
}

/* Slabs that have been in use and are free: what is in them is taken for remains. */
static pcow_image *make_with_free_slabs(void)
{
    static uint8_t bytes[SIZE / 2] = {8};
    pcow_image *image;

    unlink(scratch("vm.pcow"));
    image = must_create(scratch("vm.pcow"), SIZE, 0, NULL);
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST(pcow_write(image, 0, bytes, sizeof bytes, &error));
    MUST(pcow_snapshot_revert(image, "s", &error));
    MUST(pcow_snapshot_delete(image, "s", NULL, &error));
    pcow_close(image);
    return must_open(scratch("vm.pcow"), PCOW_OPEN_WRITE);
}

static void must_hold(uint8_t byte)
{
    static uint8_t bytes[SIZE];
    pcow_image *image = must_open(scratch("vm.pcow"), 0);

    MUST(pcow_read(image, 0, bytes, sizeof bytes, &error));
    for (uint64_t offset = 0; offset < SIZE; offset++)
        if (bytes[offset] != byte)
            fail_msg("byte %llu is %u, not %u", (unsigned long long)offset, bytes[offset], byte);
    pcow_close(image);
}

/* To a child, slabs look free that its parent has filled since. */
static void test_child_that_closes_what_it_inherited(void **state)
{
    static uint8_t nines[SIZE];

    (void)state;
    needs_children_that_allocate();
    memset(nines, 9, sizeof nines);
    for (unsigned mapped = 0; mapped < 2; mapped++) {
        pcow_image *image = make_with_free_slabs();
        pcow_map *map = NULL;
        int ready[2], status;
        char byte = 0;
        pid_t child;

        if (mapped)
            MUST(pcow_map_create(image, NULL, &map, &error));
        assert_int_equal(pipe(ready), 0);
        child = fork();
        if (child == 0) {
            alarm(20);
            if (read(ready[0], &byte, 1) != 1)
                _exit(1);
            close_all(image, map);
            _exit(0);
        }
        if (mapped)
            memcpy(pcow_map_address(map), nines, sizeof nines);
        else
            MUST(pcow_write(image, 0, nines, sizeof nines, &error));
        assert_int_equal(write(ready[1], &byte, 1), 1);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        close(ready[0]);
        close(ready[1]);
        remove_image(image, map);
        must_hold(9);
    }
}

static void test_child_that_changes_what_it_inherited(void **state)
{
    pcow_image *image;
    pcow_map *map;

    (void)state;
    needs_children_that_allocate();
    image = make_image(&map);
    assert_int_equal(in_child(change, image, map), 0);
    store_anew(image, map);
    remove_image(image, map);
}

static void test_child_with_a_map_of_its_own(void **state)
{
    pcow_image *image;
    pcow_map *map;

    (void)state;
    needs_children_that_allocate();
    image = make_image(&map);
    pcow_close(must_create(scratch("child.pcow"), SIZE, 0, NULL));
    assert_int_equal(in_child(map_another, image, map), 0);
    must_be_clean(scratch("child.pcow"));
    remove_image(image, map);
}

static void test_child_that_reads_what_it_inherited(void **state)
{
    pcow_image *image;
    pcow_map *map;

    (void)state;
    needs_children_that_allocate();
    image = make_image(&map);
    pcow_map_destroy(map);
    pcow_close(image);
    image = must_open(scratch("vm.pcow"), 0);
    assert_int_equal(in_child(read_and_map, image, NULL), 0);
    pcow_close(image);
}

/* A server that goes into the background. */
static void test_child_that_goes_on_in_place_of_its_parent(void **state)
{
    pcow_image *image;
    char byte;

    (void)state;
    needs_children_that_allocate();
    unlink(scratch("vm.pcow"));
    image = must_create(scratch("vm.pcow"), SIZE, 0, NULL);
    assert_int_equal(in_child(write_as_server, image, NULL), 0);
    /* the parent ends without closing it; here it cannot */
    image->complete = false;
    pcow_close(image);
    image = must_open(scratch("vm.pcow"), 0);
    MUST(pcow_read(image, UNTOUCHED, &byte, 1, &error));
    assert_int_equal(byte, 'x');
    pcow_close(image);
    must_be_clean(scratch("vm.pcow"));
}

/* Its mappings are counted from nothing, not less than nothing when they go. */
static void map_twice(pcow_image *image, pcow_map *map)
{
    struct pcow_map_stats stats;
    pcow_image *own = NULL;
    pcow_map *own_map;

    (void)image;
    (void)map;
    for (unsigned i = 0; i < 2; i++) {
        if (pcow_open(scratch("child.pcow"), PCOW_OPEN_WRITE, NULL, &own, NULL)
            || pcow_map_create(own, NULL, &own_map, NULL))
            _exit(1);
        ((volatile uint8_t *)pcow_map_address(own_map))[UNTOUCHED + i * 64 * KIB] = 7;
        pcow_map_get_stats(own_map, &stats);
        if (vmas_used(own_map) != stats.vmas || stats.vmas > 100)
            _exit(2);
        close_all(own, own_map);
    }
}

static void test_child_counts_its_own_mappings(void **state)
{
    pcow_image *image, *fragmented;
    pcow_map *map;

    (void)state;
    needs_children_that_allocate();
    fragmented = must_create(scratch("child.pcow"), SIZE, 0, NULL);
    for (uint64_t offset = 0; offset < MIB; offset += 128 * KIB)
        MUST(pcow_write(fragmented, offset, "x", 1, &error));
    MUST(pcow_snapshot_create(fragmented, "s", &error));
    for (uint64_t offset = 4096; offset < MIB; offset += 128 * KIB)
        MUST(pcow_write(fragmented, offset, "y", 1, &error));
    pcow_close(fragmented);
    image = make_image(&map);
    assert_int_equal(in_child(map_twice, image, map), 0);
    remove_image(image, map);
    unlink(scratch("child.pcow"));
}

/* Of a process that has a handler for SIGBUS, and no map yet. */
static void test_signals_before_the_first_map(void **state)
{
    siginfo_t info = {.si_signo = SIGBUS, .si_code = BUS_ADRERR};
    ucontext_t context = {0};
    static const uint8_t code[4];

    (void)state;
    context.uc_mcontext.gregs[REG_RIP] = (greg_t)(uintptr_t)(code + 2);
    assert_false(pcow_serve_sigbus(&info, &context));
}

static sigjmp_buf back;

static void come_back(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)info;
    (void)context;
    siglongjmp(back, 1);
}

/* No mapping of a trap would let it happen: the handler that was there before gets it. */
static void test_jump_into_the_range(void **state)
{
    struct sigaction action = {.sa_sigaction = come_back, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before;
    void (*volatile function)(void);
    pcow_image *image;
    pcow_map *map;
    void *address;

    (void)state;
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    image = make_image(&map);
    address = pcow_map_address(map);
    memcpy((void *)&function, &address, sizeof address);
    alarm(20);
    if (sigsetjmp(back, 1) == 0) {
        function();
        fail();
    }
    alarm(0);
    remove_image(image, map);
    sigaction(SIGSEGV, &before, NULL);
}

static int full(struct observer *observer, const struct observation *seen)
{
    (void)observer;
    return seen->what == OBSERVED_ALLOCATE ? -ENOSPC : 0;
}

static atomic_bool gave_up;

static void give_up(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)info;
    (void)context;
    atomic_store(&gave_up, true);
    pthread_exit(NULL);
}

static void *store_for_ever(void *memory)
{
    *(volatile uint8_t *)memory = 1;
    return NULL;
}

/*
 * Whoever waits for space in a trap is told that there will be none, and does not look at the map
 * again. AddressSanitizer knows if he does.
 */
static void test_map_that_goes_while_somebody_waits_in_it(void **state)
{
    struct sigaction action = {.sa_sigaction = give_up, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before;
    struct observer observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = full};
    struct pcow_event event = {0};
    pcow_image *image;
    pthread_t thread;
    pcow_map *map;

    (void)state;
    assert_int_equal(sigaction(SIGBUS, &action, &before), 0);
    for (unsigned i = 0; i < 20; i++) {
        unlink(scratch("vm.pcow"));
        pcow_close(must_create(scratch("vm.pcow"), SIZE, 0, NULL));
        MUST(image_open(scratch("vm.pcow"), PCOW_OPEN_WRITE, NULL, &observer, &image, &error));
        MUST(pcow_map_create(image, NULL, &map, &error));
        atomic_store(&gave_up, false);
        assert_int_equal(pthread_create(&thread, NULL, store_for_ever, pcow_map_address(map)), 0);
        while (!pcow_map_next_event(map, &event))
            usleep(1000);
        assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
        usleep(i * 1000);
        pcow_map_destroy(map);
        pcow_close(image);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_true(atomic_load(&gave_up));
    }
    sigaction(SIGBUS, &before, NULL);
}

static struct {
    struct observer observer;
    pthread_t waiter;
    atomic_bool copies, goes_on;
    bool copied;                       /* by the waiter */
} late;

/*
 * What the waiter allocates by itself fails; into what was prepared it can copy, and stands still
 * between the copy and the word that makes it valid.
 */
static int hold_up(struct observer *observer, const struct observation *seen)
{
    (void)observer;
    if (!pthread_equal(late.waiter, pthread_self()))
        return 0;
    /* Both: without the second it came by itself, where others had grown the file meanwhile. */
    if (seen->what == OBSERVED_ALLOCATE
        || (seen->what == OBSERVED_WRITE && seen->length == PCOW_PAGE_SIZE))
        return -ENOSPC;
    if (seen->what == OBSERVED_COPY && seen->length == PCOW_PAGE_SIZE) {
        late.copied = true;
    } else if (seen->what == OBSERVED_STORE && late.copied) {
        atomic_store(&late.copies, true);
        while (!atomic_load(&late.goes_on))
            usleep(100);
    }
    return 0;
}

static void *store_late(void *memory)
{
    late.waiter = pthread_self();
    *(volatile uint8_t *)memory = 1;
    return NULL;
}

static void *let_go_on(void *unused)
{
    usleep(200000);
    atomic_store(&late.goes_on, true);
    return unused;
}

/*
 * Who waits finds space, and copies, just when the map is to go: that is waited for, and what it
 * copies to is not given back under its hands.
 */
static void test_map_that_goes_while_somebody_copies(void **state)
{
    struct sigaction action = {.sa_sigaction = give_up, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before;
    struct pcow_event event = {0};
    uint8_t *bytes = malloc(PCOW_SLAB_SIZE);
    pcow_image *image;
    pthread_t other;
    pcow_map *map;

    (void)state;
    /* Its store may come when nothing is mapped there any more. */
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    unlink(scratch("vm.pcow"));
    assert_non_null(bytes);
    image = must_create(scratch("base.pcow"), 64 * MIB, 0, NULL);
    memset(bytes, 0x5a, PCOW_SLAB_SIZE);
    MUST(pcow_write(image, 0, bytes, PCOW_SLAB_SIZE, &error));
    MUST(pcow_seal(image, &error));
    pcow_close(image);
    pcow_close(must_create(scratch("vm.pcow"), 0, 0, scratch("base.pcow")));
    memset(&late, 0, sizeof late);
    late.observer = (struct observer){.persistence = PCOW_PERSISTENCE_VOLATILE, .look = hold_up};
    MUST(image_open(scratch("vm.pcow"), PCOW_OPEN_WRITE, NULL, &late.observer, &image, &error));
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    assert_int_equal(pthread_create(&late.waiter, NULL, store_late, pcow_map_address(map)), 0);
    while (!pcow_map_next_event(map, &event))
        usleep(1000);
    assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
    /* Another store, for which the thread that works ahead prepares slabs. */
    ((volatile uint8_t *)pcow_map_address(map))[32 * MIB] = 1;
    while (!atomic_load(&late.copies))
        usleep(1000);
    assert_int_equal(pthread_create(&other, NULL, let_go_on, NULL), 0);
    pcow_map_destroy(map);
    assert_true(atomic_load(&late.goes_on));
    pthread_join(other, NULL);
    pthread_join(late.waiter, NULL);
    sigaction(SIGSEGV, &before, NULL);
    pcow_close(image);
    image = must_open(scratch("vm.pcow"), 0);
    MUST(pcow_read(image, 0, bytes, PCOW_PAGE_SIZE, &error));
    for (unsigned i = 1; i < PCOW_PAGE_SIZE; i++)
        assert_int_equal(bytes[i], 0x5a);
    pcow_close(image);
    must_be_clean(scratch("vm.pcow"));
    unlink(scratch("vm.pcow"));
    unlink(scratch("base.pcow"));
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_signals_before_the_first_map),
        cmocka_unit_test(test_store_by_a_child),
        cmocka_unit_test(test_child_that_reads_what_it_inherited),
        cmocka_unit_test(test_child_that_goes_on_in_place_of_its_parent),
        cmocka_unit_test(test_child_counts_its_own_mappings),
        cmocka_unit_test(test_child_that_closes_what_it_inherited),
        cmocka_unit_test(test_child_that_changes_what_it_inherited),
        cmocka_unit_test(test_child_with_a_map_of_its_own),
        cmocka_unit_test(test_jump_into_the_range),
        cmocka_unit_test(test_map_that_goes_while_somebody_waits_in_it),
        cmocka_unit_test(test_map_that_goes_while_somebody_copies),
    };

    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
