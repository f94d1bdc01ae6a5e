/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the tests of pcow_check() share: a small image whose content is known in three layers, ways
 * to damage it by the offsets of format.rst, and what must hold after a repair.
 */
#ifndef PCOW_TEST_CHECK_SUPPORT_H
#define PCOW_TEST_CHECK_SUPPORT_H

#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/format2.h"

#define SIZE (8 * MIB)
#define IMAGE scratch("image.pcow")
/* Layer ids and record slots of the image that make_image() makes. */
enum { LAYER_S1 = 1, LAYER_S2 = 2, LAYER_ACTIVE = 3 };

/* What the guest reads in snapshot s1, snapshot s2 and the active layer. */
static uint8_t content[3][SIZE];
static const char *const view_name[3] = {"s1", "s2", NULL};

struct findings {
    struct pcow_check_result result;
    unsigned count;
    char text[65536];
};

static inline void collect_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    struct findings *found = opaque;
    size_t used = strlen(found->text);

    found->count++;
    assert_in_range(kind, PCOW_FINDING_CORRUPTION, PCOW_FINDING_NOTE);
    assert_true(strlen(message) > 10);
    snprintf(found->text + used, sizeof found->text - used, "%s\n", message);
}

/* What is lost by a repair is no matter here: test_rescue.c. */
static inline struct findings *run_check(unsigned flags)
{
    static struct findings found;

    memset(&found, 0, sizeof found);
    if (flags & PCOW_CHECK_REPAIR) {
        unlink(scratch("image.pcow.rescue"));
        flags |= PCOW_CHECK_ACCEPT_LOSS;
    }
    MUST(pcow_check(IMAGE, flags, collect_finding, &found, &found.result, &error));
    return &found;
}

static inline void write_pages(pcow_image *image, uint8_t *model, uint32_t first, uint32_t count,
                               uint64_t *seed)
{
    fill_pattern(model + first * 4096, count * 4096, seed);
    MUST(pcow_write(image, first * UINT64_C(4096), model + first * 4096, count * 4096, &error));
}

/* 4 guest slabs; s1 holds pages in slabs 0, 1 and 2, s2 in 1, the active layer in 0 and 3. */
static inline void make_image(void)
{
    uint64_t seed = 1;
    pcow_image *image;

    unlink(IMAGE);
    memset(content, 0, sizeof content);
    image = must_create_without_mirror(IMAGE, SIZE);
    write_pages(image, content[0], 3, 20, &seed);
    write_pages(image, content[0], 512, 512, &seed);
    write_pages(image, content[0], 1030, 2, &seed);
    MUST(pcow_snapshot_create(image, "s1", &error));
    memcpy(content[1], content[0], SIZE);
    write_pages(image, content[1], 600, 8, &seed);
    MUST(pcow_snapshot_create(image, "s2", &error));
    memcpy(content[2], content[1], SIZE);
    write_pages(image, content[2], 10, 4, &seed);
    write_pages(image, content[2], 2000, 5, &seed);
    pcow_close(image);
}

static inline void peek(uint64_t offset, void *to, size_t length)
{
    int fd = open(IMAGE, O_RDONLY);

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, to, length, (off_t)offset), length);
    close(fd);
}

static inline void poke(uint64_t offset, const void *from, size_t length)
{
    int fd = open(IMAGE, O_WRONLY);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, from, length, (off_t)offset), length);
    close(fd);
}

static inline void flip(uint64_t offset, uint8_t bits)
{
    uint8_t byte;

    peek(offset, &byte, 1);
    byte ^= bits;
    poke(offset, &byte, 1);
}

/* A word with a right checksum. */
static inline void poke_word(uint64_t offset, uint64_t value)
{
    uint64_t word = word_encode(value);

    poke(offset, &word, sizeof word);
}

static inline uint64_t record_offset(uint32_t slot, size_t field)
{
    return LAYER_TABLE_OFFSET + slot * LAYER_RECORD_SIZE + field;
}

/* The file slab that holds this guest slab (or piece) of this layer; 0: none. */
static inline uint64_t find_slab(enum owner_kind kind, uint32_t layer, uint32_t number)
{
    struct stat st;

    assert_int_equal(stat(IMAGE, &st), 0);
    for (uint64_t slab = 1; slab < (uint64_t)st.st_size >> SLAB_BITS; slab++) {
        struct owner owner;
        uint64_t word;

        peek(owner_offset(slab), &word, sizeof word);
        owner = owner_decode(word);
        if (word && owner.kind == kind && owner.layer == layer && owner.number == number)
            return slab;
    }
    return 0;
}

/* A snapshot (or, with NULL, the active layer) reads like content[view]. */
static inline void expect_view(const char *name, unsigned view)
{
    struct pcow_error error = {0};
    pcow_image *image;

    if (pcow_open(IMAGE, 0, name, &image, &error))
        fail_msg("%s: %s", name ? name : "active", error.message);
    assert_true(pcow_size(image) >= SIZE);
    assert_reads(image, 0, content[view], SIZE);
    pcow_close(image);
}

static inline void expect_content(void)
{
    for (unsigned view = 0; view < 3; view++)
        expect_view(view_name[view], view);
}

static inline void expect_clean(void)
{
    struct findings *found = run_check(0);

    if (found->result.corruptions || found->result.leaks)
        fail_msg("after repair: %s", found->text);
}

/*
 * A repair leaves a file that is clean, that a second repair does not change, and that a writer can
 * open and write.
 */
static inline void expect_usable(void)
{
    struct pcow_info before, after;
    pcow_image *image;
    uint8_t page[4096] = {1};

    expect_clean();
    image = must_open(IMAGE, 0);
    pcow_get_info(image, &before);
    pcow_close(image);
    run_check(PCOW_CHECK_REPAIR);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    pcow_get_info(image, &after);
    assert_memory_equal(&before, &after, sizeof before);
    MUST(pcow_write(image, SIZE - sizeof page, page, sizeof page, &error));
    MUST(pcow_snapshot_create(image, "after the repair", &error));
    MUST(pcow_snapshot_delete(image, "after the repair", NULL, &error));
    pcow_close(image);
    expect_clean();
}

/*
 * The damage is found, without changing a byte; then it is repaired. What is returned is what the
 * repair found.
 */
static inline struct findings *expect_repair(const char *says)
{
    static struct findings repaired;
    struct findings *found = run_check(0);
    uint64_t corruptions = found->result.corruptions;
    struct pcow_check_result foreseen = found->result;
    struct stat before, after;

    assert_int_equal(stat(IMAGE, &before), 0);
    if (corruptions == 0)
        fail_msg("nothing found: %s", found->text);
    if (!strstr(found->text, says))
        fail_msg("'%s' is not in: %s", says, found->text);
    assert_int_equal(found->result.corruptions_fixed, 0);
    assert_int_equal(stat(IMAGE, &after), 0);
    assert_int_equal(before.st_mtim.tv_nsec, after.st_mtim.tv_nsec);
    assert_int_equal(before.st_size, after.st_size);
    found = run_check(PCOW_CHECK_REPAIR);
    assert_int_equal(found->result.corruptions, found->result.corruptions_fixed);
    assert_int_equal(found->result.leaks, found->result.leaks_fixed);
    assert_true(found->result.corruptions >= 1);
    assert_int_equal(found->result.lost_size, foreseen.lost_size);
    assert_int_equal(found->result.losses, foreseen.losses);
    assert_int_equal(found->result.rescue_suffix[0], foreseen.losses ? '.' : 0);
    repaired = *found;
    expect_clean();
    return &repaired;
}

#endif
