/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * SIGBUS: what an access that fails gets, and memory that turns out to be unreadable while the
 * library copies it.
 */
#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "image/image.h"
#include "persist/copy.h"
#include "persist/persist.h"

/* ---- an access of the guest ------------------------------------------------------------------ */

extern const char guest_store[], guest_store_failed[];

static siginfo_t seen;
static uintptr_t seen_at;

static void __attribute__((noinline, noclone)) store(unsigned char *where)
{
    __asm__ volatile(".globl guest_store\n"
                     ".globl guest_store_failed\n"
                     "guest_store: movb $7, (%0)\n"
                     "guest_store_failed:\n"
                     : : "r"(where) : "memory");
}

static void skip_store(int number, siginfo_t *info, void *context)
{
    greg_t *pc = &((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];

    (void)number;
    if (pcow_serve_sigbus(info, context))
        return;
    seen = *info;
    seen_at = (uintptr_t)*pc;
    *pc = (greg_t)(uintptr_t)guest_store_failed;
}

static void serve(int number, siginfo_t *info, void *context)
{
    (void)number;
    if (!pcow_serve_sigbus(info, context))
        abort();
}

static void install(void (*handler)(int, siginfo_t *, void *))
{
    struct sigaction action = {.sa_sigaction = handler,
                               .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};

    sigemptyset(&action.sa_mask);
    assert_int_equal(sigaction(SIGBUS, &action, NULL), 0);
}

static int pool_setup(void **state)
{
    return pool_mount(state, "4m");
}

/* Told at the instruction, with the reason: a full pool. */
static void test_full_pool_is_told_at_the_store(void **state)
{
    const struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL};
    char path[600];
    unsigned char *memory;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
    image = must_create(path, 8 * MIB, 0, NULL);
    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
    pool_fill();
    install(skip_store);
    memset(&seen, 0, sizeof seen);
    store(memory + 5 * MIB + 3);
    signal(SIGBUS, SIG_DFL);
    assert_int_equal(seen.si_code, SI_QUEUE);
    assert_int_equal(seen.si_pid, getpid());
    assert_int_equal(seen.si_errno, ENOSPC);
    assert_ptr_equal(seen.si_value.sival_ptr, memory + 5 * MIB + 3);
    assert_int_equal(seen_at, (uintptr_t)guest_store);
    assert_int_equal(memory[5 * MIB + 3], 0);
    pcow_map_destroy(map);
    pcow_close(image);
}

/*
 * An image on a base of 4 MiB that is full of data; the base is closed, so that the file may be cut
 * short.
 */
static pcow_map *map_on_base(pcow_image **image)
{
    unsigned char *data = malloc(4 * MIB);

    assert_non_null(data);
    memset(data, 3, 4 * MIB);
    *image = must_create(scratch("base.pcow"), 4 * MIB, 0, NULL);
    MUST(pcow_write(*image, 0, data, 4 * MIB, &error));
    pcow_close(*image);
    free(data);
    *image = must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
    return must_map_by(*image, PCOW_ENGINE_SIGNAL, 0);
}

/* A base that was cut short: another reason. */
static void test_unreadable_base_is_told_at_the_store(void **state)
{
    pcow_image *image;
    pcow_map *map = map_on_base(&image);
    unsigned char *memory = pcow_map_address(map);

    (void)state;
    assert_int_equal(truncate(scratch("base.pcow"), 4 * (off_t)PCOW_SLAB_SIZE), 0);
    install(skip_store);
    memset(&seen, 0, sizeof seen);
    store(memory + 3 * MIB);
    signal(SIGBUS, SIG_DFL);
    assert_int_equal(seen.si_errno, EIO);
    assert_int_equal(seen_at, (uintptr_t)guest_store);
    pcow_map_destroy(map);
    pcow_close(image);
}

/*
 * Who copies more than the page that is stored to meets it, in a trap or in the thread: what can be
 * read is served nevertheless. So it is in a program that has no handler of its own.
 */
static void store_to_what_can_be_read(bool own_handler)
{
    struct sigaction after;
    unsigned char *memory;
    pcow_image *image;
    pcow_map *map;

    signal(SIGBUS, SIG_DFL);
    map = map_on_base(&image);
    memory = pcow_map_address(map);
    /* Of the second slab the first half is left. */
    assert_int_equal(truncate(scratch("base.pcow"), 4 * (off_t)PCOW_SLAB_SIZE + MIB), 0);
    if (own_handler)
        install(serve);
    for (size_t page = 0; page < 250; page++) {
        memory[2 * MIB + page * 4096] = 5;
        usleep(1000);
    }
    usleep(200000);
    MUST_FAIL(-EIO, pcow_map_resolve(map, 3 * MIB, 64 * KIB, true, &error));
    for (size_t page = 0; page < 250; page++) {
        assert_int_equal(memory[2 * MIB + page * 4096], 5);
        assert_int_equal(memory[2 * MIB + page * 4096 + 1], 3);
    }
    pcow_map_destroy(map);
    pcow_close(image);
    assert_int_equal(sigaction(SIGBUS, NULL, &after), 0);
    assert_int_equal(after.sa_handler == SIG_DFL, !own_handler);
    unlink(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

static void test_neighbours_that_cannot_be_read(void **state)
{
    (void)state;
    store_to_what_can_be_read(true);
    store_to_what_can_be_read(false);
}

/* ---- memory that nobody accesses ------------------------------------------------------------- */

static const void *in_window(struct pcow_image *image, uint64_t offset)
{
    const void *address = file_address(&image->file, offset);

    assert_non_null(address);
    return address;
}

/* The kernel names it by an address that the guest does not know: what does the guest call it? */
static void test_windows_are_found(void **state)
{
    struct pcow_extent extent;
    uint64_t offset = 0, place;
    pcow_image *image;
    pcow_map *map = map_on_base(&image);
    unsigned char *memory = pcow_map_address(map);

    (void)state;
    assert_true(pcow_map_find(map, memory + 3 * MIB + 5, &offset));
    assert_int_equal(offset, 3 * MIB + 5);
    MUST(pcow_get_extent(image, 3 * MIB, 4096, &extent, &error));
    place = extent.file_offset;
    assert_true(pcow_map_find(map, (const char *)in_window(image->base, place) + 7, &offset));
    assert_int_equal(offset, 3 * MIB + 7);
    assert_false(pcow_map_find(map, in_window(image->base, 0), &offset));
    assert_false(pcow_map_find(map, &offset, &offset));
    /* it is copied: the base's page is nothing that the guest sees any more */
    memory[3 * MIB] = 4;
    assert_false(pcow_map_find(map, in_window(image->base, place), &offset));
    MUST(pcow_get_extent(image, 3 * MIB, 4096, &extent, &error));
    assert_true(pcow_map_find(map, in_window(image, extent.file_offset), &offset));
    assert_int_equal(offset, 3 * MIB);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* ---- the library's own copies ---------------------------------------------------------------- */

/*
 * A file that ends in the middle of what is copied stands for memory that has lost its content: a
 * load gets SIGBUS, and nobody knew.
 */
static void test_copies_of_unreadable_memory_fail(void **state)
{
    static const struct {
        size_t offset, length;
    } copy[] = {{0, 4096}, {0, 8192},  {0, 12288}, {0, 65536},    {0, 2 * MIB},
                {8, 8192}, {8, 65536}, {64, 64},   {0, 4096 * 17}};
    int fd = open(scratch("source"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    char *from = mmap(NULL, 4 * MIB, PROT_READ, MAP_SHARED, fd, 0);
    char *to = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)state;
    assert_true(fd >= 0 && from != MAP_FAILED && to != MAP_FAILED);
    install(serve);
    for (enum pcow_persistence class = PCOW_PERSISTENCE_VOLATILE; class <= PCOW_PERSISTENCE_PMEM;
         class ++)
        for (size_t i = 0; i < sizeof copy / sizeof copy[0]; i++) {
            size_t pages = (copy[i].offset + copy[i].length + 4095) / 4096;
            struct persist persist;

            persist_init(&persist, class, NULL);
            for (size_t good = 0; good <= pages; good += pages > 32 ? 37 : 1) {
                assert_int_equal(ftruncate(fd, (off_t)good * 4096), 0);
                assert_int_equal(persist_copy(&persist, to, from + copy[i].offset, copy[i].length),
                                 good == pages ? 0 : -EIO);
            }
            assert_int_equal(ftruncate(fd, 4 * MIB), 0);
            assert_int_equal(pwrite(fd, "end", 4, (off_t)(copy[i].offset + copy[i].length - 4)), 4);
            assert_int_equal(persist_copy(&persist, to, from + copy[i].offset, copy[i].length), 0);
            assert_memory_equal(to + copy[i].length - 4, "end", 4);
        }
    signal(SIGBUS, SIG_DFL);
    munmap(from, 4 * MIB);
    munmap(to, 4 * MIB);
    close(fd);
}

/* So is the page that is copied to, a bad block that was given to the file for instance. */
static void test_copies_to_lost_memory_fail(void **state)
{
    static const size_t length[] = {4096, 8192, 65536};
    int fd = open(scratch("target"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    char *to = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *from = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)state;
    assert_true(fd >= 0 && from != MAP_FAILED && to != MAP_FAILED);
    install(serve);
    for (enum pcow_persistence class = PCOW_PERSISTENCE_VOLATILE; class <= PCOW_PERSISTENCE_PMEM;
         class ++)
        for (size_t i = 0; i < sizeof length / sizeof length[0]; i++)
            for (size_t good = 0; good <= length[i]; good += 4096) {
                struct persist persist;

                persist_init(&persist, class, NULL);
                assert_int_equal(ftruncate(fd, (off_t)good), 0);
                assert_int_equal(persist_copy(&persist, to, from, length[i]),
                                 good == length[i] ? 0 : -EIO);
            }
    signal(SIGBUS, SIG_DFL);
    munmap(from, MIB);
    munmap(to, MIB);
    close(fd);
}

/* So is a page that is only to be mapped before somebody needs it. */
static void test_touch_of_unreadable_memory_fails(void **state)
{
    int fd = open(scratch("touched"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    char *memory = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);

    (void)state;
    assert_true(fd >= 0 && memory != MAP_FAILED);
    install(serve);
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_true(copy_touch(memory));
    assert_false(copy_touch(memory + 4096));
    assert_int_equal(ftruncate(fd, 8192), 0);
    assert_true(copy_touch(memory + 4096));
    signal(SIGBUS, SIG_DFL);
    munmap(memory, 8192);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_full_pool_is_told_at_the_store, pool_setup,
                                        pool_unmount),
        cmocka_unit_test_setup_teardown(test_unreadable_base_is_told_at_the_store, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_neighbours_that_cannot_be_read, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_windows_are_found, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_copies_of_unreadable_memory_fail, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_copies_to_lost_memory_fail, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_touch_of_unreadable_memory_fails, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
