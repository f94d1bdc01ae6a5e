/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Class page-cache: a system call has looked up a page of the guest, and stores to it later. The
 * page lies in a large folio, which the kernel drops if it is to have a hole, see image/remains.h.
 * Needs root, to mount ext4 and XFS.
 */
#include "late_call.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "image/remains.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"

#define PAGES 41u                      /* that are there, from the first on */
#define CALLED 34u                     /* that the call stores to */
#define REMAINS 45u                    /* of those with what a killed writer has left */
#define MOST_LOOKS 5000u
#define LEFT 0xee

static uint64_t slab_offset;           /* of the slab that the guest stores to */
static unsigned fails;                 /* writes to it: one is short, the next has no space */

static unsigned syncs;

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
ssize_t __real_pwrite64(int fd, const void *from, size_t length, off_t offset);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off_t offset);

ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off_t offset)
{
    unsigned left = __atomic_load_n(&fails, __ATOMIC_SEQ_CST);

    if (left && (uint64_t)offset / PCOW_SLAB_SIZE == slab_offset / PCOW_SLAB_SIZE) {
        __atomic_store_n(&fails, left - 1, __ATOMIC_SEQ_CST);
        if (left == 2)
            return __real_pwrite64(fd, from, length / 2, offset);
        errno = ENOSPC;
        return -1;
    }
    return __real_pwrite64(fd, from, length, offset);
}

int __wrap_fdatasync(int fd)
{
    __atomic_fetch_add(&syncs, 1, __ATOMIC_RELAXED);
    return __real_fdatasync(fd);
}

struct guest {
    pcow_image *image;
    pcow_map *map;
    uint8_t *memory;
};

static int ext4_mount(void **state)
{
    return pool_mount_disk(state, "mkfs.ext4 -q -b 4096 -m 0", "200M");
}

static int xfs_mount(void **state)
{
    return pool_mount_disk(state, "mkfs.xfs -q", "300M");
}

/* Where the file has the slab whose pages are of this byte. */
static uint64_t find_slab(const char *path, unsigned char with)
{
    unsigned char page[PCOW_PAGE_SIZE], expected[PCOW_PAGE_SIZE];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t at = 0;

    memset(expected, with, sizeof expected);
    assert_true(fd >= 0);
    do {
        at += PCOW_SLAB_SIZE;
        assert_int_equal(pread(fd, page, sizeof page, (off_t)at), sizeof page);
    } while (memcmp(page, expected, sizeof page));
    close(fd);
    return at;
}

/* Remains behind what is there; and the page cache has all in folios as large as they come. */
static void leave_remains(const char *path)
{
    const char *copy = path_in_pool("copy.pcow");
    unsigned char *piece = malloc(PCOW_SLAB_SIZE);
    int from = open(path, O_RDONLY | O_CLOEXEC),
        to = open(copy, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    uint64_t at = 0;
    ssize_t got;

    assert_non_null(piece);
    assert_true(from >= 0 && to >= 0);
    while ((got = pread(from, piece, PCOW_SLAB_SIZE, (off_t)at)) > 0) {
        if (at == slab_offset) {
            memset(piece + PAGES * PCOW_PAGE_SIZE, LEFT,
                   PCOW_SLAB_SIZE - PAGES * PCOW_PAGE_SIZE);
            got = PCOW_SLAB_SIZE;
        }
        assert_int_equal(pwrite(to, piece, (size_t)got, (off_t)at), got);
        at += (uint64_t)got;
    }
    assert_int_equal(fsync(to), 0);
    close(from);
    close(to);
    assert_int_equal(rename(copy, path), 0);
    free(piece);
}

static struct guest map_image(void)
{
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL};
    struct guest guest = {.image = must_open(path_in_pool("image.pcow"), PCOW_OPEN_WRITE)};

    MUST(pcow_map_create(guest.image, &options, &guest.map, &error));
    guest.memory = pcow_map_address(guest.map);
    return guest;
}

/* with_snapshot: below it all pages are there. */
static struct guest begin(bool with_snapshot)
{
    const char *path = path_in_pool("image.pcow");
    pcow_image *image = must_create(path, 2 * PCOW_SLAB_SIZE, 0, NULL);
    unsigned char *data = malloc(PCOW_SLAB_SIZE);

    assert_non_null(data);
    if (with_snapshot) {
        memset(data, 0x11, PCOW_SLAB_SIZE);
        MUST(pcow_write(image, 0, data, PCOW_SLAB_SIZE, &error));
        MUST(pcow_snapshot_create(image, "first", &error));
    }
    memset(data, 0x55, PCOW_SLAB_SIZE);
    MUST(pcow_write(image, 0, data, PAGES * PCOW_PAGE_SIZE, &error));
    pcow_close(image);
    free(data);
    slab_offset = find_slab(path, 0x55);
    leave_remains(path);
    return map_image();
}

/*
 * The thread that works ahead does nothing until then. What is dirty ext4 would not drop; it may be
 * written at any time.
 */
static void begin_call(struct late_call *call, const struct guest *guest)
{
    turnstile_take(guest->map);
    MUST(pcow_map_resolve(guest->map, CALLED * PCOW_PAGE_SIZE, PCOW_PAGE_SIZE, true, &error));
    late_call_begin(call, guest->memory + CALLED * PCOW_PAGE_SIZE);
    assert_int_equal(fdatasync(guest->image->file.fd), 0);
    turnstile_release(guest->map);
}

/* What it has stored is found in memory, and what was beside it. */
static void end_call(struct late_call *call, const struct guest *guest)
{
    late_call_end(call, 0x22);
    assert_int_equal(guest->memory[CALLED * PCOW_PAGE_SIZE], 0x22);
    assert_int_equal(guest->memory[(CALLED + 1) * PCOW_PAGE_SIZE], 0x55);
}

static void end(struct guest *guest)
{
    pcow_map_destroy(guest->map);
    pcow_close(guest->image);
    must_be_clean(path_in_pool("image.pcow"));
}

static bool is_hole(const struct guest *guest, unsigned page)
{
    return file_is_hole(&guest->image->file, slab_offset + page * PCOW_PAGE_SIZE, PCOW_PAGE_SIZE);
}

static bool is_given_back(const struct guest *guest)
{
    return is_hole(guest, REMAINS);
}

static bool was_looked_at(const struct guest *guest)
{
    uint64_t slab = slab_offset / PCOW_SLAB_SIZE;
    uint64_t marks = __atomic_load_n(&guest->image->remains[slab / 64], __ATOMIC_ACQUIRE);

    return is_given_back(guest)
           || ((marks >> (slab % 64) & 1) && !remains_are_due(guest->image));
}

static void wait_until(bool (*is_so)(const struct guest *guest), const struct guest *guest)
{
    static const struct timespec moment = {0, 1000000};

    for (unsigned looks = 0; !is_so(guest); looks++) {
        assert_true(looks < MOST_LOOKS);
        nanosleep(&moment, NULL);
    }
}

/* Before the first store to the slab. */
static void test_given_back(void **state)
{
    struct guest guest = begin(false);
    struct late_call call;

    (void)state;
    begin_call(&call, &guest);
    assert_true(is_given_back(&guest));
    end_call(&call, &guest);
    end(&guest);
}

/* By the thread, of a slab that nobody stores to. */
static void test_given_back_ahead(void **state)
{
    struct guest guest = begin(false);

    (void)state;
    MUST(pcow_map_resolve(guest.map, PCOW_SLAB_SIZE, PCOW_PAGE_SIZE, true, &error));
    wait_until(is_given_back, &guest);
    end(&guest);
}

/* They come into a slab that is stored to: they wait until it is no longer. */
static void leave_some(const struct guest *guest, struct late_call *call)
{
    static const uint8_t left[PCOW_PAGE_SIZE] = {LEFT};

    begin_call(call, guest);
    assert_int_equal(pwrite(guest->image->file.fd, left, sizeof left,
                            (off_t)(slab_offset + REMAINS * PCOW_PAGE_SIZE)),
                     sizeof left);
    remains_leave(guest->image, slab_offset / PCOW_SLAB_SIZE, 1);
    remains_look_again(guest->image);
    ahead_wake(guest->map);
    wait_until(was_looked_at, guest);
    assert_false(is_given_back(guest));
}

static void test_given_back_when_frozen(void **state)
{
    struct guest guest = begin(false);
    struct late_call call;

    (void)state;
    leave_some(&guest, &call);
    end_call(&call, &guest);
    MUST(pcow_snapshot_create(guest.image, "frozen", &error));
    wait_until(is_given_back, &guest);
    assert_int_equal(guest.memory[CALLED * PCOW_PAGE_SIZE], 0x22);
    end(&guest);
}

static void test_given_back_at_the_end(void **state)
{
    struct guest guest = begin(false);
    struct late_call call;

    (void)state;
    leave_some(&guest, &call);
    end_call(&call, &guest);
    end(&guest);
    guest.image = must_open(path_in_pool("image.pcow"), 0);
    assert_true(is_given_back(&guest));
    pcow_close(guest.image);
}

static bool is_dropped(const struct guest *guest)
{
    return is_hole(guest, CALLED);
}

/*
 * What the guest has stored over since a snapshot goes with it, also on a full pool, and its slab
 * becomes the active layer's once more. It was that before, and then calls stored to it.
 */
static void test_deleted(void **state)
{
    struct guest guest = begin(false);
    struct late_call call;

    (void)state;
    begin_call(&call, &guest);
    end_call(&call, &guest);
    MUST(pcow_snapshot_create(guest.image, "first", &error));
    begin_call(&call, &guest);
    late_call_end(&call, 0x33);
    MUST(pcow_snapshot_delete(guest.image, "first", NULL, &error));
    wait_until(is_dropped, &guest);
    assert_false(is_hole(&guest, CALLED + 1));
    MUST(pcow_map_resolve(guest.map, (CALLED + 1) * PCOW_PAGE_SIZE, 1, true, &error));
    late_call_begin(&call, guest.memory + (CALLED + 1) * PCOW_PAGE_SIZE);
    late_call_end(&call, 0x44);
    assert_int_equal(guest.memory[CALLED * PCOW_PAGE_SIZE], 0x33);
    assert_int_equal(guest.memory[(CALLED + 1) * PCOW_PAGE_SIZE], 0x44);
    assert_int_equal(guest.memory[(CALLED + 2) * PCOW_PAGE_SIZE], 0x55);
    end(&guest);
}

/* Holes have nothing that a crash could bring back: no store to one waits for the disk. */
static void test_no_commit_for_holes(void **state)
{
    pcow_image *image = must_create(path_in_pool("image.pcow"), 2 * PCOW_SLAB_SIZE, 0, NULL);
    struct guest guest;
    unsigned before;

    (void)state;
    MUST(pcow_write(image, 0, "", 1, &error));
    pcow_close(image);
    guest = map_image();
    __atomic_store_n(guest.memory, 1, __ATOMIC_RELAXED);
    before = __atomic_load_n(&syncs, __ATOMIC_RELAXED);
    for (unsigned page = 16; page < PAGES_PER_SLAB; page += 16)
        __atomic_store_n(guest.memory + page * PCOW_PAGE_SIZE, 1, __ATOMIC_RELAXED);
    assert_true(__atomic_load_n(&syncs, __ATOMIC_RELAXED) - before < 5);
    end(&guest);
}

/* A cluster does not fit: then what is left is for the pages that are stored to. */
static void test_last_blocks(void **state)
{
    pcow_image *image = must_create(path_in_pool("image.pcow"), 2 * PCOW_SLAB_SIZE, 0, NULL);
    struct guest guest;
    unsigned served = 0;

    (void)state;
    MUST(pcow_write(image, 0, "", 1, &error));
    MUST(pcow_snapshot_create(image, "first", &error));
    MUST(pcow_write(image, 0, "", 1, &error));
    pcow_close(image);
    guest = map_image();
    __atomic_store_n(guest.memory, 1, __ATOMIC_RELAXED);
    pool_fill_disk(64 * KIB);
    for (unsigned page = 31; page < PAGES_PER_SLAB; page += 16)
        served += pcow_map_resolve(guest.map, page * PCOW_PAGE_SIZE, 1, true, NULL) == 0;
    assert_in_range(served, 8, PAGES_PER_SLAB / 16);
    end(&guest);
}

/* A page that nobody has stored to yet reads as zeros, not as the remains. */
static void test_stored_beside(void **state)
{
    struct guest guest = begin(false);
    struct late_call call;
    volatile uint8_t *page = guest.memory + REMAINS * PCOW_PAGE_SIZE;
    unsigned before;

    (void)state;
    leave_some(&guest, &call);
    before = __atomic_load_n(&syncs, __ATOMIC_RELAXED);
    __atomic_store_n(page + 1, 7, __ATOMIC_RELAXED);
    /* On the medium before the page is valid there: else a crash would show them. */
    assert_true(__atomic_load_n(&syncs, __ATOMIC_RELAXED) > before);
    end_call(&call, &guest);
    assert_int_equal(page[0], 0);
    assert_int_equal(page[1], 7);
    assert_int_equal(page[PCOW_PAGE_SIZE - 1], 0);
    end(&guest);
}

/* A copy fails half way: it must not be seen, and is made once more. */
static void test_copy_fails_beside(void **state)
{
    struct guest guest = begin(true);
    struct late_call call;
    volatile uint8_t *page = guest.memory + REMAINS * PCOW_PAGE_SIZE;

    (void)state;
    begin_call(&call, &guest);
    __atomic_store_n(&fails, 2, __ATOMIC_SEQ_CST);
    __atomic_store_n(page + 1, 7, __ATOMIC_RELAXED);
    assert_int_equal(fails, 0);
    end_call(&call, &guest);
    assert_int_equal(page[0], 0x11);
    assert_int_equal(page[1], 7);
    end(&guest);
}

#define PINNED_TEST(name)                                            \
    cmocka_unit_test_setup_teardown(name, ext4_mount, pool_unmount), \
        cmocka_unit_test_setup_teardown(name, xfs_mount, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        PINNED_TEST(test_given_back),
        PINNED_TEST(test_given_back_ahead),
        PINNED_TEST(test_given_back_when_frozen),
        PINNED_TEST(test_given_back_at_the_end),
        PINNED_TEST(test_deleted),
        PINNED_TEST(test_no_commit_for_holes),
        PINNED_TEST(test_last_blocks),
        PINNED_TEST(test_stored_beside),
        PINNED_TEST(test_copy_fails_beside),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
