/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The small pieces: checksums against published vectors, words, page sets against the obvious
 * implementation, persist.
 */
#include "support.h"

#include <stdlib.h>
#include <string.h>

#include "format/format2.h"
#include "persist/persist.h"

static void test_crc32c_vectors(void **state)
{
    unsigned char bytes[32];

    (void)state;
    assert_int_equal(crc32c("123456789", 9), 0xe3069283);
    /* RFC 3720, B.4 */
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(crc32c(bytes, sizeof bytes), 0x8a9136aa);
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(crc32c(bytes, sizeof bytes), 0x62a8ab43);
}

static uint8_t crc8_bit_by_bit(uint64_t value)
{
    uint8_t crc = 0xff;

    for (int i = 0; i < 7; i++) {
        crc ^= (uint8_t)(value >> (8 * i));
        for (int bit = 0; bit < 8; bit++)
            crc = (uint8_t)(crc & 0x80 ? crc << 1 ^ 0x07 : crc << 1);
    }
    return crc;
}

static void test_words(void **state)
{
    uint64_t seed = random_seed();

    (void)state;
    assert_true(word_is_valid(0));
    for (unsigned i = 0; i < 100000; i++) {
        uint64_t value = random_next(&seed) & WORD_VALUE_MASK, word = word_encode(value);

        assert_int_equal(word_value(word), value);
        assert_int_equal(crc8_of_word(value), crc8_bit_by_bit(value));
        assert_true(word_is_valid(word));
        /* Any single flipped bit is noticed: CRC-8 detects them all. */
        assert_false(word_is_valid(word ^ UINT64_C(1) << (i % 64)));
    }
    for (unsigned i = 0; i < 10000; i++) {
        struct owner owner = {(enum owner_kind)(1 + i % 3),
                              (uint32_t)random_next(&seed) & MAX_LAYER_ID,
                              (uint32_t)random_next(&seed) % (1u << OWNER_NUMBER_BITS)};
        struct owner decoded = owner_decode(owner_encode(owner));

        assert_int_equal(decoded.kind, owner.kind);
        assert_int_equal(decoded.layer, owner.layer);
        assert_int_equal(decoded.number, owner.number);
    }
}

static void test_page_sets(void **state)
{
    uint64_t seed = random_seed();

    (void)state;
    for (unsigned round = 0; round < 2000; round++) {
        bool naive[PAGES_PER_SLAB] = {false};
        struct page_set set = {{0}};
        unsigned count = 0;

        for (unsigned i = random_next(&seed) % 8; i > 0; i--) {
            unsigned first = random_next(&seed) % PAGES_PER_SLAB,
                     length = random_next(&seed) % (PAGES_PER_SLAB - first + 1);

            page_set_add_range(&set, first, length);
            memset(naive + first, 1, length);
        }
        for (unsigned page = 0; page < PAGES_PER_SLAB; page++) {
            unsigned end = page;
            unsigned limit = page + 1 + random_next(&seed) % (PAGES_PER_SLAB - page);

            while (end < limit && naive[end] == naive[page])
                end++;
            assert_int_equal(page_set_has(&set, page), naive[page]);
            assert_int_equal(page_set_run_end(&set, page, limit), end);
            count += naive[page];
        }
        assert_int_equal(page_set_count(&set), count);
        assert_int_equal(page_set_empty(&set), count == 0);
        assert_int_equal(page_set_full(&set), count == PAGES_PER_SLAB);
    }
}

static void test_persist_copies_in_every_class(void **state)
{
    static _Alignas(64) unsigned char from[8192], to[8192];
    uint64_t seed = random_seed();

    (void)state;
    for (int class = PCOW_PERSISTENCE_VOLATILE; class <= PCOW_PERSISTENCE_PMEM; class++) {
        struct persist persist;

        persist_init(&persist, (enum pcow_persistence)class, NULL);
        for (unsigned round = 0; round < 500; round++) {
            size_t at = random_next(&seed) % 4096, length = random_next(&seed) % 4096;

            if (round % 2) {
                at &= ~(size_t)63;
                length &= ~(size_t)63;
            }
            fill_pattern(from, sizeof from, &seed);
            memset(to, 0xee, sizeof to);
            persist_copy(&persist, to + at, from + at, length);
            persist_fence(&persist);
            assert_memory_equal(to + at, from + at, length);
            assert_true(at == 0 || to[at - 1] == 0xee);
            assert_int_equal(to[at + length], 0xee);
        }
        assert_int_equal(
            persist_range(&persist, to + 5, class == PCOW_PERSISTENCE_PAGE_CACHE ? 1 : 3000), 0);
    }
}

static void test_classes(void **state)
{
    enum pcow_persistence persistence;

    (void)state;
    MUST(pcow_probe_persistence("/dev/shm", &persistence, &error));
    assert_int_equal(persistence, PCOW_PERSISTENCE_VOLATILE);
    MUST_FAIL(-ENOENT, pcow_probe_persistence("/nonexistent", &persistence, &error));
    assert_string_equal(pcow_persistence_name(PCOW_PERSISTENCE_PMEM), "pmem");
}

static void test_names(void **state)
{
    (void)state;
    assert_true(base_name_is_safe("a.pcow", 256));
    assert_false(base_name_is_safe("a/b", 256));
    assert_false(base_name_is_safe("..", 256));
    assert_false(base_name_is_safe("abc", 3));
    assert_true(snapshot_name_is_valid("before upgrade", 128));
    assert_false(snapshot_name_is_valid("a\nb", 128));
    assert_false(snapshot_name_is_valid("", 128));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crc32c_vectors), cmocka_unit_test(test_words),
        cmocka_unit_test(test_page_sets),      cmocka_unit_test(test_persist_copies_in_every_class),
        cmocka_unit_test(test_classes),        cmocka_unit_test(test_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
