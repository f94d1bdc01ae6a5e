/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * kill -9 at random points. A child maps an image and stores numbered pages, taking and dropping
 * snapshots on the way, and says in a shared page what it has finished; the parent kills it, opens
 * the image, checks it, and compares.
 *
 * The page cache outlives the process, so this shows the order of stores that other processes see,
 * not that of the medium.
 */
#include "support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define IMAGE_SIZE (16 * MIB)
#define PAGES (IMAGE_SIZE / 4096)
#define SNAPSHOTS 4u

/* What the child has done; every field is stored after the deed, "begun" ones before it. */
struct journal {
    volatile uint64_t seed;
    /* generation of the page's content */
    volatile uint32_t page_begun[PAGES], page_done[PAGES];
    /* of a snapshot that exists for certain */
    volatile uint32_t saved[SNAPSHOTS][PAGES];
    /* odd: creating / created, even: deleting / deleted */
    volatile uint32_t snapshot_begun[SNAPSHOTS], snapshot_done[SNAPSHOTS];
    volatile int reverting;                                       /* 1 + snapshot during a revert */
};

static void fill_page(uint64_t *page, uint64_t number, uint32_t generation)
{
    for (unsigned i = 0; i < 512; i++)
        page[i] = number << 32 | generation;
}

static void child_snapshot(pcow_image *image, struct journal *j, unsigned s)
{
    char name[8];

    snprintf(name, sizeof name, "s%u", s);
    j->snapshot_begun[s]++;
    if (j->snapshot_begun[s] % 2) {
        memcpy((void *)j->saved[s], (void *)j->page_done, sizeof j->page_done);
        if (pcow_snapshot_create(image, name, NULL))
            _exit(2);
    } else if (pcow_snapshot_delete(image, name, NULL, NULL)) {
        _exit(3);
    }
    j->snapshot_done[s] = j->snapshot_begun[s];
}

static void child_revert(pcow_image *image, struct journal *j, unsigned s)
{
    char name[8];

    if (j->snapshot_done[s] % 2 == 0)
        return;
    snprintf(name, sizeof name, "s%u", s);
    j->reverting = 1 + (int)s;
    if (pcow_snapshot_revert(image, name, NULL))
        _exit(4);
    memcpy((void *)j->page_begun, (void *)j->saved[s], sizeof j->page_begun);
    memcpy((void *)j->page_done, (void *)j->saved[s], sizeof j->page_done);
    j->reverting = 0;
}

static void child(const char *path, struct journal *j, enum pcow_engine engine)
{
    struct pcow_map_options options = {.engine = engine, .serves_sigbus = serve_bus()};
    uint64_t seed = j->seed;
    pcow_image *image;
    pcow_map *map;
    uint64_t *memory;

    if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, NULL)
        || pcow_map_create(image, &options, &map, NULL))
        _exit(1);
    memory = pcow_map_address(map);
    for (uint32_t generation = (uint32_t)(seed % 1000000) * 100 + 1;; generation++) {
        uint64_t page = random_next(&seed) % PAGES, dice = random_next(&seed) % 400;

        if (dice < 3)
            child_snapshot(image, j, (unsigned)(random_next(&seed) % SNAPSHOTS));
        else if (dice == 3)
            child_revert(image, j, (unsigned)(random_next(&seed) % SNAPSHOTS));
        j->page_begun[page] = generation;
        fill_page(memory + page * 512, page, generation);
        j->page_done[page] = generation;
    }
}

/* The page holds the old or the new content, word by word: a store of 8 bytes is never torn. */
static void check_page(const uint64_t *page, uint64_t number, uint32_t old, uint32_t new,
                       const char *what)
{
    for (unsigned i = 0; i < 512; i++)
        if (page[i] != (old ? number << 32 | old : 0) && page[i] != (new ? number << 32 | new : 0))
            fail_msg("%s: page %llu word %u is %llx, neither generation %u nor %u", what,
                     (unsigned long long)number, i, (unsigned long long)page[i], old, new);
}

static void check_content(pcow_image *image, const volatile uint32_t *old,
                          const volatile uint32_t *new, const char *what)
{
    uint64_t *bytes = malloc(IMAGE_SIZE);

    assert_non_null(bytes);
    MUST(pcow_read(image, 0, bytes, IMAGE_SIZE, &error));
    for (uint64_t page = 0; page < PAGES; page++)
        check_page(bytes + page * 512, page, old[page], new[page], what);
    free(bytes);
}

static void check_snapshots(const char *path, struct journal *j)
{
    for (unsigned s = 0; s < SNAPSHOTS; s++) {
        pcow_image *view;
        char name[8];
        int ret;

        snprintf(name, sizeof name, "s%u", s);
        ret = pcow_open(path, 0, name, &view, NULL);
        if (j->snapshot_begun[s] == j->snapshot_done[s])
            assert_int_equal(ret, j->snapshot_done[s] % 2 ? 0 : -ENOENT);
        if (ret)
            continue;
        check_content(view, j->saved[s], j->saved[s], name);
        pcow_close(view);
        /* Interrupted: what is there now is what counts for the next round. */
        j->snapshot_begun[s] |= 1;
    }
    for (unsigned s = 0; s < SNAPSHOTS; s++) {
        pcow_image *view;
        char name[8];

        snprintf(name, sizeof name, "s%u", s);
        j->snapshot_begun[s] = pcow_open(path, 0, name, &view, NULL) == 0 ? 1 : 0;
        if (j->snapshot_begun[s])
            pcow_close(view);
        j->snapshot_done[s] = j->snapshot_begun[s];
    }
}

/*
 * An interrupted revert has happened or not; the first page that tells decides, and all the others
 * must agree.
 */
static bool revert_happened(pcow_image *image, const struct journal *j)
{
    const volatile uint32_t *saved = j->saved[j->reverting - 1];
    uint64_t words[512];

    for (uint64_t page = 0; page < PAGES; page++) {
        if (saved[page] == j->page_done[page])
            continue;
        MUST(pcow_read(image, page * 4096, words, sizeof words, &error));
        return words[0] == (saved[page] ? page << 32 | saved[page] : 0);
    }
    return true;
}

static void round_of(const char *path, struct journal *j, enum pcow_engine engine, uint64_t *seed)
{
    struct pcow_check_result result;
    pcow_image *image;
    int status;
    pid_t pid;

    j->seed = random_next(seed) | 1;
    pid = fork();
    if (pid == 0) {
        child(path, j, engine);
        _exit(0);
    }
    usleep((useconds_t)(2000 + random_next(seed) % 20000));
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    /* Remains of what was interrupted may be there; damage may not. */
    MUST(pcow_check(path, 0, NULL, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
    image = must_open(path, 0);
    if (j->reverting && revert_happened(image, j)) {
        memcpy((void *)j->page_begun, (void *)j->saved[j->reverting - 1], sizeof j->page_begun);
        memcpy((void *)j->page_done, (void *)j->saved[j->reverting - 1], sizeof j->page_done);
    }
    j->reverting = 0;
    check_content(image, j->page_done, j->page_begun, "active");
    pcow_close(image);
    check_snapshots(path, j);
    /* A writer tidies up; from then on it is clean, and everything still reads the same. */
    image = must_open(path, PCOW_OPEN_WRITE);
    check_content(image, j->page_done, j->page_begun, "after opening for writing");
    for (uint64_t page = 0; page < PAGES; page++)
        if (j->page_begun[page] != j->page_done[page]) {
            uint64_t words[512];

            fill_page(words, page, j->page_begun[page]);
            MUST(pcow_write(image, page * 4096, words, sizeof words, &error));
            j->page_done[page] = j->page_begun[page];
        }
    pcow_close(image);
}

static void run_crashes(enum pcow_engine engine)
{
    struct journal *j =
        mmap(NULL, sizeof *j, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t seed = random_seed();
    unsigned rounds = test_steps(150);
    const char *path = scratch("crash.pcow");

    assert_ptr_not_equal(j, MAP_FAILED);
    print_message("seed %#llx, %u kills\n", (unsigned long long)seed, rounds);
    pcow_close(must_create(path, IMAGE_SIZE, 16 * KIB, NULL));
    for (unsigned i = 0; i < rounds; i++)
        round_of(path, j, engine, &seed);
    munmap(j, sizeof *j);
}

static void test_kill_signal_engine(void **state)
{
    (void)state;
    run_crashes(PCOW_ENGINE_SIGNAL);
}

static void test_kill_minor_engine(void **state)
{
    (void)state;
    run_crashes(PCOW_ENGINE_MINOR);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_kill_signal_engine, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_kill_minor_engine, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
