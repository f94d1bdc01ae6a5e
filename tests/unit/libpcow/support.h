/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the C tests share: a scratch directory, calls that must succeed, a small random generator.
 */
#ifndef PCOW_TEST_SUPPORT_H
#define PCOW_TEST_SUPPORT_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cmocka.h>

#include "pcow.h"

#define MIB (UINT64_C(1) << 20)
#define KIB (UINT64_C(1) << 10)

/* Call f(..., &error) and fail the test with the library's message if it returns an error. */
#define MUST(call)                                                                    \
    do {                                                                              \
        struct pcow_error error = {0};                                                \
        int must_result = (call);                                                     \
                                                                                      \
        if (must_result)                                                              \
            fail_msg("%s: %s (%d)", #call, error.message, must_result);               \
    } while (0)

/* Call f(..., &error) and fail the test unless it returns this error and a message. */
#define MUST_FAIL(expected, call)                                                  \
    do {                                                                           \
        struct pcow_error error = {0};                                             \
        int must_result = (call);                                                  \
                                                                                   \
        if (must_result != (expected))                                             \
            fail_msg("%s: returned %d, not %d: %s", #call, must_result, (expected), \
                     error.message);                                               \
        assert_int_equal(error.code, (expected));                                  \
        assert_true(error.message[0] != 0);                                        \
    } while (0)

/*
 * A directory of its own for each test, on TMPDIR or /dev/shm; removed with all in it by the
 * teardown.
 */
int scratch_setup(void **state);
int scratch_teardown(void **state);
/* path of name in the scratch directory; a few static buffers take turns */
const char *scratch(const char *name);
const char *scratch_directory(void);

/* The same with a pool of its own, a tmpfs of that size ("64m"), mounted in it. */
int pool_mount(void **state, const char *size);
/* Or a disk of that size ("64M") with a file system: "mkfs.ext4 -q -b 1024". */
int pool_mount_disk(void **state, const char *make, const char *size);
int pool_unmount(void **state);
const char *pool_directory(void);
/* path of name in it; two static buffers take turns */
const char *path_in_pool(const char *name);
/* As a copy of the file is that leaves zeros out. */
void pool_make_sparse(const char *name);
/* Give it another size. */
void pool_resize(const char *size);
/* Others take what is left in it. */
void pool_fill(void);
/*
 * Of a disk: all but so many bytes, as nearly as the file system lets that be done, in
 * pool_directory()/filler.
 */
void pool_fill_disk(uint64_t left);

pcow_image *must_open(const char *path, unsigned flags);
pcow_image *must_create(const char *path, uint64_t size, uint64_t cluster_size, const char *base);
/* Damage of its metadata is not mended before the rest of the check sees it. */
pcow_image *must_create_without_mirror(const char *path, uint64_t size);
/*
 * "top.pcow" on a sealed "base.pcow" of this size, all bytes of which are fill; both in the scratch
 * directory.
 */
pcow_image *must_create_overlay(uint64_t size, unsigned char fill);
/* Mappings of the kernel's list that begin in the range. */
unsigned count_mappings(const void *memory, uint64_t size);
/* Pages of these 2 MiB that the page table has. */
unsigned present_in(const void *memory);
/* From here to the end of the test, for maps of engine minor: true. */
bool serve_bus(void);
/* TSan lets no SIGBUS be handled in a handler of SIGBUS, which copy_touch() may meet. */
static inline bool is_for_sanitizer(enum pcow_engine engine)
{
#ifdef __SANITIZE_THREAD__
    return engine != PCOW_ENGINE_MINOR;
#else
    (void)engine;
    return true;
#endif
}

pcow_map *must_map_by(pcow_image *image, enum pcow_engine engine, unsigned vma_budget);
/* No finding at all, or the test fails with what was found. */
void must_be_clean(const char *path);
/* Read bytes of a file, or write them there behind the library's back. */
void must_transfer(const char *path, void *buffer, size_t length, uint64_t offset, bool write);
/* Write a text with its end. */
void write_text(pcow_image *image, uint64_t offset, const char *text);
/* NULL: there is none of that name */
const struct pcow_snapshot *find_snapshot(const struct pcow_snapshot *list, size_t count,
                                          const char *name);
void assert_reads(pcow_image *image, uint64_t offset, const void *expected, size_t length);

#define FOR_EACH_ENGINE(engine)                                                    \
    for (enum pcow_engine engine = PCOW_ENGINE_SIGNAL; engine <= PCOW_ENGINE_MINOR; engine++)

/* Let the kernel store one byte, as it does for a KVM vCPU: 1, or -1 with errno. */
ssize_t kernel_store(void *to, unsigned char value);

uint64_t random_next(uint64_t *seed);
/* PCOW_TEST_SEED or a fixed one; printed by the tests so that a failure can be repeated. */
uint64_t random_seed(void);
unsigned test_steps(unsigned standard);    /* PCOW_TEST_STEPS overrides */
void fill_pattern(void *buffer, size_t length, uint64_t *seed);

#endif
