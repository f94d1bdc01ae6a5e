/* SPDX-License-Identifier: BSD-3-Clause */
#include "mapped_image.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE UINT64_C(120000000000)         /* nanoseconds for the thread that prepares */

void give_up(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

volatile uint8_t *mapped_image_make(struct mapped_image *mapped, const char *path, uint64_t size,
                                    unsigned prepared)
{
    struct pcow_create_options create = {.virtual_size = size};
    struct pcow_map_options options = {
        .engine = PCOW_ENGINE_SIGNAL, .full_policy = PCOW_FULL_FAIL, .prepared_slabs = prepared};
    struct pcow_error error;

    mapped->prepared = prepared;
    if (pcow_create(path, &create, &error)
        || pcow_open(path, PCOW_OPEN_WRITE, NULL, &mapped->image, &error)
        || pcow_map_create(mapped->image, &options, &mapped->map, &error))
        give_up("%s", error.message);
    return pcow_map_address(mapped->map);
}

void mapped_image_wait_idle(const struct mapped_image *mapped)
{
    struct pcow_map_stats before, stats;
    uint64_t begun = now();

    if (!mapped->map)
        return;
    do {
        pcow_map_get_stats(mapped->map, &before);
        usleep(300000);
        pcow_map_get_stats(mapped->map, &stats);
        if (now() - begun > PATIENCE)
            give_up("%u slabs are prepared, not %u", stats.slabs_ready, mapped->prepared);
    } while (stats.slabs_ready < mapped->prepared || stats.slabs_queued > 0
             || stats.slabs_prepared != before.slabs_prepared);
}
