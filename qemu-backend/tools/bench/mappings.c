/* SPDX-License-Identifier: BSD-3-Clause */
/* What the kernel says about a range of this process: /proc/self/maps and smaps. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "sides.h"

static bool inside(const char *line, uintptr_t from, uintptr_t to, bool *heading)
{
    uintptr_t begin, end;

    *heading = sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2;
    return *heading && begin < to && end > from;
}

unsigned count_mappings(const void *memory, uint64_t size)
{
    FILE *file = fopen("/proc/self/maps", "re");
    uintptr_t from = (uintptr_t)memory;
    char *line = NULL;
    size_t room = 0;
    unsigned count = 0;
    bool heading;

    while (file && getline(&line, &room, file) > 0) {
        count += inside(line, from, from + size, &heading);
    }
    free(line);
    if (file) {
        fclose(file);
    }
    return count;
}

double huge_share(const void *memory, uint64_t size)
{
    FILE *file = fopen("/proc/self/smaps", "re");
    uintptr_t from = (uintptr_t)memory;
    char *line = NULL;
    size_t room = 0;
    uint64_t huge = 0;
    bool ours = false;

    while (file && getline(&line, &room, file) > 0) {
        uint64_t kib;
        bool heading, is_inside = inside(line, from, from + size, &heading);

        if (heading) {
            ours = is_inside;
        } else if (ours
                   && (sscanf(line, "ShmemPmdMapped: %" SCNu64, &kib) == 1
                       || sscanf(line, "FilePmdMapped: %" SCNu64, &kib) == 1)) {
            huge += kib << 10;
        }
    }
    free(line);
    if (file) {
        fclose(file);
    }
    return (double)huge / (double)size;
}
