/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The first layout, which maps into holes that others may get memory in. The program is linked so
 * that its calls of mmap() and munmap() pass by here: memory of others comes between them, and
 * calls can fail.
 */
#include "support.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "operations/operations.h"
#include "persist/observer.h"

#define STRIPE (64 * MIB)              /* what the layout gives back at once, see reserve.c */
#define SIZE (3 * STRIPE + 6 * MIB)
#define SLABS (SIZE / PCOW_SLAB_SIZE)
#define HOLES 4u
#define NEVER ~0u

enum place_in_hole { FIRST_PAGE, SOME_PAGE, LAST_PAGE, PLACES };

static struct {
    bool armed;
    pthread_t thread;                  /* only its calls count */
    unsigned squat_at;                 /* the hole that another one takes a page of, */
    enum place_in_hole where;          /* this one */
    unsigned fails_at, hole_fails_at, reservation_fails_at;
    unsigned reservations, holes, calls;
    bool released;
    bool traps;                        /* when it is first stored to */
    bool busy;                         /* others may get memory at any time */
    unsigned char *reserved;           /* the last one */
    unsigned char *taken;              /* by another one */
} step;

void *__real_mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t length);
int __wrap_munmap(void *address, size_t length);

static bool is_reserved(const unsigned char *address)
{
    return step.reserved && address >= step.reserved
           && address < step.reserved + SIZE + PCOW_SLAB_SIZE;
}

/*
 * Are there mappings in the last reservation, other than what another one has? gap: where the first
 * mapping is missing.
 */
static bool is_left(uintptr_t *gap)
{
    uintptr_t at = (uintptr_t)step.reserved, end = at + SIZE + PCOW_SLAB_SIZE;
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    bool left = false;

    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;

        assert_int_equal(sscanf(line, "%lx-%lx", &from, &to), 2);
        if (to <= (uintptr_t)step.reserved || from >= end)
            continue;
        left |= from != (uintptr_t)step.taken || to != from + PCOW_PAGE_SIZE;
        if (from <= at)
            at = to;
    }
    fclose(maps);
    if (gap)
        *gap = at < end ? at : 0;
    return left;
}

void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    void *mapped;

    if (!step.armed || !pthread_equal(step.thread, pthread_self()))
        return __real_mmap64(address, length, protection, flags, fd, offset);
    if (address) {
        if (is_reserved(address) && step.calls++ == step.fails_at) {
            errno = ENOMEM;
            return MAP_FAILED;
        }
        return __real_mmap64(address, length, protection, flags, fd, offset);
    }
    if (length != SIZE + PCOW_SLAB_SIZE)
        return __real_mmap64(address, length, protection, flags, fd, offset);
    /* What was reserved before is gone by now, but for what is not ours. */
    if (step.reservations && !step.busy)
        assert_false(is_left(NULL));
    if (step.reservations++ == step.reservation_fails_at) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    mapped = __real_mmap64(address, length, protection, flags, fd, offset);
    step.reserved = mapped;
    step.released = false;
    return mapped;
}

int __wrap_munmap(void *address, size_t length)
{
    unsigned char *at = address;
    unsigned hole;
    int ret;

    if (!step.armed || !pthread_equal(step.thread, pthread_self()) || !is_reserved(address))
        return __real_munmap(address, length);
    /* The reservation goes as a whole, its end first. */
    step.released |= at + length == step.reserved + SIZE + PCOW_SLAB_SIZE;
    if (step.released)
        return __real_munmap(address, length);
    hole = step.holes++;
    if (hole == step.hole_fails_at) {
        errno = ENOMEM;
        return -1;
    }
    ret = __real_munmap(address, length);
    if (hole == step.squat_at) {
        at += step.where == FIRST_PAGE  ? 0
              : step.where == LAST_PAGE ? length - PCOW_PAGE_SIZE
                                        : length / 2 + PCOW_PAGE_SIZE;
        step.taken =
            __real_mmap64(at, PCOW_PAGE_SIZE, step.traps ? PROT_READ : PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        assert_ptr_equal(step.taken, at);
        memset(step.taken, 0xa5, PCOW_PAGE_SIZE);
    }
    return ret;
}

static void arm(void)
{
    step = (typeof(step)){.armed = true,
                          .thread = pthread_self(),
                          .squat_at = NEVER,
                          .fails_at = NEVER,
                          .hole_fails_at = NEVER,
                          .reservation_fails_at = NEVER};
}

/* It is as it was left, and nobody unmaps it. */
static void leave(void)
{
    for (unsigned i = 0; step.taken && i < PCOW_PAGE_SIZE; i++)
        assert_int_equal(step.taken[i], 0xa5);
    if (step.taken)
        assert_int_equal(__real_munmap(step.taken, PCOW_PAGE_SIZE), 0);
    step.taken = NULL;
    step.armed = false;
}

/* ---- an image of all kinds of pieces --------------------------------------------------------- */

#define CLUSTER (64 * KIB)

static unsigned char expected(uint64_t slab, uint64_t offset)
{
    if (slab % 4 == 3 || offset % MIB >= CLUSTER)
        return 0;
    return (unsigned char)(1 + (slab * 2 + (offset >= MIB)) % 120
                           + (slab % 4 == 0 && offset < MIB ? 128 : 0));
}

static pcow_image *make_image(void)
{
    pcow_image *image;
    unsigned char bytes[CLUSTER];

    unlink(scratch("t"));
    image = must_create(scratch("t"), SIZE, CLUSTER, NULL);
    for (unsigned layer = 0; layer < 2; layer++) {
        /* From the last to the first: what comes next in the range does not in the file. */
        for (uint64_t v = SLABS; v-- > 0;)
            for (uint64_t offset = 0; offset < (layer || v % 4 == 3 ? 0 : 2 * MIB)
                                      || (layer && v % 4 == 0 && offset == 0);
                 offset += MIB) {
                memset(bytes, layer ? expected(v, offset) : expected(v, offset) & 127,
                       sizeof bytes);
                MUST(pcow_write(image, v * PCOW_SLAB_SIZE + offset, bytes, sizeof bytes, &error));
            }
        if (layer == 0)
            MUST(pcow_snapshot_create(image, "s", &error));
    }
    return image;
}

static void assert_content(pcow_map *map, uint64_t except)
{
    static const unsigned pages[] = {0, 15, 16, 255, 256, 271, 272, 511};
    volatile unsigned char *memory = pcow_map_address(map);

    alarm(60);
    for (uint64_t v = 0; v < SLABS; v++)
        for (unsigned i = 0; i < sizeof pages / sizeof *pages; i++) {
            uint64_t offset = v * PCOW_SLAB_SIZE + pages[i] * PCOW_PAGE_SIZE;

            if (offset == except)
                continue;
            assert_int_equal(memory[offset], expected(v, offset % PCOW_SLAB_SIZE));
            if (i % 3 == 0)
                memory[offset] = expected(v, offset % PCOW_SLAB_SIZE);
        }
    alarm(0);
}

static void assert_whole(pcow_map *map)
{
    uintptr_t gap;

    assert_true(is_left(&gap));
    assert_int_equal(gap, 0);
    assert_ptr_equal(map->reservation, step.reserved);
}

static unsigned vmas_of(const pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats.vmas;
}

static int create(pcow_image *image, enum pcow_engine engine, unsigned budget, pcow_map **map)
{
    struct pcow_map_options options = {.engine = engine, .vma_budget = budget};
    int ret = pcow_map_create(image, &options, map, NULL);

    step.fails_at = NEVER;             /* nothing that a trap calls */
    assert_int_equal(ret == 0, *map != NULL);
    return ret;
}

/* What the other one does about a trap in its memory. */
static void let_store(int number, siginfo_t *info, void *context)
{
    const unsigned char *address = info->si_addr;

    (void)number;
    (void)context;
    if (!step.taken || address < step.taken || address >= step.taken + PCOW_PAGE_SIZE
        || mprotect(step.taken, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE))
        abort();
}

/* ---- tests ----------------------------------------------------------------------------------- */

static int look(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    (void)observation;
    return 0;
}

/*
 * Under a budget too, which leaves slabs cold, and with a page that is lost, which none is in class
 * volatile.
 */
static void test_others_get_memory_in_a_hole(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PMEM, .look = look};
    const uint64_t lost = STRIPE / 2 + PCOW_PAGE_SIZE;     /* SOME_PAGE of the first hole */

    (void)state;
    pcow_close(must_create(scratch("other"), 8 * MIB, 0, NULL));
    FOR_EACH_ENGINE(engine)
        for (unsigned kind = 0; kind < 3; kind++) {
            struct sigaction action = {.sa_sigaction = let_store,
                                       .sa_flags = SA_SIGINFO | SA_NODEFER},
                             before;
            const unsigned budget = kind == 1 ? 150 : 0;
            pcow_image *image = make_image(), *other = must_open(scratch("other"), PCOW_OPEN_WRITE);
            pcow_map *map, *other_map;

            if (kind == 2) {
                pcow_close(image);
                MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &observer, &image, &error));
                map = must_map_by(image, engine, 0);
                MUST(pcow_map_lose(map, lost, &error));
                pcow_map_destroy(map);
            }
            /*
             * Traps in what others have there are not served by the library, whose handler is the
             * one that gets them.
             */
            sigaction(SIGSEGV, &action, &before);
            other_map = must_map_by(other, engine, budget);
            for (unsigned i = 0; i <= HOLES * PLACES; i++) {
                const bool squats = i < HOLES * PLACES;
                unsigned vmas;

                map = must_map_by(image, engine, budget);
                vmas = vmas_of(map);
                pcow_map_destroy(map);
                arm();
                step.traps = true;
                step.squat_at = i / PLACES;
                step.where = i % PLACES;
                assert_int_equal(create(image, engine, budget, &map), 0);
                assert_int_equal(step.taken != NULL, squats);
                assert_int_equal(step.reservations, squats ? 2 : 1);
                assert_int_equal(vmas_of(map), vmas);
                assert_whole(map);
                assert_content(map, kind == 2 ? lost : UINT64_MAX);
                if (kind == 2)
                    assert_int_equal(kernel_store((unsigned char *)pcow_map_address(map) + lost, 1),
                                     -1);
                pcow_map_destroy(map);
                assert_false(is_left(NULL));
                leave();
            }
            pcow_map_destroy(other_map);
            sigaction(SIGSEGV, &before, NULL);
            pcow_close(other);
            pcow_close(image);
            must_be_clean(scratch("t"));
        }
}

static void test_calls_that_fail(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned hole = 0; hole <= HOLES; hole++) {
            pcow_image *image = make_image();
            unsigned failed = 0;
            pcow_map *map;
            int ret;

#ifndef __SANITIZE_THREAD__            /* the library goes past it */
            do {
                arm();
                step.squat_at = hole;
                step.fails_at = failed;
                ret = create(image, engine, 0, &map);
                assert_int_equal(step.calls > failed++, ret != 0);
                if (ret) {
                    assert_int_equal(ret, -ENOMEM);
                    assert_false(is_left(NULL));
                    leave();
                }
            } while (ret);
            assert_true(failed > SLABS);
            assert_whole(map);
            assert_content(map, UINT64_MAX);
            pcow_map_destroy(map);
            assert_false(is_left(NULL));
            leave();
#else
            (void)failed;
#endif
            arm();
            step.hole_fails_at = hole;
            ret = create(image, engine, 0, &map);
            assert_int_equal(ret, hole < HOLES ? -ENOMEM : 0);
            pcow_map_destroy(map);
            assert_false(is_left(NULL));
            leave();
            arm();
            step.squat_at = hole;
            step.reservation_fails_at = 1;
            ret = create(image, engine, 0, &map);
            assert_int_equal(ret, hole < HOLES ? -ENOMEM : 0);
            pcow_map_destroy(map);
            assert_false(is_left(NULL));
            leave();
            /* Nothing is counted that is not there. */
            map = must_map_by(image, engine, 0);
            assert_int_equal(vmas_of(map), vmas_used(map));
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(scratch("t"));
        }
}

#define PIECES 64u
#define PAGE_WORDS (PCOW_PAGE_SIZE / sizeof(uint64_t))

struct busy {
    _Atomic bool stop;
    unsigned wrong, rounds;
};

static size_t stride(size_t words)
{
    return words > 16 * PAGE_WORDS ? words / 8 : PAGE_WORDS / 2;
}

/* Maps and unmaps all the time, and looks whether what it has stored is still there. */
static void *map_and_unmap(void *opaque)
{
    struct busy *busy = opaque;
    uint64_t *piece[PIECES] = {NULL}, seed = random_seed();
    size_t words[PIECES] = {0};

    for (unsigned n = 0; !busy->stop || n % PIECES; n++, busy->rounds++) {
        unsigned i = n % PIECES;

        for (size_t w = 0; w < words[i]; w += stride(words[i]))
            busy->wrong += piece[i][w] != ((uintptr_t)piece[i] ^ w);
        if (piece[i])
            busy->wrong += __real_munmap(piece[i], words[i] * sizeof *piece[i]) != 0;
        /* The large ones have no room but below the range, and in its holes. */
        words[i] =
            (n % 2 ? 1 + random_next(&seed) % 16 : 256 + random_next(&seed) % 8192) * PAGE_WORDS;
        piece[i] = __real_mmap64(NULL, words[i] * sizeof *piece[i], PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (piece[i] == MAP_FAILED) {
            piece[i] = NULL;
            words[i] = 0;
        }
        for (size_t w = 0; w < words[i]; w += stride(words[i]))
            piece[i][w] = (uintptr_t)piece[i] ^ w;
    }
    for (unsigned i = 0; i < PIECES; i++) {
        for (size_t w = 0; w < words[i]; w += stride(words[i]))
            busy->wrong += piece[i][w] != ((uintptr_t)piece[i] ^ w);
        if (piece[i])
            __real_munmap(piece[i], words[i] * sizeof *piece[i]);
    }
    return NULL;
}

static void test_others_map_all_the_time(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        unsigned rounds = test_steps(1000) / 10, again = 0;
        struct busy busy = {.stop = false};
        pcow_image *image = make_image();
        pthread_t thread;

        assert_int_equal(pthread_create(&thread, NULL, map_and_unmap, &busy), 0);
        for (unsigned round = 0; round < rounds; round++) {
            pcow_map *map;

            arm();
            step.busy = true;
            assert_int_equal(create(image, engine, 0, &map), 0);
            again += step.reservations - 1;
            assert_ptr_equal(map->reservation, step.reserved);
            step.armed = false;
            if (round % 8 == 0)
                assert_content(map, UINT64_MAX);
            pcow_map_destroy(map);
        }
        busy.stop = true;
        pthread_join(thread, NULL);
        assert_int_equal(busy.wrong, 0);
        print_message("%u maps, %u of them laid out again, %u mappings of others\n", rounds, again,
                      busy.rounds);
        pcow_close(image);
        must_be_clean(scratch("t"));
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_others_get_memory_in_a_hole),
        TEST(test_calls_that_fail),
        TEST(test_others_map_all_the_time),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
