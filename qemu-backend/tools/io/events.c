/* SPDX-License-Identifier: BSD-3-Clause */
#include "events.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "report.h"

static void say(const struct pcow_event *event, bool waits)
{
    switch (event->kind) {
    case PCOW_EVENT_POOL_FULL:
        if (!waits) {
            break;                             /* the command that failed says it */
        }
        report("pool full at offset %" PRIu64 "; free space or extend the pool", event->offset);
        break;
    case PCOW_EVENT_POOL_RESUMED:
        report("pool has space again, offset %" PRIu64 " went on", event->offset);
        break;
    case PCOW_EVENT_ERROR:
        report("access at offset %" PRIu64 " failed: %s", event->offset, strerror(-event->error));
        break;
    case PCOW_EVENT_WITHDRAWN:                 /* each command asks anew */
        break;
    }
}

static void *watch(void *opaque)
{
    struct events *events = opaque;
    struct pollfd fds[2] = {
        {.fd = pcow_map_event_fd(events->map), .events = POLLIN},
        {.fd = events->stop_fd, .events = POLLIN},
    };
    struct pcow_event event;
    bool stopped = false;

    /* what came before the stop is still said */
    while (!stopped) {
        if (poll(fds, 2, -1) < 0 && errno != EINTR) {
            break;
        }
        stopped = fds[1].revents != 0;
        while (pcow_map_next_event(events->map, &event)) {
            say(&event, events->waits);
        }
    }
    return NULL;
}

int events_start(struct events *events, pcow_map *map, bool waits, struct pcow_error *error)
{
    sigset_t all, old;
    int r;

    events->map = map;
    events->waits = waits;
    events->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (events->stop_fd < 0) {
        return fail(error, -errno, "no event descriptor: %s", strerror(errno));
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    r = pthread_create(&events->thread, NULL, watch, events);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r) {
        close(events->stop_fd);
        return fail(error, -r, "cannot start a thread: %s", strerror(r));
    }
    return 0;
}

void events_stop(struct events *events)
{
    if (!eventfd_write(events->stop_fd, 1)) {
        pthread_join(events->thread, NULL);
    }
    close(events->stop_fd);
}
