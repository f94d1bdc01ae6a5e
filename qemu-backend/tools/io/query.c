/* SPDX-License-Identifier: BSD-3-Clause */
/* length, info, map, resize, sleep. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "unfinished.h"
#include "uuid.h"

static bool run_length(struct session *session, const struct command *command, int argc,
                       char **argv)
{
    char text[SIZE_TEXT_LENGTH];

    (void)command;
    (void)argc;
    (void)argv;
    puts(format_size_decimals((double)pcow_size(session->image), text));
    return true;
}

static void print_monitor(const pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    printf("engine: %s\n", stats.engine == PCOW_ENGINE_MINOR ? "minor" : "signal");
    printf("write traps: %" PRIu64 "\nread traps: %" PRIu64 "\n", stats.write_traps,
           stats.read_traps);
    printf("pages copied: %" PRIu64 "\npages zeroed: %" PRIu64 "\n", stats.pages_copied,
           stats.pages_zeroed);
    printf("slabs promoted: %" PRIu64 "\npool full waits: %" PRIu64 "\n", stats.slabs_promoted,
           stats.pool_full_waits);
    printf("mappings: %u of %u\nmonitor memory: %zu\n", stats.vmas, stats.vma_budget, stats.memory);
}

static bool run_info(struct session *session, const struct command *command, int argc, char **argv)
{
    char text[SIZE_TEXT_LENGTH], uuid[UUID_TEXT_LENGTH];
    struct pcow_info info;

    (void)command;
    (void)argc;
    (void)argv;
    pcow_get_info(session->image, &info);
    printf("format name: %s\n", info.format == 1 ? "pcow1" : "pcow");
    printf("cluster size: %s\n", format_size_decimals((double)info.cluster_size, text));
    printf("uuid: %s\ngeneration: %" PRIu64 "\n", format_uuid(info.uuid, uuid), info.generation);
    printf("data size: %s\n", format_size_decimals((double)info.data_size, text));
    printf("chain depth: %u\nsnapshots: %u\n", info.chain_depth, info.snapshots);
    printf("persistence: %s\n", pcow_persistence_name(info.persistence));
    if (session->map) {
        print_monitor(session->map);
    }
    return true;
}

static void print_range(uint64_t offset, uint64_t length, bool allocated)
{
    char size[SIZE_TEXT_LENGTH], start[SIZE_TEXT_LENGTH];

    printf("%s (0x%" PRIx64 ") bytes %s at offset %s (0x%" PRIx64 ")\n",
           format_size_decimals((double)length, size), length,
           allocated ? "    allocated" : "not allocated",
           format_size_decimals((double)offset, start), offset);
}

/* Allocated: in this file, as qemu-io says it. */
static bool run_map(struct session *session, const struct command *command, int argc, char **argv)
{
    uint64_t size = pcow_size(session->image), begin = 0, offset = 0;
    bool allocated = false;
    struct pcow_error error;

    (void)argc;
    (void)argv;
    while (offset < size) {
        struct pcow_extent extent;
        bool here;

        if (pcow_get_extent(session->image, offset, size - offset, &extent, &error)) {
            return command_failed(command, &error);
        }
        here = extent.present && extent.depth == 0;
        if (offset > begin && here != allocated) {
            print_range(begin, offset - begin, allocated);
            begin = offset;
        }
        allocated = here;
        offset += extent.length;
    }
    print_range(begin, offset - begin, allocated);
    return true;
}

static bool run_resize(struct session *session, const struct command *command, int argc,
                       char **argv)
{
    struct pcow_error error, problem;
    bool shrink = false;
    uint64_t size;
    int letter, r;

    while ((letter = next_letter(command, argc, argv)) != -1) {
        if (letter != 's') {
            return false;
        }
        shrink = true;
    }
    if (!parse_size_option("image size", argv[optind], &size)) {
        return false;
    }
    if (round_virtual_size(&size, false, &error)) {
        return command_failed(command, &error);
    }
    session_unmap(session);
    r = session->unfinished ? check_no_revert(session->image, &error) : 0;
    r = r ? r : pcow_resize(session->image, size, shrink, &error);
    if (session_map(session, &problem) && !r) {
        error = problem;
        r = problem.code;
    }
    return r ? command_failed(command, &error) : true;
}

static bool run_sleep(struct session *session, const struct command *command, int argc, char **argv)
{
    struct timespec time;
    unsigned long milliseconds;
    char *end;

    (void)session;
    (void)command;
    (void)argc;
    milliseconds = strtoul(argv[1], &end, 0);
    if (end == argv[1] || *end || argv[1][0] == '-') {
        report("'%s' is not a number of milliseconds", argv[1]);
        return false;
    }
    time = (struct timespec){.tv_sec = (time_t)(milliseconds / 1000),
                             .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&time, &time) && errno == EINTR) {
    }
    return true;
}

const struct command query_commands[] = {
    {"length", "l", "", "show the virtual size", NULL, 0, 0, run_length},
    {"info", "i", "", "show what the image is, and the counters of its map", NULL, 0, 0, run_info},
    {"map", "m", "", "show which ranges this file holds", NULL, 0, 0, run_map},
    {"resize", "truncate", "[-s] SIZE", "change the virtual size; -s: it may shrink", ":s", 1, 1,
     run_resize},
    {"sleep", NULL, "MILLISECONDS", "wait", NULL, 1, 1, run_sleep},
    {0},
};
