/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How much is brought in ahead of the guest: whole slabs for who fills them, and no more prepared
 * ones than can be used. And what is given back beside it, and when.
 */
#include "support.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "image/prepare.h"
#include "image/remains.h"
#include "monitor/monitor.h"
#include "operations/operations.h"

#define SLAB PCOW_SLAB_SIZE
#define FILLED 24u                     /* slabs that the guest fills */
#define SPARSE 24u                     /* and of which it stores to one page each */
#define SIZE ((FILLED + SPARSE) * SLAB)
/* slabs that may be brought in whole before it is seen that the guest has changed its ways */
#define WRONG 7u

static struct pcow_map_stats stats_of(pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats;
}

static pcow_map *must_map_prepared(pcow_image *image, enum pcow_engine engine, unsigned slabs)
{
    struct pcow_map_options options = {.engine = engine,
                                       .serves_sigbus = serve_bus(),
                                       .prepared_slabs = slabs,
                                       .full_policy = PCOW_FULL_FAIL};
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    for (unsigned i = 0; i < 2000 && stats_of(map).slabs_ready < slabs; i++)
        usleep(5000);
    assert_true(stats_of(map).slabs_ready >= slabs);
    return map;
}

static uint64_t traps(pcow_map *map)
{
    return stats_of(map).write_traps + stats_of(map).read_traps;
}

static unsigned own_pages(pcow_image *image)
{
    unsigned pages = 0;

    for (uint64_t v = 0; v < image->chain->guest_slabs; v++) {
        chain_claim(image->chain, v);
        if (image->chain->head[v])
            pages += page_set_count(&image->valid[slab_ref_slab(image->chain->head[v])]);
        chain_release(image->chain, v);
    }
    return pages;
}

static void test_filled_slabs_come_whole(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(scratch("image"), SIZE, 0, NULL);
        pcow_map *map = must_map_prepared(image, engine, FILLED + SPARSE);
        volatile unsigned char *memory = pcow_map_address(map);
        uint64_t before, filled, page;
        unsigned own;

        for (page = 0; page < FILLED / 2 * PAGES_PER_SLAB; page++)
            memory[page * PCOW_PAGE_SIZE] = (unsigned char)(1 + page % 255);
        before = traps(map);
        for (; page < FILLED * PAGES_PER_SLAB; page++)
            memory[page * PCOW_PAGE_SIZE] = (unsigned char)(1 + page % 255);
        filled = traps(map) - before;
        /*
         * One each, but for one slab in eight, which takes half a dozen; without this all of them
         * did.
         */
        assert_in_range(filled, FILLED / 2, FILLED / 2 + 2 * 8);
        own = own_pages(image);
        assert_int_equal(own, FILLED * PAGES_PER_SLAB);
        for (unsigned v = FILLED; v < FILLED + SPARSE; v++)
            memory[v * SLAB + 5 * PCOW_PAGE_SIZE] = 7;
        assert_in_range(own_pages(image) - own, SPARSE, WRONG * PAGES_PER_SLAB + SPARSE * 16);
        for (page = 0; page < SIZE / PCOW_PAGE_SIZE; page++) {
            unsigned char expected = page < FILLED * PAGES_PER_SLAB
                                         ? (unsigned char)(1 + page % 255)
                                     : page % PAGES_PER_SLAB == 5 ? 7
                                                                  : 0;

            assert_int_equal(memory[page * PCOW_PAGE_SIZE], expected);
        }
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("image"));
        assert_int_equal(unlink(scratch("image")), 0);
    }
}

static uint8_t *source_of(pcow_image *image, uint64_t guest_slab)
{
    struct place place = chain_find(image, guest_slab, PAGES_PER_SLAB - 1, 1);

    assert_true(place.present && !place.own);
    return file_address(&image->chain->file[place.level]->file,
                        place.offset - (PAGES_PER_SLAB - 1) * PCOW_PAGE_SIZE);
}

/*
 * After the first copy in a slab the next ones find the source in a page table; but nobody reads a
 * disk for a guess.
 */
static void test_sources_are_at_hand(void **state)
{
    (void)state;
    for (unsigned on_disk = 0; on_disk < 2; on_disk++) {
        pcow_image *image = must_create_overlay(4 * SLAB, 0x5a);
        volatile unsigned char *memory;
        const uint8_t *source;
        pcow_map *map;

        image->base->file.persist.persistence =
            on_disk ? PCOW_PERSISTENCE_PAGE_CACHE : PCOW_PERSISTENCE_VOLATILE;
        map = must_map_prepared(image, PCOW_ENGINE_SIGNAL, 4);
        memory = pcow_map_address(map);
        source = source_of(image, 1);
        assert_int_equal(madvise((void *)(uintptr_t)source, SLAB, MADV_DONTNEED), 0);
        memory[SLAB] = 7;
        for (unsigned i = 0; i < 2000 && stats_of(map).slabs_queued > 0; i++)
            usleep(5000);
        usleep(100000);                        /* of which it is at the last one */
        assert_int_equal(present_in(source), on_disk ? 0 : PAGES_PER_SLAB);
        if (on_disk) {
            memory[SLAB + PCOW_PAGE_SIZE] = 7;         /* the guest comes back */
            for (unsigned i = 0; i < 2000 && present_in(source) < PAGES_PER_SLAB; i++)
                usleep(5000);
            assert_int_equal(present_in(source), PAGES_PER_SLAB);
        }
        assert_int_equal(memory[SLAB + 1], 0x5a);
        pcow_map_destroy(map);
        pcow_close(image);
        unlink(scratch("top.pcow"));
        unlink(scratch("base.pcow"));
    }
}

/* Who stores here and there gets clusters, however long it goes on. */
static void test_sparse_stores_get_clusters(void **state)
{
    pcow_image *image = must_create(scratch("image"), SIZE, 0, NULL);
    pcow_map *map = must_map_prepared(image, PCOW_ENGINE_SIGNAL, 8);
    volatile unsigned char *memory = pcow_map_address(map);

    (void)state;
    for (uint64_t v = 0; v < SIZE / SLAB; v++)
        memory[v * SLAB + 5 * PCOW_PAGE_SIZE] = 7;
    assert_int_equal(own_pages(image), SIZE / SLAB * 16);
    pcow_map_destroy(map);
    pcow_close(image);
}

static void wait_for(pcow_map *map, unsigned least, unsigned most)
{
    unsigned stayed = 0;

    for (unsigned i = 0; i < 3000 && stayed < 40; i++) {
        unsigned ready = stats_of(map).slabs_ready;

        stayed = ready >= least && ready <= most ? stayed + 1 : 0;
        usleep(10000);
    }
    assert_in_range(stats_of(map).slabs_ready, least, most);
}

/*
 * Once every guest slab has one of the active layer there is little use for more, until a snapshot.
 */
static void test_no_more_than_can_be_used(void **state)
{
    pcow_image *image = must_create(scratch("image"), 16 * SLAB, 0, NULL);
    pcow_map *map = must_map_prepared(image, PCOW_ENGINE_SIGNAL, 16);
    volatile unsigned char *memory = pcow_map_address(map);

    (void)state;
    for (uint64_t v = 0; v < 16; v++)
        memory[v * SLAB] = 1;
    wait_for(map, 4, 4);
    MUST(pcow_snapshot_create(image, "one", &error));
    memory[0] = 2;
    wait_for(map, 15, 16);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* ---- engine kvm: no trap is ours, QEMU asks for each page ------------------------------------ */

static uint64_t head_of(pcow_image *image, uint64_t guest_slab)
{
    return slab_ref_slab(image->chain->head[guest_slab]);
}

static bool second_half_is_hole(pcow_image *image, uint64_t guest_slab)
{
    return file_is_hole(&image->file, (head_of(image, guest_slab) << SLAB_BITS) + MIB, MIB);
}

/*
 * A writer that stores one page to each of three slabs, all of which are prepared, and is killed.
 */
static void leave_prepared_slabs(const char *path)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_KVM, .prepared_slabs = 8};
    pcow_image *image;
    pcow_map *map;
    int status;
    pid_t pid;

    pcow_close(must_create(path, 64 * MIB, 0, NULL));
    pid = fork();
    if (pid == 0) {
        if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, NULL)
            || pcow_map_create(image, &options, &map, NULL))
            _exit(1);
        while (stats_of(map).slabs_ready < 8)
            usleep(1000);
        for (unsigned v = 0; v < 3; v++)
            if (pcow_map_resolve(map, v * SLAB, 1, true, NULL))
                _exit(2);
        kill(getpid(), SIGKILL);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void test_kvm_gives_back_what_a_killed_writer_left(void **state)
{
    const char *path = scratch("image");
    unsigned holes = 0;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    leave_prepared_slabs(path);
    image = must_open(path, PCOW_OPEN_WRITE);
    map = must_map_prepared(image, PCOW_ENGINE_KVM, 0);
    for (unsigned v = 0; v < 3; v++)
        assert_false(second_half_is_hole(image, v));
    MUST(pcow_map_resolve(map, 20 * MIB, 1, true, &error));
    for (unsigned i = 0; i < 600 && holes < 3; i++) {
        usleep(5000);
        holes = 0;
        for (unsigned v = 0; v < 3; v++)
            holes += second_half_is_hole(image, v);
    }
    assert_int_equal(holes, 3);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path);
}

/*
 * What is prepared in the slabs that it uses is not taken away from a guest that stores all the
 * time.
 */
static void test_kvm_is_not_taken_for_idle(void **state)
{
    pcow_image *image = must_create(scratch("image"), 64 * MIB, 0, NULL);
    pcow_map *map = must_map_prepared(image, PCOW_ENGINE_KVM, 8);

    (void)state;
    for (unsigned v = 0; v < 4; v++)
        MUST(pcow_map_resolve(map, v * SLAB, 1, true, &error));
    /* Longer than an idle image keeps it. Here and there, which gives the thread nothing to do. */
    for (unsigned i = 0; i < 28; i++) {
        usleep(250000);
        MUST(pcow_map_resolve(map, i % 4 * SLAB + (1 + i / 4) * 3 * 64 * KIB, 1, true, &error));
    }
    for (unsigned v = 0; v < 4; v++) {
        assert_in_range(page_set_count(&image->valid[head_of(image, v)]), 1, PAGES_PER_SLAB - 1);
        assert_false(page_set_empty(&image->prepared[head_of(image, v)]));
    }
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("image"));
}

/* But in those that it does not come back to, also if it is never idle. */
static void test_rest_of_other_slabs_is_given_back(void **state)
{
    pcow_image *image = must_create(scratch("image"), 64 * MIB, 0, NULL);
    pcow_map *map = must_map_prepared(image, PCOW_ENGINE_KVM, 8);

    (void)state;
    for (unsigned v = 0; v < 16; v++)
        MUST(pcow_map_resolve(map, v * SLAB, 1, true, &error));
    for (unsigned i = 0; i < 48; i++) {
        usleep(250000);
        MUST(pcow_map_resolve(map, i % 4 * SLAB + (1 + i / 4) * 2 * 64 * KIB, 1, true, &error));
    }
    for (unsigned v = 0; v < 16; v++)
        assert_int_equal(page_set_empty(&image->prepared[head_of(image, v)]), v >= 4);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("image"));
}

/* ---- a file system that does not take what is given back ------------------------------------- */

#define DROPPED 20u                    /* slabs, more than the thread tries in one go */

struct refusing {
    struct observer observer;
    unsigned slabs;                    /* in the file: those before this one cannot be punched */
    unsigned punches;
};

static int refuse(struct observer *observer, const struct observation *o)
{
    struct refusing *refusing = (struct refusing *)observer;

    if (o->what != OBSERVED_PUNCH)
        return 0;
    __atomic_fetch_add(&refusing->punches, 1, __ATOMIC_RELAXED);
    return o->offset >> SLAB_BITS < __atomic_load_n(&refusing->slabs, __ATOMIC_RELAXED) ? -EIO : 0;
}

/* It is tried once, and not in the way of what can be given back. */
static void test_what_cannot_be_given_back(void **state)
{
    static unsigned char data[DROPPED * SLAB];
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    (void)state;
    memset(data, 0x55, sizeof data);
    for (unsigned some = 0; some < 2; some++) {
        struct refusing refusing = {
            .observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = refuse}};
        struct pcow_info full, info;
        pcow_image *image;
        unsigned first;
        pcow_map *map;

        pcow_close(must_create(scratch("image"), 64 * MIB, 0, NULL));
        MUST(image_open(scratch("image"), PCOW_OPEN_WRITE, NULL, &refusing.observer, &image,
                        &error));
        MUST(pcow_snapshot_create(image, "empty", &error));
        MUST(pcow_write(image, 0, data, sizeof data, &error));
        pcow_get_info(image, &full);
        MUST(pcow_map_create(image, &options, &map, &error));
        first = (unsigned)head_of(image, 0);
        __atomic_store_n(&refusing.slabs, some ? first + 10 : UINT32_MAX, __ATOMIC_RELAXED);
        MUST(pcow_snapshot_revert(image, "empty", &error));
        usleep(1000000);
        assert_in_range(__atomic_load_n(&refusing.punches, __ATOMIC_RELAXED), DROPPED, 50);
        pcow_get_info(image, &info);
        assert_in_range(full.allocated_size - info.allocated_size, some ? (DROPPED - 11) * SLAB : 0,
                        some ? DROPPED * SLAB : MIB);
        /* Later on it does. */
        __atomic_store_n(&refusing.slabs, 0, __ATOMIC_RELAXED);
        MUST(pcow_reclaim(image, NULL, &error));
        pcow_get_info(image, &info);
        assert_in_range(info.allocated_size, 0, MIB);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("image"));
        assert_int_equal(unlink(scratch("image")), 0);
    }
}

/* ---- who waits for the thread ---------------------------------------------------------------- */

/* slabs of a page each; giving one back takes a millisecond at least */
#define MANY 800u
#define SNAPSHOTS 8u
/* slabs that the thread gives back before others may have a turn */
#define ONE_STEP 8u

struct slow {
    struct observer observer;
    pcow_map *map;                     /* atomic */
    unsigned punches;                  /* while somebody waits for a turn */
};

static int take_time(struct observer *observer, const struct observation *o)
{
    struct slow *slow = (struct slow *)observer;
    pcow_map *map = __atomic_load_n(&slow->map, __ATOMIC_ACQUIRE);

    if (o->what == OBSERVED_PUNCH) {
        usleep(1000);
        if (map && __atomic_load_n(&map->ahead.waiting, __ATOMIC_SEQ_CST) > 0)
            __atomic_fetch_add(&slow->punches, 1, __ATOMIC_RELAXED);
    }
    return 0;
}

/*
 * The guest is stopped for a snapshot: that waits for the step that the thread is at, not for more
 * of what a revert has dropped. Counted, as the time depends on what else the machine does.
 */
static void test_snapshots_come_first(void **state)
{
    struct slow slow = {.observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = take_time}};
    const char *path = scratch("image");
    unsigned made = 0;
    unsigned most = 0, meanwhile;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    pcow_close(must_create(path, MANY * SLAB, 0, NULL));
    MUST(image_open(path, PCOW_OPEN_WRITE, NULL, &slow.observer, &image, &error));
    MUST(pcow_snapshot_create(image, "empty", &error));
    for (uint64_t v = 0; v < MANY; v++)
        MUST(pcow_write(image, v * SLAB, "x", 1, &error));
    MUST(pcow_map_create(image, &(struct pcow_map_options){.engine = PCOW_ENGINE_SIGNAL}, &map,
                         &error));
    __atomic_store_n(&slow.map, map, __ATOMIC_RELEASE);
    MUST(pcow_snapshot_revert(image, "empty", &error));
    for (unsigned s = 0; s < SNAPSHOTS && remains_are_due(image); s++) {
        char name[2] = {(char)('a' + s), 0};

        usleep(20000 + s * 1000);
        __atomic_store_n(&slow.punches, 0, __ATOMIC_RELAXED);
        MUST(pcow_snapshot_create(image, name, &error));
        meanwhile = __atomic_load_n(&slow.punches, __ATOMIC_RELAXED);
        most = meanwhile > most ? meanwhile : most;
        made++;
    }
    /*
     * It did wait for one, or nothing is shown; if this thread was not let run, there was nothing
     * to wait for.
     */
    assert_in_range(most, made > 1, ONE_STEP);
    __atomic_store_n(&slow.map, NULL, __ATOMIC_RELEASE);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path);
}

/*
 * What a revert has taken away shows from a base again, whose slabs have higher numbers than the
 * top file has room for: none of the thread's business.
 */
static void test_revert_to_a_larger_base(void **state)
{
    (void)state;
    const uint64_t slabs = 64;
    pcow_image *image = must_create(scratch("base.pcow"), slabs * PCOW_SLAB_SIZE, 0, NULL);
    volatile unsigned char *memory;
    pcow_map *map;

    __atomic_store_n(&image->free_hint, 2 * SLABS_PER_GROUP, __ATOMIC_RELAXED);
    for (uint64_t v = 0; v < slabs; v++)
        MUST(pcow_write(image, v * PCOW_SLAB_SIZE, "base", 4, &error));
    pcow_close(image);
    image = must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
    MUST(pcow_snapshot_create(image, "s", &error));
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    assert_true(image->slabs_reached <= SLABS_PER_GROUP);
    memory = pcow_map_address(map);
    for (unsigned round = 0; round < 50; round++) {
        for (uint64_t v = 0; v < slabs; v++)
            memory[v * PCOW_SLAB_SIZE] = memory[v * PCOW_SLAB_SIZE + 8192] = 1;
        MUST(pcow_snapshot_revert(image, "s", &error));
        assert_int_equal(memory[(slabs - 1) * PCOW_SLAB_SIZE], 'b');
    }
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

#define LITTLE 40u                     /* slabs of which a fork stores to one page each */
#define FORK_SIZE ((FORK_SLABS + LITTLE) * SLAB)

/* Store to a page of each of these slabs, and let the thread do what it wants to. */
static void touch(pcow_map *map, unsigned from, unsigned to)
{
    volatile unsigned char *memory = pcow_map_address(map);

    for (unsigned v = from; v < to; v++)
        memory[v * SLAB + 5 * PCOW_PAGE_SIZE] = 7;
    usleep(300000);
}

static pcow_map *must_map_on(const char *path, const char *base, const char *snapshot,
                             enum pcow_engine engine, pcow_image **image)
{
    struct pcow_create_options options = {.base = base, .base_snapshot = snapshot};
    struct pcow_map_options map_options = {
        .engine = engine, .serves_sigbus = serve_bus(), .full_policy = PCOW_FULL_FAIL};
    pcow_map *map;

    MUST(pcow_create(path, &options, &error));
    *image = must_open(path, PCOW_OPEN_WRITE);
    MUST(pcow_map_create(*image, &map_options, &map, &error));
    return map;
}

/*
 * A fork of a VM, which may end in a moment, takes what it stores to; an image on a template has
 * slabs for what may follow, and so has a fork that goes on and on.
 */
static void test_a_fork_takes_what_it_stores(void **state)
{
    char base[512], top[512];

    (void)state;
    snprintf(base, sizeof base, "%s", scratch("base.pcow"));
    snprintf(top, sizeof top, "%s", scratch("top.pcow"));
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(base, FORK_SIZE, 4096, NULL);
        struct stat status;
        pcow_map *map;

        MUST(pcow_snapshot_create(image, "warm", &error));
        pcow_close(image);
        map = must_map_on(top, base, "warm", engine, &image);
        touch(map, 0, LITTLE);
        assert_int_equal(stats_of(map).slabs_prepared, 0);
        assert_int_equal(stat(top, &status), 0);
        assert_in_range(status.st_blocks * 512, LITTLE * PCOW_PAGE_SIZE, 2 * SLAB);
        touch(map, LITTLE, LITTLE + FORK_SLABS);
        assert_true(stats_of(map).slabs_prepared > 0);
        pcow_map_destroy(map);
        pcow_close(image);
        assert_int_equal(unlink(top), 0);
        assert_int_equal(unlink(base), 0);

        image = must_create(base, FORK_SIZE, 4096, NULL);
        MUST(pcow_seal(image, &error));
        pcow_close(image);
        map = must_map_on(top, base, NULL, engine, &image);
        touch(map, 0, LITTLE);
        assert_true(stats_of(map).slabs_prepared > 0);
        pcow_map_destroy(map);
        pcow_close(image);
        assert_int_equal(unlink(top), 0);
        assert_int_equal(unlink(base), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_revert_to_a_larger_base, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_filled_slabs_come_whole, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_sources_are_at_hand, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_sparse_stores_get_clusters, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_no_more_than_can_be_used, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_kvm_gives_back_what_a_killed_writer_left,
                                        scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_kvm_is_not_taken_for_idle, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_rest_of_other_slabs_is_given_back, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_what_cannot_be_given_back, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_snapshots_come_first, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_a_fork_takes_what_it_stores, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
