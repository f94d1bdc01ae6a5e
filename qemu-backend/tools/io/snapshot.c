/* SPDX-License-Identifier: BSD-3-Clause */
/* snapshot: on the open image, and so under its map, as a running VM does it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
#include "report.h"
#include "size.h"
#include "unfinished.h"

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int list(pcow_image *image, struct pcow_error *error)
{
    struct pcow_snapshot *snapshots;
    size_t count;
    int r = pcow_snapshot_list(image, &snapshots, &count, error);

    if (r) {
        return r;
    }
    for (size_t i = 0; i < count; i++) {
        char size[SIZE_TEXT_LENGTH];

        printf("%" PRIu32 " (on %" PRIu32 "), %s%s: ", snapshots[i].id, snapshots[i].parent_id,
               format_size_decimals((double)snapshots[i].data_size, size),
               snapshots[i].current ? ", current" : "");
        print_text(snapshots[i].name);
        putchar('\n');
    }
    free(snapshots);
    return 0;
}

static int delete(pcow_image *image, const char *name, struct pcow_error *error)
{
    return pcow_snapshot_delete(image, name, NULL, error);
}

static int reclaim(pcow_image *image, const char *name, struct pcow_error *error)
{
    (void)name;
    return pcow_reclaim(image, NULL, error);
}

static bool run_snapshot(struct session *session, const struct command *command, int argc,
                         char **argv)
{
    static const struct {
        const char *name;
        int (*run)(pcow_image *image, const char *name, struct pcow_error *error);
        int words;
    } actions[] = {{"create", pcow_snapshot_create, 3},
                   {"revert", pcow_snapshot_revert, 3},
                   {"delete", delete, 3},
                   {"reclaim", reclaim, 2}};
    struct pcow_error error;
    bool timed = argc > 1 && !strcmp(argv[1], "-t");

    argc -= timed;
    argv += timed;
    if (argc == 2 && !timed && !strcmp(argv[1], "list")) {
        return list(session->image, &error) ? command_failed(command, &error) : true;
    }
    for (size_t i = 0; argc >= 2 && i < sizeof(actions) / sizeof(actions[0]); i++) {
        if (argc == actions[i].words && !strcmp(argv[1], actions[i].name)) {
            double begun = now();
            bool refused =
                session->unfinished && actions[i].run != delete &&actions[i].run != reclaim;
            bool failed = (refused && check_no_revert(session->image, &error))
                          || actions[i].run(session->image, argv[2], &error) < 0;

            if (timed && !failed) {
                printf("%s %.9f\n", argv[1], now() - begun);
                fflush(stdout);
            }
            return failed ? command_failed(command, &error) : true;
        }
    }
    report("usage: snapshot %s", command->arguments);
    return false;
}

const struct command snapshot_commands[] = {
    {"snapshot", NULL, "[-t] create NAME | revert NAME | delete NAME | reclaim | list",
     "snapshots of the open image; reclaim: give back what was dropped; -t: print the seconds",
     NULL, 1, 3,
     run_snapshot},
    {0},
};
