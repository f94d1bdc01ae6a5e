/* SPDX-License-Identifier: BSD-3-Clause */
/* Engine "minor": what the kernel may do, or be told to do, to a slab into which pages are let. */
#include "scattered.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25               /* Linux 6.1 */
#endif

/* That a page is not let in is all that keeps stores from what is not own. */
static void test_what_the_kernel_does_to_it(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_minor(image);
    struct pcow_map_stats before, after;
    unsigned char *memory;
    uint64_t in_file;
    void *other;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    /* With neighbours, of which it could become a part. */
    for (unsigned slab = 0; slab < 3; slab++)
        begin_slab(map, slab);
    in_file = chain_find(image, 1, 5 * CLUSTER / PCOW_PAGE_SIZE, 1).offset / PCOW_SLAB_SIZE
              * PCOW_SLAB_SIZE;
    assert_int_equal(fallocate(image->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                               (off_t)(in_file + 10 * CLUSTER), CLUSTER),
                     0);
    other = mmap(NULL, PCOW_SLAB_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, image->file.fd,
                 (off_t)in_file);
    assert_ptr_not_equal(other, MAP_FAILED);
    /* A huge page for the file slab, if there is one to be had. */
    if (madvise(other, PCOW_SLAB_SIZE, MADV_COLLAPSE))
        print_message("no huge page: %s\n", strerror(errno));
    madvise(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, MADV_COLLAPSE);
    munmap(other, PCOW_SLAB_SIZE);
    madvise(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, MADV_COLD);
    assert_int_equal(mprotect(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, PROT_READ), 0);
    assert_int_equal(mprotect(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, PROT_READ | PROT_WRITE), 0);
    pcow_map_get_stats(map, &before);
    for (unsigned cluster = 7; cluster < 17; cluster++)
        memory[PCOW_SLAB_SIZE + cluster * CLUSTER] = 1;
    pcow_map_get_stats(map, &after);
    /* how many: a sequence brings in more and more at a time */
    assert_true(after.write_traps > before.write_traps);
    for (unsigned cluster = 7; cluster < 17; cluster++)
        must_hold(image, PCOW_SLAB_SIZE + cluster * CLUSTER, 1);
    /*
     * Entries that are gone, as after swapping: what is own is let in again, by loads too, and
     * stays what it was.
     */
    assert_true(is_minor(map, 2));
    assert_int_equal(madvise(memory + 2 * PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, MADV_DONTNEED), 0);
    assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 5 * CLUSTER + 3], 1);
    assert_true(is_minor(map, 2));
    memory[2 * PCOW_SLAB_SIZE + 2 * CLUSTER + 4]++;
    must_hold(image, 2 * PCOW_SLAB_SIZE + 2 * CLUSTER + 3, 1);
    must_hold(image, 2 * PCOW_SLAB_SIZE + 2 * CLUSTER + 4, 1);
    /* A page that was taken from the file behind our back: as in any mapping of it. */
    in_file = chain_find(image, 2, 5 * CLUSTER / PCOW_PAGE_SIZE, 1).offset;
    assert_int_equal(fallocate(image->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                               (off_t)in_file, CLUSTER),
                     0);
    assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 5 * CLUSTER + 3], 0);
    assert_false(is_minor(map, 2));
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static int setup_huge(void **state)
{
    return pool_mount(state, "256m,huge=always");
}

/*
 * Whoever may (process_madvise()) can have the kernel map a huge page of the file there, which
 * would let in all of it.
 */
static void test_collapse(void **state)
{
    char path[600];
    pcow_image *image;
    pcow_map *map;
    unsigned char *memory;

    (void)state;
    snprintf(path, sizeof path, "%s/image", pool_directory());
    image = must_create(path, SIZE, CLUSTER, NULL);
    map = map_minor(image);
    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 1);
    madvise(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, MADV_COLLAPSE);
    for (unsigned cluster = 7; cluster < 17; cluster++)
        memory[PCOW_SLAB_SIZE + cluster * CLUSTER] = 1;
    for (unsigned cluster = 7; cluster < 17; cluster++)
        must_hold(image, PCOW_SLAB_SIZE + cluster * CLUSTER, 1);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path);
    assert_int_equal(unlink(path), 0);
}

/* Userfaultfd does not follow it, so it must not have what is not own. */
static void test_child(void **state)
{
    (void)state;
    for (unsigned write = 0; write < 2; write++) {
        pcow_image *image = must_create_overlay(SIZE, BASE);
        pcow_map *map = map_minor(image);
        volatile unsigned char *memory;
        int status;
        pid_t child;

        if (!map)
            skip();
        memory = pcow_map_address(map);
        begin_slab(map, 0);
        child = fork();
        if (child == 0) {
            /* In place of cmocka's, to which the library's leads. */
            signal(SIGSEGV, SIG_DFL);
            signal(SIGBUS, SIG_DFL);
            if (write)
                memory[9 * CLUSTER] = 1;
            _exit(memory[9 * CLUSTER] == BASE ? 0 : 1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        assert_int_equal(memory[9 * CLUSTER], BASE);
        pcow_map_destroy(map);
        pcow_close(image);
        unlink(scratch("top.pcow"));
        unlink(scratch("base.pcow"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_the_kernel_does_to_it, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_collapse, setup_huge, pool_unmount),
        cmocka_unit_test_setup_teardown(test_child, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
