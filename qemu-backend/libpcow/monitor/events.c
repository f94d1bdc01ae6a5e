/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A bounded queue from fault handlers to the main loop: many producers, one consumer, no locks;
 * when full, events are dropped.
 */
#include <sys/eventfd.h>
#include <unistd.h>

#include "monitor/monitor.h"

int events_init(struct event_queue *queue)
{
    queue->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return queue->fd < 0 ? -1 : 0;
}

void events_destroy(struct event_queue *queue)
{
    if (queue->fd >= 0)
        close(queue->fd);
    queue->fd = -1;
}

void events_wake(struct event_queue *queue)
{
    const uint64_t one = 1;
    ssize_t ignored = write(queue->fd, &one, sizeof one);

    (void)ignored;
}

void events_post(struct event_queue *queue, enum pcow_event_kind kind, int error, uint64_t offset)
{
    uint32_t at = __atomic_load_n(&queue->tail, __ATOMIC_ACQUIRE);

    do {
        /*
         * Signed: the head may have passed a tail that is no longer the tail, which is not a full
         * queue.
         */
        if ((int32_t)(at - __atomic_load_n(&queue->head, __ATOMIC_ACQUIRE))
            >= (int32_t)EVENT_QUEUE_SIZE)
            return;
    } while (!__atomic_compare_exchange_n(&queue->tail, &at, at + 1, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    queue->event[at % EVENT_QUEUE_SIZE] = (struct pcow_event){kind, error, offset};
    __atomic_store_n(&queue->ready[at % EVENT_QUEUE_SIZE], at + 1, __ATOMIC_RELEASE);
    events_wake(queue);
}

bool events_next(struct event_queue *queue, struct pcow_event *event)
{
    uint32_t at = __atomic_load_n(&queue->head, __ATOMIC_ACQUIRE);
    uint64_t count;
    ssize_t ignored;

    if (__atomic_load_n(&queue->ready[at % EVENT_QUEUE_SIZE], __ATOMIC_ACQUIRE) != at + 1) {
        ignored = read(queue->fd, &count, sizeof count);
        (void)ignored;
        /*
         * One may have come between the look and the read; without this it would wait for the next
         * one.
         */
        if (__atomic_load_n(&queue->ready[at % EVENT_QUEUE_SIZE], __ATOMIC_ACQUIRE) != at + 1)
            return false;
    }
    *event = queue->event[at % EVENT_QUEUE_SIZE];
    __atomic_store_n(&queue->head, at + 1, __ATOMIC_RELEASE);
    return true;
}
