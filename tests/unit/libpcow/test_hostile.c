/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Images that somebody made so that a check of them takes long, or much memory: both are bounded by
 * what the file really holds.
 */
#include "check_support.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#define MANY_SLABS 16384u
#define MOST_MEMORY_KIB (100l << 10)
#define MOST_SECONDS 3.0

struct told {
    uint64_t ranges, bytes;
};

static void count_loss(void *opaque, const struct pcow_loss *loss)
{
    struct told *told = opaque;

    told->ranges++;
    told->bytes += loss->length;
}

static long memory_peak(void)
{
    struct rusage usage = {0};

    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static double processor_time(void)
{
    struct timespec now;

    assert_int_equal(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now), 0);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- pages that are lost one by one ---------------------------------------------------------- */

/* A file of 32 GiB, nearly all hole, whose slabs belong to nobody, and hold each second page. */
static void make_scattered(void)
{
    static uint64_t words[MANY_SLABS];
    static struct page_set valid[MANY_SLABS];

    make_image();
    assert_int_equal(truncate(IMAGE, (off_t)(MANY_SLABS * PCOW_SLAB_SIZE)), 0);
    for (uint32_t slab = 1; slab < MANY_SLABS; slab++)
        words[slab] = owner_encode((struct owner){OWNER_DATA, 1000, slab % 4});
    memset(valid, 0x55, sizeof valid);
    poke(SLAB_TABLE_OFFSET, words, sizeof words);
    poke(BITMAP_OFFSET, valid, sizeof valid);
}

struct looked {
    struct pcow_check_result result;
    struct told told;
    long memory;
    int ret;
};

/* In a process of its own, as the peak never falls. */
static struct looked look_at_scattered(void)
{
    struct looked looked = {.ret = -1};
    int ends[2];
    pid_t child;

    assert_int_equal(pipe(ends), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        long before = memory_peak();

        looked.ret = pcow_check_losses(IMAGE, 0, NULL, count_loss, &looked.told, &looked.result,
                                       NULL);
        looked.memory = memory_peak() - before;
        _exit(write(ends[1], &looked, sizeof looked) != sizeof looked);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &looked, sizeof looked), sizeof looked);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(ends[0]);
    return looked;
}

static void test_memory(void **state)
{
    const uint64_t ranges = (MANY_SLABS - 1) * (PAGES_PER_SLAB / 2);
    struct looked looked;

    (void)state;
    make_scattered();
    looked = look_at_scattered();
    assert_int_equal(looked.ret, 0);
    if (looked.memory > MOST_MEMORY_KIB)
        fail_msg("the check took %ld KiB", looked.memory);
    assert_int_equal(looked.told.ranges, ranges);
    assert_int_equal(looked.result.losses, ranges);
    assert_int_equal(looked.result.lost_size, ranges * PCOW_PAGE_SIZE);
    assert_int_equal(looked.told.bytes, looked.result.lost_size);
}

/* ---- VM state that is said to be large ------------------------------------------------------- */

static void make_large_states(unsigned count)
{
    pcow_image *image;

    unlink(IMAGE);
    image = must_create_without_mirror(IMAGE, SIZE);
    for (unsigned i = 0; i < count; i++) {
        char name[16];

        snprintf(name, sizeof name, "s%u", i);
        MUST(pcow_snapshot_create(image, name, &error));
    }
    pcow_close(image);
    for (uint32_t slot = 0; slot <= count; slot++)
        poke_word(record_offset(slot, offsetof(struct layer_record, state_size)),
                  PCOW_MAX_VIRTUAL_SIZE);
}

static void test_time(void **state)
{
    const unsigned count = 200;
    struct findings *found;
    double begun, taken;

    (void)state;
    make_large_states(count);
    begun = processor_time();
    found = run_check(0);
    taken = processor_time() - begun;
    if (taken > MOST_SECONDS)
        fail_msg("the check took %.1f s", taken);
    assert_int_equal(found->result.losses, count);
    assert_int_equal(found->result.lost_size, count * PCOW_MAX_VIRTUAL_SIZE);
    run_check(PCOW_CHECK_REPAIR);
    expect_clean();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_time),
    };

    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
