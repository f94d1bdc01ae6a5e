/* SPDX-License-Identifier: BSD-3-Clause */
#include "guest.h"

#include <string.h>

bool compare(const struct memory *memory, size_t offset, size_t length, const char *what, FILE *out)
{
    const uint8_t *is = memory->data + offset, *must = memory->model + offset;
    size_t first = 0, last = length;

    if (memcmp(is, must, length) == 0) {
        return true;
    }
    while (first < length && is[first] == must[first]) {
        first++;
    }
    if (first == length) {
        fprintf(out, "%s: bytes at %#zx changed while they were compared\n", what,
                DATA_OFFSET + offset);
        return false;
    }
    while (last > first && is[last - 1] == must[last - 1]) {
        last--;
    }
    fprintf(out, "%s: image offset %#zx to %#zx: wrong from %#zx to %#zx:", what,
            DATA_OFFSET + offset, DATA_OFFSET + offset + length, DATA_OFFSET + offset + first,
            DATA_OFFSET + offset + last);
    for (size_t i = first; i < last && i < first + 16; i++) {
        fprintf(out, " %02x(%02x)", is[i], must[i]);
    }
    fprintf(out, " is(must be)\n");
    return false;
}
