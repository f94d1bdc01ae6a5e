/* SPDX-License-Identifier: BSD-3-Clause */
/* An image whose data has checksums, for the tests of these. */
#ifndef SUMMED_H
#define SUMMED_H

#include "checking.h"
#include "support.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check/check.h"
#include "format/format2.h"

#define SLABS 8u
#define SIZE (SLABS * 2 * MIB)
#define PAGE 4096u
#define IMAGE scratch("image.pcow")

static struct findings findings;

static inline struct pcow_data_result verify(void)
{
    struct pcow_data_result result;

    findings.text[0] = 0;
    MUST(pcow_check_data(IMAGE, 0, add_finding, NULL, &findings, &result, &error));
    return result;
}

static inline struct pcow_data_result verify_shared(void)
{
    struct pcow_data_result result;

    findings.text[0] = 0;
    MUST(pcow_check_data(IMAGE, PCOW_CHECK_FORCE_SHARE, add_finding, NULL, &findings, &result,
                         &error));
    return result;
}

static inline void expect_verified(uint64_t verified, uint64_t without)
{
    struct pcow_data_result result = verify();

    if (result.corruptions)
        fail_msg("%s", findings.text);
    assert_int_equal(result.verified, verified);
    assert_int_equal(result.without, without);
    must_be_clean(IMAGE);
}

static inline void store(pcow_image *image, unsigned slab, unsigned page, int fill)
{
    uint8_t content[PAGE];

    memset(content, fill, sizeof content);
    MUST(pcow_write(image, slab * PCOW_SLAB_SIZE + page * PAGE, content, sizeof content, &error));
}

static inline void checksum(const char *snapshot, bool with_active)
{
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    MUST(pcow_checksum(image, snapshot, with_active ? PCOW_CHECKSUM_ACTIVE : 0, NULL, NULL, NULL,
                       &error));
    pcow_close(image);
}

static inline void seal(void)
{
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    MUST(pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    MUST(pcow_seal(image, &error));
    pcow_close(image);
}

/* "one": slabs 0 to 3, with VM state; "two": slabs 2 to 5; active: slab 2 and 6. Two pages each. */
static inline void make_image(void)
{
    pcow_image *image = must_create(IMAGE, SIZE, 4 * KIB, NULL);

    for (unsigned slab = 0; slab < 4; slab++) {
        store(image, slab, 3, 0x10 + (int)slab);
        store(image, slab, 400, 0x20 + (int)slab);
    }
    MUST(pcow_snapshot_create(image, "one", &error));
    MUST(pcow_snapshot_write_state(image, "one", 0, "state", 5, &error));
    MUST(pcow_snapshot_set_state_size(image, "one", 5, &error));
    for (unsigned slab = 2; slab < 6; slab++) {
        store(image, slab, 3, 0x30 + (int)slab);
        store(image, slab, 5, 0x40 + (int)slab);
    }
    MUST(pcow_snapshot_create(image, "two", &error));
    store(image, 2, 3, 0x50);
    store(image, 2, 4, 0x51);
    store(image, 6, 3, 0x52);
    store(image, 6, 4, 0x53);
    pcow_close(image);
}

#define ONE (8 * PAGE + PCOW_SLAB_SIZE)        /* bytes with data */
#define TWO (8 * PAGE)
#define ACTIVE (4 * PAGE)
#define ALL (ONE + TWO + ACTIVE)

static inline void flip(uint64_t offset)
{
    uint8_t byte;

    must_transfer(IMAGE, &byte, 1, offset, false);
    byte ^= 0x04;
    must_transfer(IMAGE, &byte, 1, offset, true);
}

/* The file slab that is the n-th with an owner of this kind, or 0. */
static inline uint64_t owned_slab(unsigned n, struct owner *owner)
{
    for (uint64_t slab = MIRROR_HEADS; slab < 64; slab++) {
        uint64_t word;

        must_transfer(IMAGE, &word, sizeof word, owner_offset(slab), false);
        *owner = owner_decode(word);
        if (word && n-- == 0)
            return slab;
    }
    return 0;
}

static inline uint64_t slab_of(uint32_t layer, uint32_t number, enum owner_kind kind)
{
    struct owner owner;
    uint64_t slab;

    for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
        if (owner.layer == layer && owner.number == number && owner.kind == kind)
            return slab;
    fail_msg("no slab of layer %u, number %u", layer, number);
    return 0;
}

static inline uint64_t entry_word(uint64_t slab)
{
    uint64_t word;

    must_transfer(IMAGE, &word, sizeof word, datasum_offset(slab), false);
    return word;
}

static inline void expect_found(const char *first, const char *second, uint64_t damaged,
                                uint64_t unjudged)
{
    struct pcow_data_result result = verify();

    assert_int_equal(result.corruptions, 1);
    assert_int_equal(result.damaged, damaged);
    assert_int_equal(result.unjudged, unjudged);
    if (!strstr(findings.text, first) || !strstr(findings.text, second))
        fail_msg("neither %s nor %s, but: %s", first, second, findings.text);
}

static inline int kill_after(void *opaque, uint64_t done, uint64_t total)
{
    (void)total;
    if (done >= *(uint64_t *)opaque)
        kill(getpid(), SIGKILL);
    return 0;
}

static inline pcow_image *open_at(const char *snapshot)
{
    pcow_image *image;

    MUST(pcow_open(IMAGE, PCOW_OPEN_NO_BASE, snapshot, &image, &error));
    return image;
}

static inline void checksum_beside(const char *snapshot, pcow_progress_fn progress, void *opaque)
{
    pcow_image *image = open_at(snapshot);

    MUST(pcow_checksum_beside_writer(image, 0, NULL, progress, opaque, &error));
    pcow_close(image);
}

#endif
