/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the kernel could not write it tells one request of, whoever's it is: no flush must be
 * acknowledged that relies on what is lost, and no copy may hide what it was made of.
 */
#include "support.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "chain/chain.h"
#include "image/image.h"
#include "image/mirror.h"
#include "operations/operations.h"

#define SIZE (64 * MIB)
#define PLACE (4 * MIB)

/* It tells one request by this thread of an error. */
struct kernel {
    struct observer observer;              /* only for the class */
    pcow_image *image;
    pcow_map *map;
    _Atomic pthread_t told;
    _Atomic bool waits;                    /* between being told and saying so */
    _Atomic unsigned asked;                /* fdatasync() by others */
    _Atomic bool interrupts;               /* one of them, by a signal */
    /* the next msync() of the header ends when a flush beside it was told of its page */
    _Atomic bool is_beside;
    pthread_t beside;
    sem_t waiting, go_on;
    _Atomic uint64_t watched;              /* a page: how often it is written as a whole */
    _Atomic unsigned writes;
};

static struct kernel kernel;

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
int __real_msync(void *address, size_t length, int flags);
int __wrap_msync(void *address, size_t length, int flags);

static bool tells(void)
{
    if (!pthread_equal(kernel.told, pthread_self()))
        return false;
    kernel.told = 0;
    if (kernel.waits) {
        sem_post(&kernel.waiting);
        sem_wait(&kernel.go_on);
    }
    errno = EIO;
    return true;
}

int __wrap_fdatasync(int fd)
{
    if (tells())
        return -1;
    kernel.asked++;
    if (atomic_exchange(&kernel.interrupts, false))
        raise(SIGUSR1);
    return __real_fdatasync(fd);
}

static void *flush_and_be_told(void *opaque);

int __wrap_msync(void *address, size_t length, int flags)
{
    if (!memcmp(address, FORMAT2_MAGIC, 4) && atomic_exchange(&kernel.is_beside, false)) {
        kernel.waits = true;
        assert_int_equal(pthread_create(&kernel.beside, NULL, flush_and_be_told, &kernel), 0);
        sem_wait(&kernel.waiting);
        sem_post(&kernel.go_on);
        return 0;
    }
    return tells() ? -1 : __real_msync(address, length, flags);
}

static int look(struct observer *observer, const struct observation *seen)
{
    (void)observer;
    kernel.writes += kernel.watched && seen->what == OBSERVED_WRITE
                     && seen->offset == kernel.watched;
    return 0;
}

static void begin(const char *base)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    memset(&kernel, 0, sizeof kernel);
    sem_init(&kernel.waiting, 0, 0);
    sem_init(&kernel.go_on, 0, 0);
    kernel.observer = (struct observer){.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};
    unlink(scratch("vm.pcow"));
    pcow_close(must_create(scratch("vm.pcow"), SIZE, 0, base));
    MUST(image_open(scratch("vm.pcow"), PCOW_OPEN_WRITE, NULL, &kernel.observer, &kernel.image,
                    &error));
    MUST(pcow_map_create(kernel.image, &options, &kernel.map, &error));
}

static void end(void)
{
    pcow_map_destroy(kernel.map);
    pcow_close(kernel.image);
    sem_destroy(&kernel.waiting);
    sem_destroy(&kernel.go_on);
}

static void *flush(void *opaque)
{
    return pcow_map_flush(kernel.map, 0, SIZE, NULL) == 0 ? NULL : opaque;
}

static void *flush_and_be_told(void *opaque)
{
    kernel.told = pthread_self();
    return flush(opaque);
}

static void *store(void *opaque)
{
    return pcow_map_resolve(kernel.map, PLACE, 1, true, NULL) == 0 ? NULL : opaque;
}

static bool fails(pthread_t thread)
{
    void *failed;

    assert_int_equal(pthread_join(thread, &failed), 0);
    return failed != NULL;
}

/*
 * Somebody stores metadata, and is told of the guest's data, which the kernel has tried to write
 * before.
 */
static void test_told_of_by_a_store_of_metadata(void **state)
{
    (void)state;
    begin(NULL);
    ((uint8_t *)pcow_map_address(kernel.map))[PLACE] = 1;
    kernel.told = pthread_self();
    assert_int_equal(file_sync_range(&kernel.image->file, owner_offset(1), sizeof(uint64_t),
                                     failures_count(&kernel.image->file.persist.failures)),
                     -EIO);
    assert_int_equal(pcow_map_flush(kernel.map, 0, SIZE, NULL), -EIO);
    /* once; what is stored from now on is another matter */
    MUST(pcow_map_flush(kernel.map, 0, SIZE, &error));
    end();
}

/* Two flushes; the one that the kernel tells does not know yet when the other is through. */
static void test_told_of_by_a_flush_beside(void **state)
{
    pthread_t told, other;

    (void)state;
    begin(NULL);
    ((uint8_t *)pcow_map_address(kernel.map))[PLACE] = 1;
    kernel.waits = true;
    assert_int_equal(pthread_create(&told, NULL, flush_and_be_told, &kernel), 0);
    sem_wait(&kernel.waiting);
    kernel.asked = 0;
    assert_int_equal(pthread_create(&other, NULL, flush, &kernel), 0);
    while (!kernel.asked)
        usleep(1000);
    usleep(50000);                         /* so that an answer that is given too early would be */
    sem_post(&kernel.go_on);
    assert_true(fails(told));
    assert_true(fails(other));
    MUST(pcow_map_flush(kernel.map, 0, SIZE, &error));
    end();
}

/*
 * A word of the header was lost, and a flush beside is told: what was to be reverted to is not
 * reported as if it were there.
 */
static void test_told_of_a_word_of_metadata(void **state)
{
    uint8_t *memory;

    (void)state;
    begin(NULL);
    memory = pcow_map_address(kernel.map);
    memory[PLACE] = 1;
    MUST(pcow_snapshot_create(kernel.image, "s", &error));
    memory[PLACE] = 2;
    MUST(pcow_map_flush(kernel.map, 0, SIZE, &error));
    kernel.is_beside = true;
    assert_int_equal(pcow_snapshot_revert(kernel.image, "s", NULL), -EIO);
    assert_false(kernel.is_beside);
    assert_true(fails(kernel.beside));
    assert_int_equal(memory[PLACE], 2);
    MUST(pcow_snapshot_revert(kernel.image, "s", &error));
    assert_int_equal(memory[PLACE], 1);
    MUST(pcow_map_flush(kernel.map, 0, SIZE, &error));
    end();
    must_be_clean(scratch("vm.pcow"));
}

__attribute__((unused)) static void store_from_handler(int number)
{
    (void)number;
    ((volatile uint8_t *)pcow_map_address(kernel.map))[PLACE + 1] = 8;
}

static pcow_image *make_base(char path[PATH_MAX])
{
    static const uint8_t bytes[PCOW_PAGE_SIZE] = {7};
    pcow_image *base;

    snprintf(path, PATH_MAX, "%s", scratch("base.pcow"));
    unlink(path);
    base = must_create(path, SIZE, 0, NULL);
    MUST(pcow_write(base, PLACE, bytes, sizeof bytes, &error));
    MUST(pcow_seal(base, &error));
    return base;
}

/*
 * A handler stores, in a thread that is asking, and what its trap copies relies on the answers that
 * are out.
 */
__attribute__((unused)) static void test_store_by_a_handler_meanwhile(void **state)
{
    struct sigaction action = {.sa_handler = store_from_handler}, before;
    char base_path[PATH_MAX];

    (void)state;
    pcow_close(make_base(base_path));
    begin(base_path);
    assert_int_equal(sigaction(SIGUSR1, &action, &before), 0);
    ((uint8_t *)pcow_map_address(kernel.map))[2 * PLACE] = 1;
    kernel.interrupts = true;
    alarm(20);
    MUST(pcow_map_flush(kernel.map, 0, SIZE, &error));
    alarm(0);
    assert_false(kernel.interrupts);
    assert_int_equal(((uint8_t *)pcow_map_address(kernel.map))[PLACE + 1], 8);
    sigaction(SIGUSR1, &before, NULL);
    end();
}

/*
 * A copy of a page hides the page when it is on the medium. It may be what the flush beside is told
 * of.
 */
static void test_copy_that_may_be_lost(void **state)
{
    static const uint8_t bytes[PCOW_PAGE_SIZE] = {7};
    struct pcow_extent extent;
    pthread_t told, copier;
    char base_path[PATH_MAX];

    (void)state;
    pcow_close(make_base(base_path));
    begin(base_path);
    kernel.waits = true;
    assert_int_equal(pthread_create(&told, NULL, flush_and_be_told, &kernel), 0);
    sem_wait(&kernel.waiting);
    kernel.asked = 0;
    assert_int_equal(pthread_create(&copier, NULL, store, &kernel), 0);
    while (!kernel.asked)
        usleep(1000);
    usleep(50000);
    sem_post(&kernel.go_on);
    assert_true(fails(told));
    assert_true(fails(copier));
    MUST(pcow_get_extent(kernel.image, PLACE, PCOW_PAGE_SIZE, &extent, &error));
    assert_int_equal(extent.depth, 1);
    assert_memory_equal((uint8_t *)pcow_map_address(kernel.map) + PLACE, bytes, sizeof bytes);
    /* and the next one succeeds */
    assert_null(store(&kernel));
    assert_memory_equal((uint8_t *)pcow_map_address(kernel.map) + PLACE, bytes, sizeof bytes);
    end();
}

static struct {
    uint8_t *page;
    atomic_uint stores;
} metadata;

static void make_writable(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)context;
    if ((uint8_t *)info->si_addr < metadata.page
        || (uint8_t *)info->si_addr >= metadata.page + PCOW_PAGE_SIZE)
        abort();
    atomic_fetch_add(&metadata.stores, 1);
    mprotect(metadata.page, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE);
}

static unsigned stores_of(void (*flush_all)(pcow_image *image))
{
    atomic_store(&metadata.stores, 0);
    assert_int_equal(mprotect(metadata.page, PCOW_PAGE_SIZE, PROT_READ), 0);
    flush_all(kernel.image);
    mprotect(metadata.page, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE);
    return atomic_load(&metadata.stores);
}

static void flush_the_map(pcow_image *image)
{
    (void)image;
    MUST(pcow_map_flush(kernel.map, 0, SIZE, &error));
}

static void flush_the_image(pcow_image *image)
{
    MUST(pcow_flush(image, &error));
}

/*
 * The words that make pages valid are stored lazily. If they could not be written nobody will write
 * them who does not store them again.
 */
static void metadata_is_stored_again(void (*flush_all)(pcow_image *image))
{
    struct sigaction action = {.sa_sigaction = make_writable, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before;
    uint64_t slab;

    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    begin(NULL);
    ((uint8_t *)pcow_map_address(kernel.map))[PLACE] = 1;
    slab = slab_ref_slab(kernel.image->chain->head[PLACE >> SLAB_BITS]);
    metadata.page = file_address(&kernel.image->file, bitmap_offset(slab) & ~(PCOW_PAGE_SIZE - 1));
    assert_int_equal(stores_of(flush_all), 0);
    kernel.told = pthread_self();
    assert_int_equal(pcow_map_flush(kernel.map, 0, SIZE, NULL), -EIO);
    assert_true(stores_of(flush_all) > 0);
    /* and once they are there, not any more */
    assert_int_equal(stores_of(flush_all), 0);
    end();
    sigaction(SIGSEGV, &before, NULL);
}

static void test_metadata_that_could_not_be_written(void **state)
{
    (void)state;
    metadata_is_stored_again(flush_the_map);
    metadata_is_stored_again(flush_the_image);
}

/*
 * Where a checksum of metadata is valid, the page is on the medium: also one that the kernel could
 * not write before, and takes for written since.
 */
static void test_mirror_of_what_could_not_be_written(void **state)
{
    uint64_t slab;

    (void)state;
    for (unsigned failed = 0; failed < 2; failed++) {
        begin(NULL);
        ((uint8_t *)pcow_map_address(kernel.map))[PLACE] = 1;
        slab = slab_ref_slab(kernel.image->chain->head[PLACE >> SLAB_BITS]);
        if (failed) {
            kernel.told = pthread_self();
            assert_int_equal(pcow_map_flush(kernel.map, 0, SIZE, NULL), -EIO);
        }
        kernel.watched = bitmap_offset(slab) & ~(PCOW_PAGE_SIZE - 1);
        kernel.writes = 0;
        assert_int_equal(mirror_sync(&kernel.image->file, NULL), 0);
        assert_int_equal(kernel.writes, failed);
        kernel.watched = 0;
        end();
        must_be_clean(scratch("vm.pcow"));
    }
}

struct crowd {
    struct failures failures;
    _Atomic bool ends;
};

static void *ask_again_and_again(void *opaque)
{
    struct crowd *crowd = opaque;

    while (!crowd->ends) {
        struct request request = failures_begin(&crowd->failures);

        usleep(100);
        failures_end(&crowd->failures, &request, false);
    }
    return NULL;
}

/* Requests that keep coming do not keep those waiting that wait for one. */
static void test_waiting_in_a_crowd(void **state)
{
    struct crowd crowd = {0};
    struct request request;
    pthread_t threads[4];

    (void)state;
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask_again_and_again, &crowd), 0);
    for (unsigned i = 0; i < 1000; i++) {
        request = failures_begin(&crowd.failures);
        failures_end(&crowd.failures, &request, i % 2);
        assert_int_equal(failures_await(&crowd.failures), (i + 1) / 2);
    }
    crowd.ends = true;
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_told_of_by_a_store_of_metadata),
        cmocka_unit_test(test_told_of_by_a_flush_beside),
        cmocka_unit_test(test_told_of_a_word_of_metadata),
#ifndef __SANITIZE_THREAD__                /* runs handlers later, with SIGSEGV blocked */
        cmocka_unit_test(test_store_by_a_handler_meanwhile),
#endif
        cmocka_unit_test(test_copy_that_may_be_lost),
        cmocka_unit_test(test_metadata_that_could_not_be_written),
        cmocka_unit_test(test_mirror_of_what_could_not_be_written),
        cmocka_unit_test(test_waiting_in_a_crowd),
    };

    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
