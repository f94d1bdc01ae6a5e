/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Pages that the kernel has told to be lost: the file has something in their place, here the data
 * itself, which nobody may see.
 */
#include "support.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "image/image.h"
#include "monitor/monitor.h"
#include "operations/operations.h"
#include "persist/copy.h"
#include "persist/observer.h"

#define PAGE 4096u
#define LOST (MIB + 8 * PAGE)                  /* in the middle of a slab and of a cluster */

static void serve(int number, siginfo_t *info, void *context)
{
    (void)number;
    if (!pcow_serve_sigbus(info, context))
        abort();
}

static int look(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    (void)observation;
    return 0;
}

/* An image with 4 MiB of data. */
static pcow_map *map_in_class(struct observer *observer, enum pcow_engine engine,
                              pcow_image **image)
{
    static unsigned char bytes[4 * MIB];
    struct sigaction action = {.sa_sigaction = serve,
                               .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    struct pcow_map_options options = {.engine = engine};
    pcow_map *map;

    sigemptyset(&action.sa_mask);
    assert_int_equal(sigaction(SIGBUS, &action, NULL), 0);         /* in place of that of cmocka */
    memset(bytes, 3, sizeof bytes);
    unlink(scratch("t"));
    *image = must_create(scratch("t"), 8 * MIB, 64 * KIB, NULL);
    MUST(pcow_write(*image, 0, bytes, sizeof bytes, &error));
    pcow_close(*image);
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, observer, image, &error));
    MUST(pcow_map_create(*image, &options, &map, &error));
    return map;
}

static void assert_lost_alone(pcow_image *image, pcow_map *map)
{
    const unsigned char *memory = pcow_map_address(map);
    struct pcow_map_stats before, after;
    unsigned char byte[PAGE];

    for (size_t page = 0; page < 4 * MIB; page += PAGE) {
        if (page == LOST)
            continue;
        assert_true(copy_touch(memory + page));
        assert_int_equal(memory[page + 1], 3);
    }
    /*
     * Nothing may be loaded there: what may, and is SIGBUS, KVM takes for a page that has to be
     * waited for.
     */
    pcow_map_get_stats(map, &before);
    assert_false(copy_touch(memory + LOST));
    assert_false(copy_touch(memory + LOST + PAGE - 1));
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.read_traps, before.read_traps + 2);
    MUST_FAIL(-EIO, pcow_read(image, LOST, byte, PAGE, &error));
    MUST_FAIL(-EIO, pcow_read(image, LOST + PAGE - 1, byte, 2, &error));
    MUST(pcow_read(image, LOST + PAGE, byte, PAGE, &error));
    MUST(pcow_read(image, LOST - PAGE, byte, PAGE, &error));
}

/*
 * A flush of lines traps as a load does: only what may be loaded from is among what it walks over.
 */
static void assert_flushes(pcow_map *map)
{
    const struct page_set *writable = &map->slabs[LOST >> SLAB_BITS].writable;

    assert_false(page_set_has(writable, LOST / PAGE % PAGES_PER_SLAB));
    assert_true(page_set_has(writable, LOST / PAGE % PAGES_PER_SLAB + 1));
    MUST(pcow_map_flush(map, 0, 8 * MIB, &error));
    MUST_FAIL(-EIO, pcow_map_resolve(map, LOST, PAGE, true, &error));
}

/* Whatever maps or copies it later: a snapshot, stores around it, the end of the snapshot. */
static void stays_lost(enum pcow_persistence class)
{
    struct observer observer = {.persistence = class, .look = look};

    FOR_EACH_ENGINE(engine)
    {
        pcow_image *image;
        pcow_map *map = map_in_class(&observer, engine, &image);
        volatile unsigned char *memory = pcow_map_address(map);

        memory[LOST] = 4;
        memory[LOST + PAGE] = 4;
        MUST(pcow_map_lose(map, LOST + 5, &error));
        MUST(pcow_map_lose(map, LOST, &error));
        assert_flushes(map);
        assert_lost_alone(image, map);
        assert_int_equal(kernel_store((void *)(memory + LOST), 1), -1);
        MUST_FAIL(-EBUSY, pcow_write(image, LOST + 1, "x", 1, &error));
        MUST(pcow_map_restore(map, LOST, PAGE, &error));
        assert_flushes(map);
        assert_lost_alone(image, map);
        /* As a store to another page of its cluster may. */
        chain_claim(image->chain, LOST >> SLAB_BITS);
        MUST(layout_map_own(map, LOST >> SLAB_BITS, LOST / PAGE - 1, 3));
        chain_release(image->chain, LOST >> SLAB_BITS);
        assert_flushes(map);
        assert_lost_alone(image, map);
        MUST(pcow_snapshot_create(image, "s", &error));
        assert_lost_alone(image, map);
        MUST_FAIL(-EIO, pcow_map_resolve(map, LOST, PAGE, true, &error));
        for (unsigned round = 5; round < 8; round++)
            for (size_t page = 0; page < 4 * MIB; page += PAGE)
                if (page != LOST)
                    memory[page] = (unsigned char)round;
        assert_lost_alone(image, map);
        MUST(pcow_snapshot_delete(image, "s", NULL, &error));
        assert_flushes(map);
        assert_lost_alone(image, map);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("t"));
    }
}

static void test_it_stays_lost(void **state)
{
    (void)state;
    stays_lost(PCOW_PERSISTENCE_PAGE_CACHE);
    stays_lost(PCOW_PERSISTENCE_PMEM);
}

/*
 * The program is linked so that its calls of mmap() pass by here: a system call looks at a page
 * after each, as any thread might.
 */
static struct {
    const unsigned char *volatile page;
    int file;
    volatile unsigned looked, seen;
} look_at;

void *__real_mmap64(void *address, size_t length, int protection, int flags, int file,
                    off_t offset);
void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int file,
                    off_t offset);

void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int file, off_t offset)
{
    void *ret = __real_mmap64(address, length, protection, flags, file, offset);
    int saved_errno = errno;

    if (look_at.page) {
        look_at.looked++;
        look_at.seen += pwrite(look_at.file, (const void *)look_at.page, 1, 0) == 1;
    }
    errno = saved_errno;
    return ret;
}

/* Not for a moment either, while the memory around it is mapped anew. */
static void test_it_never_shows(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};
    pcow_image *image;
    pcow_map *map = map_in_class(&observer, PCOW_ENGINE_SIGNAL, &image);
    unsigned char *memory = pcow_map_address(map);

    (void)state;
    look_at.file = memfd_create("seen", MFD_CLOEXEC);
    assert_true(look_at.file >= 0);
    MUST(pcow_map_lose(map, LOST, &error));
    look_at.page = memory + LOST;
    MUST(pcow_map_restore(map, LOST + PAGE, PAGE, &error));
    MUST(pcow_snapshot_create(image, "s", &error));
    for (size_t page = 0; page < 2 * MIB; page += PAGE)
        if (page != LOST)
            *(volatile unsigned char *)(memory + page) = 3;
    look_at.page = NULL;
    assert_true(look_at.looked > 2);
    assert_int_equal(look_at.seen, 0);
    close(look_at.file);
    assert_lost_alone(image, map);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* Blocks that were given back may be used for something else. */
static void test_its_blocks_are_used_again(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};
    struct pcow_extent extent;
    unsigned char *window;
    pcow_image *image;
    pcow_map *map = map_in_class(&observer, PCOW_ENGINE_SIGNAL, &image);

    (void)state;
    MUST(pcow_get_extent(image, LOST, PAGE, &extent, &error));
    MUST(pcow_map_lose(map, LOST, &error));
    window = file_address(&image->file, extent.file_offset);
    assert_non_null(window);
    assert_false(copy_touch(window));
    assert_int_equal(file_punch(&image->file, extent.file_offset, PAGE), 0);
    assert_true(copy_touch(window));
    assert_int_equal(window[0], 0);
    window[0] = 9;
    MUST(pcow_map_restore(map, LOST, PAGE, &error));
    assert_int_equal(((unsigned char *)pcow_map_address(map))[LOST], 9);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* Where the kernel remembers it, nothing is done. */
static void test_class_volatile(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = look};
    pcow_image *image;
    pcow_map *map = map_in_class(&observer, PCOW_ENGINE_SIGNAL, &image);

    (void)state;
    MUST(pcow_map_lose(map, LOST, &error));
    assert_true(copy_touch((unsigned char *)pcow_map_address(map) + LOST));
    MUST(pcow_map_lose(map, 6 * MIB, &error));
    MUST_FAIL(-EINVAL, pcow_map_lose(map, 8 * MIB, &error));
    pcow_map_destroy(map);
    pcow_close(image);
}

static void test_too_many(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};
    pcow_image *image;
    pcow_map *map = map_in_class(&observer, PCOW_ENGINE_SIGNAL, &image);
    uint64_t page;

    (void)state;
    for (page = 0; page < MAX_LOST_PAGES; page++)
        MUST(pcow_map_lose(map, page * 2 * PAGE, &error));
    MUST_FAIL(-ENOSPC, pcow_map_lose(map, page * 2 * PAGE, &error));
    assert_true(copy_touch((unsigned char *)pcow_map_address(map) + page * 2 * PAGE));
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_it_stays_lost, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_it_never_shows, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_its_blocks_are_used_again, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_class_volatile, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_too_many, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
