/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a flush of the guest's range flushes, seen by an observer: the pages that were stored to,
 * and not the world.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "chain/chain.h"
#include "image/image.h"
#include "monitor/monitor.h"
#include "operations/operations.h"

#define SIZE (64 * MIB)

struct counter {
    struct observer observer;
    pcow_map *map;
    /* whose work is counted: the one that prepares slabs syncs the file too */
    _Atomic pthread_t thread;
    _Atomic unsigned syncs, msyncs, flushes;
    _Atomic uint64_t guest_bytes;          /* flushed or msynced through the guest's range */
    _Atomic uint64_t last_offset;          /* of that */
    _Atomic pthread_t flusher;
    /* a sync of that thread is under way until it may go on */
    _Atomic bool parks;
    _Atomic int parked_error;              /* and then fails so */
    sem_t parked, go_on;
    _Atomic bool full;                     /* the pool has one page left, again and again */
};

static int count(struct observer *observer, const struct observation *seen)
{
    struct counter *counter = (struct counter *)observer;
    const uint8_t *start = counter->map ? pcow_map_address(counter->map) : NULL;

    if (counter->full && seen->what == OBSERVED_ALLOCATE && seen->length > PCOW_PAGE_SIZE)
        return -ENOSPC;
    if (counter->parks && seen->what == OBSERVED_SYNC
        && pthread_equal(counter->flusher, pthread_self())) {
        sem_post(&counter->parked);
        sem_wait(&counter->go_on);
        return counter->parked_error;
    }
    if (!pthread_equal(counter->thread, pthread_self()))
        return 0;
    counter->syncs += seen->what == OBSERVED_SYNC;
    counter->msyncs += seen->what == OBSERVED_MSYNC;
    counter->flushes += seen->what == OBSERVED_FLUSH;
    if ((seen->what == OBSERVED_MSYNC || seen->what == OBSERVED_FLUSH) && start
        && (const uint8_t *)seen->address >= start
        && (const uint8_t *)seen->address < start + SIZE) {
        counter->guest_bytes += seen->length;
        counter->last_offset = (uint64_t)((const uint8_t *)seen->address - start);
    }
    return 0;
}

static void reset(struct counter *counter)
{
    counter->syncs = counter->msyncs = counter->flushes = 0;
    counter->guest_bytes = counter->last_offset = 0;
}

static void begin_again(struct counter *counter, pcow_image **image)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    MUST(image_open(scratch("vm.pcow"), PCOW_OPEN_WRITE, NULL, &counter->observer, image, &error));
    MUST(pcow_map_create(*image, &options, &counter->map, &error));
}

static void begin(struct counter *counter, enum pcow_persistence persistence, pcow_image **image)
{
    memset(counter, 0, sizeof *counter);
    counter->thread = pthread_self();
    counter->observer = (struct observer){.persistence = persistence, .look = count};
    unlink(scratch("vm.pcow"));
    pcow_close(must_create(scratch("vm.pcow"), SIZE, 0, NULL));
    begin_again(counter, image);
}

static void end(struct counter *counter, pcow_image *image)
{
    pcow_map_destroy(counter->map);
    counter->map = NULL;
    pcow_close(image);
}

/* Bytes of the image; a store may bring in more than it touches. */
static uint64_t data_size(const pcow_image *image)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    return info.data_size;
}

static void test_page_cache(void **state)
{
    struct counter counter;
    pcow_image *image;
    uint64_t stored;
    uint8_t *memory;

    (void)state;
    begin(&counter, PCOW_PERSISTENCE_PAGE_CACHE, &image);
    memory = pcow_map_address(counter.map);
    memset(memory + 4 * MIB, 1, 64 * KIB);
    stored = data_size(image);
    memset(memory + 30 * MIB, 1, 64 * KIB);

    /* one piece: its pages, then where its owner and its valid set are */
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 4 * MIB, 2 * MIB, &error));
    assert_int_equal(counter.syncs, 0);
    assert_int_equal(counter.guest_bytes, stored);
    assert_int_equal(counter.last_offset, 4 * MIB);
    assert_int_equal(counter.msyncs, 3);

    /* half of it */
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 4 * MIB + 32 * KIB, 4 * KIB, &error));
    assert_int_equal(counter.guest_bytes, 4 * KIB);
    assert_int_equal(counter.last_offset, 4 * MIB + 32 * KIB);

    /* what nobody stored to */
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 8 * MIB, 2 * MIB, &error));
    assert_int_equal(counter.syncs + counter.msyncs, 0);

    /* everything: one fdatasync is cheaper than a commit of the journal for each piece */
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 0, SIZE, &error));
    assert_int_equal(counter.syncs, 1);
    assert_int_equal(counter.guest_bytes, 0);

    MUST_FAIL(-EINVAL, pcow_map_flush(counter.map, SIZE, 1, &error));
    MUST(pcow_map_flush(counter.map, SIZE, 0, &error));
    end(&counter, image);
}

static void test_pmem(void **state)
{
    struct counter counter;
    struct pcow_map_stats stats;
    pcow_image *image;
    uint8_t *memory;

    (void)state;
    begin(&counter, PCOW_PERSISTENCE_PMEM, &image);
    memory = pcow_map_address(counter.map);
    memset(memory + 4 * MIB, 1, 64 * KIB);
    memset(memory + 30 * MIB, 1, 128 * KIB);

    /* the guest's whole range, and yet only what can be dirty */
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 0, SIZE, &error));
    assert_int_equal(counter.syncs, 0);
    assert_int_equal(counter.guest_bytes, data_size(image));
    assert_true(counter.guest_bytes < MIB);

    /* more than is worth a flush instruction for each line */
    memset(memory + 40 * MIB, 1, 12 * MIB);
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 0, SIZE, &error));
    assert_int_equal(counter.syncs, 1);
    assert_int_equal(counter.guest_bytes, 0);

    /* what a snapshot froze is not mapped for stores any more, but may be in the caches */
    memory[4 * MIB] = 2;
    MUST(pcow_snapshot_create(image, "s", &error));
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 4 * MIB, 4096, &error));
    assert_int_equal(counter.syncs, 1);
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 4 * MIB, 4096, &error));
    assert_int_equal(counter.syncs, 0);
    pcow_map_get_stats(counter.map, &stats);
    assert_int_equal(stats.flushes, 4);
    end(&counter, image);
}

static void test_volatile(void **state)
{
    struct counter counter;
    pcow_image *image;

    (void)state;
    begin(&counter, PCOW_PERSISTENCE_VOLATILE, &image);
    memset(pcow_map_address(counter.map), 1, 4 * MIB);
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 0, SIZE, &error));
    assert_int_equal(counter.syncs + counter.msyncs + counter.flushes, 0);
    assert_int_equal(pcow_persistence_survives(PCOW_PERSISTENCE_VOLATILE, true),
                     PCOW_SURVIVES_PROCESS);
    assert_int_equal(pcow_persistence_survives(PCOW_PERSISTENCE_PAGE_CACHE, false),
                     PCOW_SURVIVES_PROCESS);
    assert_int_equal(pcow_persistence_survives(PCOW_PERSISTENCE_PAGE_CACHE, true),
                     PCOW_SURVIVES_PROCESS | PCOW_SURVIVES_HOST | PCOW_SURVIVES_POWER);
    end(&counter, image);
}

/* Memory of somebody else over a page of each kind, then the image again. */
static void test_restore(void **state)
{
    struct counter counter;
    pcow_image *image;
    uint8_t *memory;

    (void)state;
    begin(&counter, PCOW_PERSISTENCE_VOLATILE, &image);
    memory = pcow_map_address(counter.map);
    memory[5 * MIB] = 0x11;
    MUST(pcow_snapshot_create(image, "s", &error));
    memory[7 * MIB] = 0x22;
    for (unsigned at = 5; at <= 9; at += 2) {
        assert_ptr_equal(memory + at * MIB, mmap(memory + at * MIB, 4096, PROT_READ | PROT_WRITE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
        memory[at * MIB] = 0x99;
        MUST(pcow_map_restore(counter.map, at * MIB, 4096, &error));
    }
    assert_int_equal(memory[5 * MIB], 0x11);
    assert_int_equal(memory[7 * MIB], 0x22);
    assert_int_equal(memory[9 * MIB], 0);
    for (unsigned at = 5; at <= 9; at += 2)
        memory[at * MIB] = 0x33;
    MUST_FAIL(-EINVAL, pcow_map_restore(counter.map, SIZE, 4096, &error));
    end(&counter, image);
    image = must_open(scratch("vm.pcow"), 0);
    for (unsigned at = 5; at <= 9; at += 2)
        assert_reads(image, at * MIB, "\x33", 1);
    pcow_close(image);
}

struct settler {
    struct observer observer;
    struct file *file;
    unsigned syncs;
};

/*
 * Just before the call to the kernel somebody else wants what was done so far to be on the medium.
 */
static int settle_meanwhile(struct observer *observer, const struct observation *seen)
{
    struct settler *settler = (struct settler *)observer;

    if (seen->what == OBSERVED_SYNC && ++settler->syncs == 1)
        return file_settle(settler->file);
    return 0;
}

static void *flush_one_page(void *opaque)
{
    struct counter *counter = opaque;

    counter->thread = pthread_self();
    return pcow_map_flush(counter->map, 4 * MIB, PCOW_PAGE_SIZE, NULL) ? opaque : NULL;
}

/*
 * Another thread stores to a page that a trap has mapped, and flushes it, before the trap has noted
 * that it did.
 */
static void test_page_that_is_being_mapped(void **state)
{
    struct counter counter;
    struct page_set *writable;
    pcow_image *image;
    pthread_t thread;
    void *failed;

    (void)state;
    begin(&counter, PCOW_PERSISTENCE_PMEM, &image);
    writable = &counter.map->slabs[4 * MIB >> SLAB_BITS].writable;
    ((uint8_t *)pcow_map_address(counter.map))[4 * MIB] = 1;
    assert_true(page_set_has(writable, 0));
    chain_claim(image->chain, 4 * MIB >> SLAB_BITS);
    __atomic_fetch_and(&writable->word[0], ~UINT64_C(1), __ATOMIC_RELEASE);
    reset(&counter);
    assert_int_equal(pthread_create(&thread, NULL, flush_one_page, &counter), 0);
    usleep(50000);
    __atomic_fetch_or(&writable->word[0], UINT64_C(1), __ATOMIC_RELEASE);
    chain_release(image->chain, 4 * MIB >> SLAB_BITS);
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_int_equal(counter.guest_bytes, PCOW_PAGE_SIZE);
    end(&counter, image);
}

static void *flush_and_be_parked(void *opaque)
{
    struct counter *counter = opaque;

    counter->flusher = pthread_self();
    counter->parks = true;
    return pcow_map_flush(counter->map, 4 * MIB, PCOW_PAGE_SIZE, NULL) ? opaque : NULL;
}

/*
 * What a snapshot froze is not durable before the sync of whoever flushes it first is over, and
 * never if that fails.
 */
static void test_a_flush_does_not_rely_on_one_under_way(void **state)
{
    static const int errors[] = {0, -EIO};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        struct counter counter;
        pcow_image *image;
        pthread_t thread;
        void *failed;

        begin(&counter, PCOW_PERSISTENCE_PMEM, &image);
        sem_init(&counter.parked, 0, 0);
        sem_init(&counter.go_on, 0, 0);
        counter.parked_error = errors[i];
        ((uint8_t *)pcow_map_address(counter.map))[4 * MIB] = 1;
        MUST(pcow_snapshot_create(image, "s", &error));
        assert_int_equal(pthread_create(&thread, NULL, flush_and_be_parked, &counter), 0);
        sem_wait(&counter.parked);
        reset(&counter);
        MUST(pcow_map_flush(counter.map, 4 * MIB, PCOW_PAGE_SIZE, &error));
        assert_int_equal(counter.syncs, 1);
        sem_post(&counter.go_on);
        assert_int_equal(pthread_join(thread, &failed), 0);
        assert_int_equal(failed != NULL, errors[i] != 0);
        /* and whichever ended first, it is there */
        reset(&counter);
        MUST(pcow_map_flush(counter.map, 4 * MIB, PCOW_PAGE_SIZE, &error));
        assert_int_equal(counter.syncs, 0);
        end(&counter, image);
        sem_destroy(&counter.parked);
        sem_destroy(&counter.go_on);
    }
}

/*
 * On a full pool a page is mapped for stores alone, in a slab of which others still lack blocks.
 * When the slab is mapped anew none of them is, and what was stored to the page is not durable yet.
 */
static void test_page_that_is_not_mapped_for_stores_any_more(void **state)
{
    static const uint8_t bytes[2 * PCOW_PAGE_SIZE] = {1};
    struct counter counter;
    struct page_set *writable;
    struct pcow_extent extent;
    struct pcow_event event;
    pcow_image *image;
    uint8_t *memory;
    int fd;

    (void)state;
    begin(&counter, PCOW_PERSISTENCE_PMEM, &image);
    pcow_map_destroy(counter.map);
    counter.map = NULL;
    MUST(pcow_write(image, 4 * MIB, bytes, sizeof bytes, &error));
    MUST(pcow_get_extent(image, 4 * MIB, sizeof bytes, &extent, &error));
    end(&counter, image);
    fd = open(scratch("vm.pcow"), O_RDWR | O_CLOEXEC);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                               (off_t)extent.file_offset, sizeof bytes),
                     0);
    close(fd);

    begin_again(&counter, &image);
    counter.full = true;
    memory = pcow_map_address(counter.map);
    writable = &counter.map->slabs[4 * MIB >> SLAB_BITS].writable;
    memory[4 * MIB] = 2;
    assert_int_equal(page_set_count(writable), 1);
    assert_false(pcow_map_next_event(counter.map, &event));
    MUST(pcow_map_restore(counter.map, 4 * MIB, PCOW_PAGE_SIZE, &error));
    assert_int_equal(page_set_count(writable), 0);
    /* who had it made accessible for the kernel is told */
    assert_true(pcow_map_next_event(counter.map, &event));
    assert_int_equal(event.kind, PCOW_EVENT_WITHDRAWN);
    assert_false(pcow_map_next_event(counter.map, &event));
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 4 * MIB, PCOW_PAGE_SIZE, &error));
    assert_true(counter.guest_bytes >= PCOW_PAGE_SIZE || counter.syncs == 1);
    /* once */
    reset(&counter);
    MUST(pcow_map_flush(counter.map, 4 * MIB, PCOW_PAGE_SIZE, &error));
    assert_int_equal(counter.syncs, 0);
    counter.full = false;
    end(&counter, image);
}

static void test_settling_does_not_rely_on_a_commit_under_way(void **state)
{
    struct settler settler = {
        .observer = {.persistence = PCOW_PERSISTENCE_PMEM, .look = settle_meanwhile}};
    struct file file;

    (void)state;
    unlink(scratch("vm.pcow"));
    pcow_close(must_create(scratch("vm.pcow"), SIZE, 0, NULL));
    MUST(file_open(&file, AT_FDCWD, scratch("vm.pcow"), "vm.pcow", FILE_WRITE, &settler.observer,
                   &error));
    settler.file = &file;
    assert_int_equal(file_punch(&file, PCOW_SLAB_SIZE - PCOW_PAGE_SIZE, PCOW_PAGE_SIZE), 0);
    assert_int_equal(file_commit(&file), 0);
    assert_int_equal(settler.syncs, 2);
    /* and once it is there, nobody waits for it any more */
    assert_int_equal(file_settle(&file), 0);
    assert_int_equal(settler.syncs, 2);
    file_close(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_cache),
        cmocka_unit_test(test_pmem),
        cmocka_unit_test(test_volatile),
        cmocka_unit_test(test_restore),
        cmocka_unit_test(test_page_that_is_being_mapped),
        cmocka_unit_test(test_a_flush_does_not_rely_on_one_under_way),
        cmocka_unit_test(test_page_that_is_not_mapped_for_stores_any_more),
        cmocka_unit_test(test_settling_does_not_rely_on_a_commit_under_way),
    };

    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
