/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A thread that says on stderr what the image monitor reports, while a store may be waiting in it.
 */
#ifndef IO_EVENTS_H
#define IO_EVENTS_H

#include <pcow.h>
#include <pthread.h>

struct events {
    pcow_map *map;
    bool waits;                                /* a store that finds the pool full */
    int stop_fd;
    pthread_t thread;
};

int events_start(struct events *events, pcow_map *map, bool waits, struct pcow_error *error);
void events_stop(struct events *events);

#endif
