/* SPDX-License-Identifier: BSD-3-Clause */
/* What goes from the shim's kernel to the guest's. */
#include "place.h"

#include <stdlib.h>
#include <string.h>

#include "machine/stub.h"

#define ADDRESS 0xff4000u
#define PAGE 4096u

static uint64_t get64(const unsigned char *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof value);
    return value;
}

/* What the page tables make of an address; those of the stub are where it is meant to lie. */
static uint64_t walk(const unsigned char *stub, uint64_t table, unsigned level, uint64_t address)
{
    for (;; level--) {
        uint64_t entry;

        assert_true(table >= ADDRESS && table < ADDRESS + STUB_SIZE && table % PAGE == 0);
        entry = get64(stub + (table - ADDRESS) + (address >> (12 + 9 * (level - 1)) & 511) * 8);
        assert_int_equal(entry & 3, 3);
        if (level == 2) {
            assert_true(entry & 0x80);
            return (entry & ~UINT64_C(0x1fffff)) | (address & 0x1fffff);
        }
        table = entry & ~UINT64_C(0xfff);
    }
}

static void stub_maps_what_the_boot_protocol_wants(void **state)
{
    static const uint64_t addresses[] = {0,          ADDRESS,    0x1000000,  0x3fffffff,
                                         0x40000000, 0x7fffffff, 0x80000123, 0xffffffff};
    unsigned char *stub = calloc(1, STUB_SIZE);

    (void)state;
    assert_non_null(stub);
    stub_make(stub, ADDRESS, ADDRESS + STUB_SIZE, 0x4000200);
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
        assert_int_equal(walk(stub, ADDRESS + PAGE, 5, addresses[i]), addresses[i]);
        assert_int_equal(walk(stub, ADDRESS + 2 * PAGE, 4, addresses[i]), addresses[i]);
    }
    free(stub);
}

static void stub_has_its_numbers(void **state)
{
    unsigned char *stub = calloc(1, STUB_SIZE);
    bool params = false, entry = false, tables = false;

    (void)state;
    assert_non_null(stub);
    stub_make(stub, ADDRESS, ADDRESS + STUB_SIZE, 0x4000200);
    for (size_t at = 0; at < 256; at += 8) {
        uint64_t value = get64(stub + at);

        params |= value == ADDRESS + STUB_SIZE;
        entry |= value == 0x4000200;
        tables |= value == ADDRESS + PAGE;
    }
    assert_true(params && entry && tables);
    free(stub);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stub_maps_what_the_boot_protocol_wants),
        cmocka_unit_test(stub_has_its_numbers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
