/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Checksums of data: damage of any of it is found and named, and of the checksums too; whoever
 * changes what has one drops it first; and to make them can be broken off at any time.
 */
#include "checking.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check/check.h"
#include "format/format2.h"

#define SLABS 8u
#define SIZE (SLABS * 2 * MIB)
#define PAGE 4096u
#define IMAGE scratch("image.pcow")

static struct findings findings;

static struct pcow_data_result verify(void)
{
    struct pcow_data_result result;

    findings.text[0] = 0;
    MUST(pcow_check_data(IMAGE, 0, add_finding, NULL, &findings, &result, &error));
    return result;
}

static struct pcow_data_result verify_shared(void)
{
    struct pcow_data_result result;

    findings.text[0] = 0;
    MUST(pcow_check_data(IMAGE, PCOW_CHECK_FORCE_SHARE, add_finding, NULL, &findings, &result,
                         &error));
    return result;
}

static void expect_verified(uint64_t verified, uint64_t without)
{
    struct pcow_data_result result = verify();

    if (result.corruptions)
        fail_msg("%s", findings.text);
    assert_int_equal(result.verified, verified);
    assert_int_equal(result.without, without);
    must_be_clean(IMAGE);
}

static void store(pcow_image *image, unsigned slab, unsigned page, int fill)
{
    uint8_t content[PAGE];

    memset(content, fill, sizeof content);
    MUST(pcow_write(image, slab * PCOW_SLAB_SIZE + page * PAGE, content, sizeof content, &error));
}

static void checksum(const char *snapshot, bool with_active)
{
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    MUST(pcow_checksum(image, snapshot, with_active ? PCOW_CHECKSUM_ACTIVE : 0, NULL, NULL, NULL,
                       &error));
    pcow_close(image);
}

static void seal(void)
{
    pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);

    MUST(pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    MUST(pcow_seal(image, &error));
    pcow_close(image);
}

/* "one": slabs 0 to 3, with VM state; "two": slabs 2 to 5; active: slab 2 and 6. Two pages each. */
static void make_image(void)
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

static void flip(uint64_t offset)
{
    uint8_t byte;

    must_transfer(IMAGE, &byte, 1, offset, false);
    byte ^= 0x04;
    must_transfer(IMAGE, &byte, 1, offset, true);
}

/* The file slab that is the n-th with an owner of this kind, or 0. */
static uint64_t owned_slab(unsigned n, struct owner *owner)
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

static uint64_t slab_of(uint32_t layer, uint32_t number, enum owner_kind kind)
{
    struct owner owner;
    uint64_t slab;

    for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
        if (owner.layer == layer && owner.number == number && owner.kind == kind)
            return slab;
    fail_msg("no slab of layer %u, number %u", layer, number);
    return 0;
}

static uint64_t entry_word(uint64_t slab)
{
    uint64_t word;

    must_transfer(IMAGE, &word, sizeof word, datasum_offset(slab), false);
    return word;
}

static void expect_found(const char *first, const char *second, uint64_t damaged, uint64_t unjudged)
{
    struct pcow_data_result result = verify();

    assert_int_equal(result.corruptions, 1);
    assert_int_equal(result.damaged, damaged);
    assert_int_equal(result.unjudged, unjudged);
    if (!strstr(findings.text, first) || !strstr(findings.text, second))
        fail_msg("neither %s nor %s, but: %s", first, second, findings.text);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_finds_nothing_where_nothing_is(void **state)
{
    (void)state;
    make_image();
    expect_verified(0, ALL);
    checksum("one", false);
    expect_verified(ONE, TWO + ACTIVE);
    checksum(NULL, false);
    expect_verified(ONE + TWO, ACTIVE);
    seal();
    expect_verified(ALL, 0);
}

/* Each byte that is valid, in each kind of layer; what is not valid does not count. */
static void test_finds_damaged_data(void **state)
{
    struct owner owner;
    uint64_t slab;
    unsigned n;

    (void)state;
    make_image();
    seal();
    for (n = 0; (slab = owned_slab(n, &owner)); n++) {
        uint64_t data = slab << SLAB_BITS, size = PCOW_SLAB_SIZE;
        char where[64], what[64];
        unsigned page = 0;

        if (owner.kind == OWNER_DATA) {
            struct page_set valid;

            must_transfer(IMAGE, &valid, sizeof valid, bitmap_offset(slab), false);
            page = page_set_has(&valid, 0) ? 0 : page_set_run_end(&valid, 0, PAGES_PER_SLAB);
            size = page_set_count(&valid) * PAGE;
            flip(data + 200 * PAGE);
            assert_int_equal(verify().corruptions, 0);
            flip(data + 200 * PAGE);
        }
        snprintf(where, sizeof where, "from %s byte %llu of ",
                 owner.kind == OWNER_DATA ? "guest" : "VM state",
                 (unsigned long long)owner.number << SLAB_BITS);
        snprintf(what, sizeof what, "(file slab %llu): it is not what",
                 (unsigned long long)slab);
        flip(data + page * PAGE + 1234);
        expect_found(where, what, size, 0);
        assert_non_null(strstr(findings.text, owner.layer == 1   ? "snapshot 'one'"
                                         : owner.layer == 2 ? "snapshot 'two'"
                                                            : "the active layer"));
        flip(data + page * PAGE + 1234);
        assert_int_equal(verify().corruptions, 0);
    }
    assert_int_equal(n, 4 + 1 + 4 + 2);
}

/* A slab that was written to another's place, or two that changed places. */
static void test_finds_data_in_a_wrong_place(void **state)
{
    static uint8_t a[PCOW_SLAB_SIZE], b[PCOW_SLAB_SIZE];
    uint64_t first, second;

    (void)state;
    make_image();
    seal();
    first = slab_of(1, 0, OWNER_DATA);
    second = slab_of(1, 1, OWNER_DATA);
    must_transfer(IMAGE, a, sizeof a, first << SLAB_BITS, false);
    must_transfer(IMAGE, b, sizeof b, second << SLAB_BITS, false);
    must_transfer(IMAGE, b, sizeof b, first << SLAB_BITS, true);
    must_transfer(IMAGE, a, sizeof a, second << SLAB_BITS, true);
    assert_int_equal(verify().corruptions, 2);
    /* with their checksums, too */
    must_transfer(IMAGE, a, 64, datasum_offset(first), false);
    must_transfer(IMAGE, b, 64, datasum_offset(second), false);
    must_transfer(IMAGE, b, 64, datasum_offset(first), true);
    must_transfer(IMAGE, a, 64, datasum_offset(second), true);
    assert_int_equal(verify().corruptions, 2);
    assert_non_null(strstr(findings.text, "its checksum is damaged"));
}

/* Each bit of a checksum; a page of them that is zeros, or an older one. */
static void test_finds_damaged_checksums(void **state)
{
    static uint8_t page[PAGE], kept[PAGE];
    uint64_t slab, at;

    (void)state;
    make_image();
    must_transfer(IMAGE, page, sizeof page, datasum_offset(0), false);
    seal();
    slab = slab_of(2, 4, OWNER_DATA);
    at = datasum_offset(slab);
    for (unsigned byte = 0; byte < 64; byte++) {
        flip(at + byte);
        expect_found("from guest byte 8388608 of snapshot 'two'", "its checksum is damaged", 0,
                     2 * PAGE);
        flip(at + byte);
    }
    flip(datasum_offset(60));
    expect_found("file slab 60 holds no data", "has a checksum", 0, 0);
    flip(datasum_offset(60));
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), false);
    must_transfer(IMAGE, page, sizeof page, datasum_offset(0), true);
    assert_int_equal(verify().corruptions, 11);
    assert_non_null(strstr(findings.text, "its checksum is gone"));
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), true);
    expect_verified(ALL, 0);
}

static void fill_random(uint8_t *page)
{
    for (unsigned i = 0; i < PAGE; i++)
        page[i] = (uint8_t)((i + 7) * UINT64_C(0x9e3779b97f4a7c15) >> 40);
}

/*
 * All checksums of two snapshots at once, in an image that is not sealed: that they were there is
 * in the records. The slabs of the active layer have none, and nothing is said of them.
 */
static void expect_gone_in_snapshots(uint8_t *older)
{
    static uint8_t kept[PAGE], page[PAGE];

    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), false);
    for (unsigned kind = 0; kind < 4; kind++) {
        struct pcow_data_result result;

        memset(page, kind == 1 ? 0xff : 0, sizeof page);
        if (kind == 2)
            fill_random(page);
        must_transfer(IMAGE, kind == 3 ? older : page, sizeof page, datasum_offset(0), true);
        result = verify();
        if (kind == 0 || kind == 3) {
            assert_int_equal(result.corruptions, 8);
            assert_non_null(strstr(findings.text, "of snapshot 'two'"));
            assert_non_null(strstr(findings.text, "its checksum is gone"));
            assert_int_equal(verify_shared().corruptions, 8);
        } else {
            assert_int_equal(result.unjudged, ALL);
        }
        must_be_clean(IMAGE);
    }
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), true);
    expect_verified(ONE + TWO, ACTIVE);
}

static void test_finds_checksums_that_are_gone(void **state)
{
    static uint8_t older[PAGE], zeros[PAGE];
    pcow_image *image;

    (void)state;
    make_image();
    must_transfer(IMAGE, older, sizeof older, datasum_offset(0), false);
    checksum(NULL, false);
    expect_gone_in_snapshots(older);
    /* Some of a snapshot's are dropped: of what is left nothing is said any more. */
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "one", NULL, &error));
    pcow_close(image);
    assert_int_equal(verify().corruptions, 0);
    must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(0), true);
    assert_int_equal(verify().corruptions, 0);
    /* Until they were made once more. */
    checksum("two", false);
    assert_int_equal(verify().corruptions, 0);
    must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(0), true);
    assert_int_equal(verify().corruptions, 8);
}

/* A repair that drops one says nothing of the others, and is no damage itself. */
static void test_repair_of_a_snapshot_with_checksums(void **state)
{
    struct pcow_check_result result;
    uint64_t word, offset;

    (void)state;
    make_image();
    checksum(NULL, false);
    /* in the page of owner words, and in its copy: nobody knows which was right */
    offset = owner_offset(slab_of(2, 4, OWNER_DATA));
    word = owner_encode((struct owner){OWNER_DATA, 1, 5});
    must_transfer(IMAGE, &word, sizeof word, offset, true);
    must_transfer(IMAGE, &word, sizeof word, PCOW_SLAB_SIZE + offset, true);
    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, NULL, NULL, &result,
                    &error));
    must_be_clean(IMAGE);
    verify();
    if (strstr(findings.text, "its checksum is gone"))
        fail_msg("%s", findings.text);
}

/* What is damaged keeps its checksum when others are made, and stays found. */
static void test_damage_is_not_blessed(void **state)
{
    struct pcow_data_result result;
    pcow_image *image;

    (void)state;
    make_image();
    checksum(NULL, false);
    flip((slab_of(1, 0, OWNER_DATA) << SLAB_BITS) + 3 * PAGE);
    flip(datasum_offset(slab_of(1, 1, OWNER_DATA)) + 20);
    assert_int_equal(verify().corruptions, 2);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST_FAIL(-EUCLEAN,
              pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    pcow_close(image);
    result = verify();
    assert_int_equal(result.corruptions, 2);
    assert_int_equal(result.without, 0);
}

static void test_writers_drop_them(void **state)
{
    uint64_t first = 0, second = 0;
    pcow_image *image;

    (void)state;
    make_image();
    seal();
    image = NULL;
    MUST_FAIL(-EROFS, pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error));
    MUST(pcow_unseal(IMAGE, &error));
    expect_verified(ALL, 0);
    first = slab_of(3, 2, OWNER_DATA);
    second = slab_of(3, 6, OWNER_DATA);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    assert_int_not_equal(entry_word(first), 0);
    /* over a page that is there */
    store(image, 2, 3, 0x77);
    assert_int_equal(entry_word(first), 0);
    assert_int_not_equal(entry_word(second), 0);
    pcow_close(image);
    expect_verified(ALL - 2 * PAGE, 2 * PAGE);
    /* a new page of a slab that is there */
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    store(image, 6, 100, 0x78);
    assert_int_equal(entry_word(second), 0);
    pcow_close(image);
    expect_verified(ONE + TWO, 5 * PAGE);
    /* zeros */
    checksum(NULL, true);
    expect_verified(ALL + PAGE, 0);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_write_zeroes(image, 2 * PCOW_SLAB_SIZE + 3 * PAGE, PAGE, &error));
    pcow_close(image);
    expect_verified(ONE + TWO + 3 * PAGE, 2 * PAGE);
}

/* The guest comes another way. */
static void test_guests_drop_them(void **state)
{
    FOR_EACH_ENGINE(engine)
    {
        pcow_image *image;
        pcow_map *map;
        uint8_t *memory;
        uint64_t slab;

        if (engine == PCOW_ENGINE_MINOR && !serve_bus())
            continue;
        scratch_teardown(state);
        scratch_setup(state);
        make_image();
        checksum(NULL, true);
        slab = slab_of(3, 6, OWNER_DATA);
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        /* a load changes nothing */
        assert_int_equal(memory[6 * PCOW_SLAB_SIZE + 3 * PAGE], 0x52);
        assert_int_not_equal(entry_word(slab), 0);
        memory[6 * PCOW_SLAB_SIZE + 3 * PAGE] = 0x99;
        assert_int_equal(entry_word(slab), 0);
        pcow_map_destroy(map);
        pcow_close(image);
        expect_verified(ALL - 2 * PAGE, 2 * PAGE);
    }
}

static void test_merges_drop_them(void **state)
{
    pcow_image *image;
    struct pcow_data_result result;

    (void)state;
    make_image();
    checksum(NULL, true);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    /* what is left of "one" becomes "two"'s: without checksums */
    MUST(pcow_snapshot_delete(image, "one", NULL, &error));
    pcow_close(image);
    result = verify();
    assert_int_equal(result.corruptions, 0);
    assert_int_equal(result.verified, TWO + ACTIVE);
    assert_int_equal(result.without, 6 * PAGE);
    checksum(NULL, true);
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_revert(image, "two", &error));
    store(image, 0, 3, 0x60);
    MUST(pcow_snapshot_create(image, "three", &error));
    MUST(pcow_snapshot_delete(image, "two", NULL, &error));
    MUST(pcow_snapshot_revert(image, "three", &error));
    pcow_close(image);
    assert_int_equal(verify().corruptions, 0);
    must_be_clean(IMAGE);
    /* and slabs that were freed are others' then */
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "three", NULL, &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(image, slab, slab + 7, 0x61);
    pcow_close(image);
    assert_int_equal(verify().corruptions, 0);
    must_be_clean(IMAGE);
}

static int stop_after(void *opaque, uint64_t done, uint64_t total)
{
    assert_true(done <= total);
    return done >= *(uint64_t *)opaque ? -ECANCELED : 0;
}

static int kill_after(void *opaque, uint64_t done, uint64_t total)
{
    (void)total;
    if (done >= *(uint64_t *)opaque)
        kill(getpid(), SIGKILL);
    return 0;
}

/* Cancelled or killed after each slab, and begun again. */
static void test_goes_on_where_it_was(void **state)
{
    (void)state;
    make_image();
    for (unsigned run = 0; run < 10; run++) {
        uint64_t done = PCOW_SLAB_SIZE;
        pcow_image *image;
        pid_t child;

        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        MUST_FAIL(-ECANCELED, pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, stop_after,
                                            &done, &error));
        pcow_close(image);
        assert_int_equal(verify().corruptions, 0);
        assert_true(verify().verified > 0 && verify().without > 0);
        child = fork();
        if (child == 0) {
            struct pcow_error error;

            if (!pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error))
                pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, kill_after, &done, &error);
            _exit(1);
        }
        assert_int_equal(waitpid(child, NULL, 0), child);
        assert_int_equal(verify().corruptions, 0);
    }
    checksum(NULL, true);
    expect_verified(ALL, 0);
}

/* A hash that was stored and not published counts for nothing. */
static void test_half_a_checksum(void **state)
{
    uint64_t slab, zero = 0;
    uint8_t content = 1;

    (void)state;
    make_image();
    checksum(NULL, true);
    /* of the active layer: of a snapshot it is damage that it is gone */
    slab = slab_of(3, 6, OWNER_DATA);
    must_transfer(IMAGE, &zero, sizeof zero, datasum_offset(slab), true);
    expect_verified(ALL - 2 * PAGE, 2 * PAGE);
    must_transfer(IMAGE, &content, 1, (slab << SLAB_BITS) + 3 * PAGE, true);
    checksum(NULL, true);
    expect_verified(ALL, 0);
}

/* A repair frees slabs and takes pages out of others. */
static void test_repair_drops_them(void **state)
{
    struct owner owner = {OWNER_DATA, 3, 2};
    uint64_t slab, word = owner_encode(owner);
    struct pcow_check_result result;
    static const uint64_t stale[512];

    (void)state;
    make_image();
    checksum(NULL, true);
    slab = slab_of(3, 6, OWNER_DATA);
    /* two slabs for the same 2 MiB, in a file whose mirror cannot tell */
    must_transfer(IMAGE, &word, sizeof word, owner_offset(slab), true);
    must_transfer(IMAGE, (void *)stale, sizeof stale, mirror_offset(0, CHECKSUMS_PAGE), true);
    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
    assert_true(result.corruptions > 0 && result.corruptions == result.corruptions_fixed);
    must_be_clean(IMAGE);
    /* it is another's now, which its checksum tells */
    assert_true(verify().corruptions <= 1);
}

static bool all_had_checksums(void)
{
    pcow_image *image = must_open(IMAGE, 0);
    struct pcow_info info;

    pcow_get_info(image, &info);
    pcow_close(image);
    return info.checksums;
}

static void repair(void)
{
    struct pcow_check_result result;

    MUST(pcow_check(IMAGE, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, NULL, NULL, &result,
                    &error));
    unlink(scratch("image.pcow.rescue"));
    must_be_clean(IMAGE);
}

/* What a repair drops is not missed for ever; what was lost before is. */
static void test_repair_of_a_sealed_image(void **state)
{
    uint64_t slab, last = 0, zero = 0;
    struct owner owner;
    uint8_t junk = 1;

    (void)state;
    make_image();
    seal();
    for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
        last = slab;
    must_transfer(IMAGE, &junk, 1, (last + 1) << SLAB_BITS, true);
    must_transfer(IMAGE, &zero, sizeof zero, datasum_offset(slab_of(1, 0, OWNER_DATA)), true);
    repair();
    assert_true(all_had_checksums());
    assert_int_equal(verify().corruptions, 1);
    assert_non_null(strstr(findings.text, "its checksum is gone"));
    unlink(IMAGE);
    make_image();
    seal();
    assert_int_equal(truncate(IMAGE, (off_t)((last << SLAB_BITS) + PAGE)), 0);
    repair();
    assert_false(all_had_checksums());
    assert_int_equal(verify().corruptions, 0);
}

/* Wherever a repair is killed, the next one leaves no checksum that is missed for ever. */
static void test_interrupted_repair(void **state)
{
    unsigned step = 0;
    bool killed;

    (void)state;
    do {
        struct owner owner;
        uint64_t slab, last = 0;

        unlink(IMAGE);
        make_image();
        seal();
        for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
            last = slab;
        assert_int_equal(truncate(IMAGE, (off_t)((last << SLAB_BITS) + PAGE)), 0);
        killed = repair_until(step++);
        repair();
        unlink(scratch("image.pcow.rescue-2"));
        if (verify().corruptions)
            fail_msg("killed at step %u: %s", step - 1, findings.text);
        assert_false(all_had_checksums());
    } while (killed);
    print_message("killed at %u steps\n", step - 1);
    assert_true(step > 5);
}

/* What is a mere leak costs no checksum, so an interrupted repair of it costs no promise. */
static void test_interrupted_repair_of_a_leak(void **state)
{
    unsigned step = 0;
    bool killed;

    (void)state;
    do {
        struct owner owner;
        uint64_t slab, last = 0;
        uint8_t junk = 1;

        unlink(IMAGE);
        make_image();
        seal();
        for (unsigned n = 0; (slab = owned_slab(n, &owner)); n++)
            last = slab;
        must_transfer(IMAGE, &junk, 1, (last + 1) << SLAB_BITS, true);
        killed = repair_until(step++);
        repair();
        assert_int_equal(verify().corruptions, 0);
        if (!all_had_checksums())
            fail_msg("killed at step %u: the promise is gone", step - 1);
    } while (killed);
    assert_true(step > 2);
}

/* Does the file still end before each slab that it says to have? */
static bool cut_is_seen(void)
{
    uint64_t words[64];
    int fd = open(IMAGE, O_RDONLY | O_CLOEXEC);
    off_t size = lseek(fd, 0, SEEK_END);
    bool seen = true;

    assert_int_equal(pread(fd, words, sizeof words, SLAB_TABLE_OFFSET), sizeof words);
    close(fd);
    for (unsigned slab = MIRROR_HEADS; slab < 64; slab++)
        seen = seen && (!words[slab] || size <= (off_t)slab << SLAB_BITS);
    return seen;
}

/* Cut inside of the metadata, wherever the repair is killed: nothing reads as zeros unseen. */
static void test_interrupted_repair_of_a_cut(void **state)
{
    static const off_t length[] = {2 * MIB + 3 * PAGE, 3 * MIB, 5 * MIB};
    unsigned step = 0, run = 0;
    uint8_t junk = 0xee;

    (void)state;
    while (run < 2 * sizeof length / sizeof *length) {
        bool killed;

        unlink(IMAGE);
        make_image();
        if (run & 1)
            seal();
        /* To repair the header marks its page in the mirror, which is gone. */
        must_transfer(IMAGE, &junk, 1, 16, true);
        assert_int_equal(truncate(IMAGE, length[run / 2]), 0);
        killed = repair_until(step++);
        if (!cut_is_seen())
            fail_msg("cut at %lld, killed at step %u: the cut is not seen any more",
                     (long long)length[run / 2], step - 1);
        repair();
        unlink(scratch("image.pcow.rescue-2"));
        if (!killed) {
            step = 0;
            run++;
        }
    }
}

/* ---- beside a writer ------------------------------------------------------------------------- */

static pcow_image *open_at(const char *snapshot)
{
    pcow_image *image;

    MUST(pcow_open(IMAGE, PCOW_OPEN_NO_BASE, snapshot, &image, &error));
    return image;
}

static void checksum_beside(const char *snapshot, pcow_progress_fn progress, void *opaque)
{
    pcow_image *image = open_at(snapshot);

    MUST(pcow_checksum_beside_writer(image, 0, NULL, progress, opaque, &error));
    pcow_close(image);
}

/* Those of what is final, without VM state; the guest stores, and none of it is slower or wrong. */
static void test_beside_a_writer(void **state)
{
    pcow_image *writer, *reader;
    pcow_map *map;
    uint8_t *memory;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    map = must_map_by(writer, PCOW_ENGINE_SIGNAL, 0);
    memory = pcow_map_address(map);
    checksum_beside("one", NULL, NULL);
    memory[2 * PCOW_SLAB_SIZE + 3 * PAGE] = 0x71;
    memory[7 * PCOW_SLAB_SIZE] = 0x72;
    checksum_beside("two", NULL, NULL);
    checksum_beside("two", NULL, NULL);
    reader = open_at("two");
    /* in use */
    MUST_FAIL(-EBUSY, pcow_snapshot_delete(writer, "two", NULL, &error));
    pcow_close(reader);
    reader = must_open(IMAGE, PCOW_OPEN_FORCE_SHARE);
    MUST_FAIL(-EINVAL, pcow_checksum_beside_writer(reader, 0, NULL, NULL, NULL, &error));
    pcow_close(reader);
    MUST_FAIL(-EINVAL, pcow_checksum_beside_writer(writer, 0, NULL, NULL, NULL, &error));
    pcow_map_destroy(map);
    pcow_close(writer);
    expect_verified(ONE + TWO - PCOW_SLAB_SIZE, PCOW_SLAB_SIZE + ACTIVE + PAGE);
}

/* That all were made is noted in the file alone, and the writer keeps it when it closes. */
static void test_gone_beside_a_writer(void **state)
{
    static uint8_t kept[PAGE], zeros[PAGE];
    pcow_image *writer;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    checksum_beside("two", NULL, NULL);
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), false);
    for (unsigned closed = 0; closed < 2; closed++) {
        must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(0), true);
        assert_int_equal(verify_shared().corruptions, 8);
        must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), true);
        assert_int_equal(verify_shared().corruptions, 0);
        if (closed)
            break;
        store(writer, 0, 0, 0x33);
        MUST(pcow_snapshot_rename(writer, "two", "2", &error));
        pcow_close(writer);
    }
    must_be_clean(IMAGE);
    /* Of the image of nobody, too: the mirror of the page is brought up to date. */
    checksum_beside("one", NULL, NULL);
    must_be_clean(IMAGE);
}

/*
 * The writer has known of none when it opened the image: it looks before it changes what was a
 * snapshot's.
 */
static void test_writer_looks_for_them(void **state)
{
    pcow_image *writer;
    struct pcow_data_result result;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    checksum_beside("two", NULL, NULL);
    /* Merged into "two", given back, and taken by others. */
    MUST(pcow_snapshot_delete(writer, "one", NULL, &error));
    assert_int_equal(verify_shared().corruptions, 0);
    MUST(pcow_snapshot_revert(writer, "two", &error));
    MUST(pcow_snapshot_create(writer, "three", &error));
    MUST(pcow_snapshot_delete(writer, "two", NULL, &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(writer, slab, slab + 7, 0x61);
    checksum_beside("three", NULL, NULL);
    MUST(pcow_snapshot_delete(writer, "three", NULL, &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(writer, slab, slab + 9, 0x62);
    pcow_close(writer);
    result = verify();
    if (result.corruptions)
        fail_msg("%s", findings.text);
    assert_int_equal(result.verified, 0);
    must_be_clean(IMAGE);
}

static int ask_another(void *opaque, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    MUST_FAIL(-EBUSY, pcow_checksum_beside_writer(opaque, 0, NULL, NULL, NULL, &error));
    return 0;
}

struct deleting {
    pcow_image *writer;
    unsigned calls, at;
};

static int delete_one(void *opaque, uint64_t done, uint64_t total)
{
    struct deleting *deleting = opaque;

    assert_true(done <= total);
    if (++deleting->calls == deleting->at)
        MUST(pcow_snapshot_delete(deleting->writer, "one", NULL, &error));
    return 0;
}

/* What was hashed, and is another layer's before that is published, gets none. */
static void test_tree_changes_beside_it(void **state)
{
    (void)state;
    for (unsigned at = 1; at <= 8; at++) {
        struct deleting deleting = {.at = at};

        unlink(IMAGE);
        make_image();
        deleting.writer = must_open(IMAGE, PCOW_OPEN_WRITE);
        checksum_beside("two", delete_one, &deleting);
        assert_int_equal(deleting.calls, 8);
        for (unsigned slab = 0; slab < SLABS; slab++)
            store(deleting.writer, slab, slab + 7, 0x61);
        pcow_close(deleting.writer);
        if (verify().corruptions)
            fail_msg("deleted at slab %u: %s", at, findings.text);
        must_be_clean(IMAGE);
    }
}

/* Of makers there is one at a time: the older one would not know of the other's. */
static void test_one_maker_at_a_time(void **state)
{
    pcow_image *writer, *first, *second;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    first = open_at("two");
    MUST(pcow_snapshot_delete(writer, "one", NULL, &error));
    second = open_at("two");
    MUST(pcow_checksum_beside_writer(second, 0, NULL, ask_another, first, &error));
    MUST(pcow_checksum_beside_writer(first, 0, NULL, NULL, NULL, &error));
    pcow_close(first);
    pcow_close(second);
    pcow_close(writer);
    if (verify().corruptions)
        fail_msg("%s", findings.text);
}

/* ---- what is known to be damaged ------------------------------------------------------------- */

enum loss { ENTRY_ZERO, PAGE_ZERO, ENTRY_BROKEN, DATA_OTHER, LOSSES };

/* The first slab of "one": its checksum is lost and its data damaged, or only that. */
static void damage_one(enum loss loss, uint32_t layer, uint32_t number)
{
    static const uint8_t zeros[PAGE];
    uint64_t slab = slab_of(layer, number, OWNER_DATA);

    flip((slab << SLAB_BITS) + 3 * PAGE);
    if (loss == ENTRY_ZERO)
        must_transfer(IMAGE, (void *)zeros, 64, datasum_offset(slab), true);
    else if (loss == PAGE_ZERO)
        must_transfer(IMAGE, (void *)zeros, PAGE, datasum_offset(0), true);
    else if (loss == ENTRY_BROKEN)
        flip(datasum_offset(slab) + 12);
}

static int make_again(const char *snapshot, unsigned flags, bool beside, char *said)
{
    struct pcow_error error = {0};
    pcow_image *image = beside ? open_at(snapshot) : must_open(IMAGE, PCOW_OPEN_WRITE);
    int ret;

    findings.text[0] = 0;
    ret = beside ? pcow_checksum_beside_writer(image, flags, add_finding, NULL, &findings, &error)
                 : pcow_checksum(image, snapshot, flags, add_finding, NULL, &findings, &error);
    pcow_close(image);
    if (said)
        strcpy(said, error.message);
    return ret;
}

/* Nothing is made of it, it is named, and it stays found; until somebody accepts it. */
static void test_damage_of_snapshots_is_not_blessed(void **state)
{
    static const char *const words[] = {"its checksum is gone", "its checksum is gone",
                                        "its checksum is damaged", "it is not what its checksum"};
    char said[sizeof((struct pcow_error *)0)->message];

    (void)state;
    for (unsigned beside = 0; beside < 2; beside++) {
        for (enum loss loss = 0; loss < LOSSES; loss++) {
            uint64_t before;

            unlink(IMAGE);
            make_image();
            checksum("two", false);
            damage_one(loss, 1, 0);
            before = verify().corruptions;
            assert_int_equal(before, loss == PAGE_ZERO ? 8 : 1);
            assert_int_equal(make_again("two", 0, beside, said), -EUCLEAN);
            assert_non_null(strstr(findings.text, "the 2 MiB from guest byte 0 of snapshot 'one'"));
            assert_non_null(strstr(findings.text, words[loss]));
            assert_non_null(strstr(said, words[loss]));
            assert_int_equal(verify().corruptions, before);
            assert_int_equal(make_again("two", PCOW_CHECKSUM_ACCEPT_DAMAGE, beside, NULL), 0);
            assert_int_equal(verify().corruptions, 0);
            assert_int_equal(make_again("two", 0, beside, NULL), 0);
        }
    }
}

/* Killed when the old one is dropped and the new one not published: it is still found. */
static void test_killed_while_damage_is_accepted(void **state)
{
    uint64_t done = 8 * PCOW_SLAB_SIZE;        /* with VM state, the last but one of nine */
    pid_t child;

    (void)state;
    make_image();
    checksum("two", false);
    damage_one(DATA_OTHER, 1, 0);
    child = fork();
    if (child == 0) {
        struct pcow_error error;
        pcow_image *image;

        if (!pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, &error))
            pcow_checksum(image, "two", PCOW_CHECKSUM_ACCEPT_DAMAGE, NULL, kill_after, &done,
                          &error);
        _exit(1);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(entry_word(slab_of(1, 0, OWNER_DATA)), 0);
    assert_int_equal(make_again("two", 0, false, NULL), -EUCLEAN);
    expect_found("guest byte 0 of snapshot 'one'", "its checksum is gone", 0, 0);
    assert_int_equal(make_again("two", PCOW_CHECKSUM_ACCEPT_DAMAGE, false, NULL), 0);
    expect_verified(ONE + TWO, ACTIVE);
}

/* One snapshot of several is told once: by its own turn. */
static void test_damage_is_told_once(void **state)
{
    (void)state;
    make_image();
    checksum("two", false);
    damage_one(ENTRY_ZERO, 1, 0);
    assert_int_equal(make_again("two", PCOW_CHECKSUM_COMPARE_OWN, true, NULL), 0);
    assert_int_equal(make_again("one", PCOW_CHECKSUM_COMPARE_OWN, true, NULL), -EUCLEAN);
    assert_int_equal(verify().corruptions, 1);
}

/* unseal keeps what the header says until somebody has changed something. */
static void test_damage_of_a_template_is_not_blessed(void **state)
{
    pcow_image *image;

    (void)state;
    for (enum loss loss = 0; loss < LOSSES; loss++) {
        uint64_t before;

        unlink(IMAGE);
        make_image();
        seal();
        damage_one(loss, 3, 6);
        before = verify().corruptions;
        assert_int_equal(before, loss == PAGE_ZERO ? 11 : 1);
        MUST(pcow_unseal(IMAGE, &error));
        assert_int_equal(verify().corruptions, before);
        assert_int_equal(make_again(NULL, PCOW_CHECKSUM_ACTIVE, false, NULL), -EUCLEAN);
        assert_non_null(
            strstr(findings.text, "the 2 MiB from guest byte 12582912 of the active layer"));
        assert_int_equal(verify().corruptions, before);
        assert_int_equal(
            make_again(NULL, PCOW_CHECKSUM_ACTIVE | PCOW_CHECKSUM_ACCEPT_DAMAGE, false, NULL),
            0);
        expect_verified(ALL, 0);
        /* A writer that comes drops some, which is no damage. */
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        store(image, 6, 3, 0x66);
        pcow_close(image);
        expect_verified(ALL - 2 * PAGE, 2 * PAGE);
        seal();
        expect_verified(ALL, 0);
    }
}

/* A seal without checksums forgets nothing either. */
static void test_plain_seal_keeps_what_is_gone(void **state)
{
    pcow_image *image;

    (void)state;
    make_image();
    seal();
    damage_one(ENTRY_ZERO, 3, 6);
    for (unsigned i = 0; i < 2; i++) {
        MUST(pcow_unseal(IMAGE, &error));
        image = must_open(IMAGE, PCOW_OPEN_WRITE);
        MUST(pcow_seal(image, &error));
        pcow_close(image);
        assert_int_equal(verify().corruptions, 1);
    }
}

static void test_others(void **state)
{
    pcow_image *image;
    struct pcow_info info;
    struct pcow_data_result result;

    (void)state;
    image = must_create_without_mirror(IMAGE, SIZE);
    store(image, 0, 0, 1);
    MUST_FAIL(-ENOTSUP, pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    pcow_close(image);
    result = verify();
    assert_int_equal(result.corruptions, 0);
    assert_int_equal(result.without, PAGE);
    unlink(IMAGE);
    make_image();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST_FAIL(-ENOENT, pcow_checksum(image, "three", 0, NULL, NULL, NULL, &error));
    MUST(pcow_seal(image, &error));
    pcow_get_info(image, &info);
    assert_false(info.checksums);
    pcow_close(image);
    expect_verified(0, ALL);
    MUST(pcow_unseal(IMAGE, &error));
    seal();
    image = must_open(IMAGE, 0);
    pcow_get_info(image, &info);
    assert_true(info.checksums);
    MUST_FAIL(-EROFS, pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
    pcow_close(image);
    MUST(pcow_unseal(IMAGE, &error));
    image = must_open(IMAGE, 0);
    pcow_get_info(image, &info);
    assert_false(info.checksums);
    pcow_close(image);
    MUST_FAIL(-ENOENT, pcow_check_data(scratch("none"), 0, NULL, NULL, NULL, &result, &error));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_finds_nothing_where_nothing_is, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_finds_damaged_data, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_finds_data_in_a_wrong_place, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_finds_damaged_checksums, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_finds_checksums_that_are_gone, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_gone_beside_a_writer, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_repair_of_a_snapshot_with_checksums, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_damage_is_not_blessed, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_writers_drop_them, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_guests_drop_them, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_merges_drop_them, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_goes_on_where_it_was, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_half_a_checksum, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_repair_drops_them, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_repair_of_a_sealed_image, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_interrupted_repair, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_interrupted_repair_of_a_leak, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_interrupted_repair_of_a_cut, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_beside_a_writer, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_writer_looks_for_them, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_tree_changes_beside_it, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_one_maker_at_a_time, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_damage_of_snapshots_is_not_blessed, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_killed_while_damage_is_accepted, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_damage_is_told_once, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_damage_of_a_template_is_not_blessed, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_plain_seal_keeps_what_is_gone, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_others, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
