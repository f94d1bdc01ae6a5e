/* SPDX-License-Identifier: BSD-3-Clause */
/* What a map has to tell whoever reads its events. */
#ifndef PCOW_MONITOR_EVENTS_H
#define PCOW_MONITOR_EVENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "pcow.h"

#define EVENT_QUEUE_SIZE 64u          /* power of two */

struct event_queue {
    struct pcow_event event[EVENT_QUEUE_SIZE];
    uint32_t ready[EVENT_QUEUE_SIZE];  /* position + 1 when the event may be read */
    uint32_t head, tail;
    int fd;                            /* eventfd */
};

/* Async-signal-safe. */
int events_init(struct event_queue *queue);
void events_destroy(struct event_queue *queue);
void events_post(struct event_queue *queue, enum pcow_event_kind kind, int error, uint64_t offset);
void events_wake(struct event_queue *queue);           /* for what is not in it */
bool events_next(struct event_queue *queue, struct pcow_event *event);

#endif
