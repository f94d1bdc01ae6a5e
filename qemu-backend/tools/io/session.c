/* SPDX-License-Identifier: BSD-3-Clause */
#include "session.h"

#include <errno.h>
#include <inttypes.h>

#include "guard.h"
#include "report.h"
#include "unfinished.h"

#define STORE_TRIES 3

int session_open(struct session *session, struct pcow_error *error)
{
    int r =
        pcow_open(session->path, session->open_flags, session->snapshot, &session->image, error);

    if (r) {
        return r;
    }
    session->unfinished =
        (session->open_flags & PCOW_OPEN_WRITE) && check_no_revert(session->image, error);
    r = session_map(session, error);
    if (r) {
        session_close(session);
    }
    return r;
}

bool session_close(struct session *session)
{
    struct pcow_error error;
    bool ok;

    session_unmap(session);
    ok = !session->image || !pcow_finish(session->image, &error);
    if (!ok) {
        report_error(&error);
    }
    pcow_close(session->image);
    session->image = NULL;
    return ok;
}

void session_unmap(struct session *session)
{
    if (session->map) {
        events_stop(&session->events);
        pcow_map_destroy(session->map);
        session->map = NULL;
    }
}

int session_map(struct session *session, struct pcow_error *error)
{
    int r;

    if (!session->use_map) {
        return 0;
    }
    session->map_options.serves_sigbus = true;         /* see guard.h */
    r = pcow_map_create(session->image, &session->map_options, &session->map, error);
    if (r) {
        return r;
    }
    r = events_start(&session->events, session->map,
                     session->map_options.full_policy == PCOW_FULL_WAIT, error);
    if (r) {
        pcow_map_destroy(session->map);
        session->map = NULL;
    }
    return r;
}

int session_check_range(const struct session *session, uint64_t offset, uint64_t length,
                        struct pcow_error *error)
{
    uint64_t size = pcow_size(session->image);

    if (offset > size || length > size - offset) {
        return fail(error, -EINVAL,
                    "offset %" PRIu64 " and length %" PRIu64
                    " reach beyond the end of the image (%" PRIu64 ")",
                    offset, length, size);
    }
    return 0;
}

static int check_writable(const struct session *session, struct pcow_error *error)
{
    if (!(session->open_flags & PCOW_OPEN_WRITE)) {
        return fail(error, -EROFS, "%s is open read-only", session->path);
    }
    return session->unfinished ? check_no_revert(session->image, error) : 0;
}

int session_read(struct session *session, uint64_t offset, void *buffer, size_t length,
                 struct pcow_error *error)
{
    int r = session_check_range(session, offset, length, error);

    if (r || !session->use_map) {
        return r ? r : pcow_read(session->image, offset, buffer, length, error);
    }
    if (!session->map) {
        return fail(error, -EIO, "%s could not be mapped again; open it anew", session->path);
    }
    if (guarded_copy(buffer, (const char *)pcow_map_address(session->map) + offset, length)) {
        return fail(error, -EIO, "bus error while loading from offset %" PRIu64 " to %" PRIu64,
                    offset, offset + length);
    }
    return 0;
}

/*
 * A store that gets SIGBUS has no reason; asking for the same range in words does. That may find
 * space by then: the thread that works ahead takes some, and gives it back where there is little.
 */
static int store(struct session *session, uint64_t offset, const void *buffer, uint64_t length,
                 struct pcow_error *error)
{
    char *target = (char *)pcow_map_address(session->map) + offset;

    for (unsigned tries = 0; tries < STORE_TRIES; tries++) {
        int r;

        if (!guarded_copy(target, buffer, length))
            return 0;
        r = pcow_map_resolve(session->map, offset, length, true, error);
        if (r)
            return r;
    }
    return fail(error, -EIO,
                "%s: bus error while storing to offset %" PRIu64 " to %" PRIu64
                ": the medium failed, or the pool was full and has space again",
                session->path, offset, offset + length);
}

int session_write(struct session *session, uint64_t offset, const void *buffer, size_t length,
                  struct pcow_error *error)
{
    int r = session_check_range(session, offset, length, error);

    r = r ? r : check_writable(session, error);
    if (r || !session->use_map) {
        return r ? r : pcow_write(session->image, offset, buffer, length, error);
    }
    if (!session->map) {
        return fail(error, -EIO, "%s could not be mapped again; open it anew", session->path);
    }
    return store(session, offset, buffer, length, error);
}

int session_zero(struct session *session, uint64_t offset, uint64_t length,
                 struct pcow_error *error)
{
    struct pcow_error problem;
    int r = session_check_range(session, offset, length, error);

    r = r ? r : check_writable(session, error);
    if (r) {
        return r;
    }
    /* pages that it takes from the base would not appear in a map that is there already */
    session_unmap(session);
    r = pcow_write_zeroes(session->image, offset, length, error);
    if (session_map(session, &problem) && !r) {
        r = fail(error, problem.code, "%s", problem.message);
    }
    return r;
}

int session_flush(struct session *session, struct pcow_error *error)
{
    if (!(session->open_flags & PCOW_OPEN_WRITE)) {
        return 0;
    }
    return session->map ? pcow_map_flush(session->map, 0, pcow_size(session->image), error)
                        : pcow_flush(session->image, error);
}
