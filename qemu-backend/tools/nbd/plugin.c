/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * nbdkit-pcow-plugin: a pcow image, or a snapshot of it, over NBD.
 *
 * One image for the life of the server, opened before nbdkit says that it is ready, so that what is
 * wrong with it is told to whoever starts the server. All connections share it; nbdkit sends one
 * request at a time, as libpcow wants it for an image. What a client has written is durable when
 * its flush, or its write with FUA, has been answered: nbdkit makes the latter a flush, because
 * there is no can_fua here.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#include "control.h"
#include "pcow.h"
#include "peer.h"
#include "unfinished.h"

#define THREAD_MODEL NBDKIT_THREAD_MODEL_SERIALIZE_ALL_REQUESTS
#define MAX_REQUEST (UINT32_C(32) << 20)       /* of nbdkit itself: 64 MiB */

/* nbdkit hands no context to its configuration callbacks: what they say has to be static. */
static struct {
    char *path;
    char *snapshot;
    /* profile of AppArmor of all that may connect; NULL: anybody */
    char *peer;
    int read_only, share, controlled;
    pcow_image *image;
    struct control *control;                   /* NULL: none is wanted */
} server;

static int failed(const struct pcow_error *error)
{
    nbdkit_error("%s", error->message);
    nbdkit_set_error(-error->code);
    return -1;
}

static int set_flag(const char *value, int *flag)
{
    *flag = nbdkit_parse_bool(value);
    return *flag < 0 ? -1 : 0;
}

static int pcow_plugin_config(const char *key, const char *value)
{
    if (!strcmp(key, "file") && !server.path) {
        server.path = nbdkit_absolute_path(value);
        return server.path ? 0 : -1;
    }
    if (!strcmp(key, "snapshot") && !server.snapshot) {
        server.snapshot = strdup(value);
        return server.snapshot ? 0 : -1;
    }
    if (!strcmp(key, "peer") && !server.peer) {
        server.peer = strdup(value);
        return server.peer ? 0 : -1;
    }
    if (!strcmp(key, "readonly")) {
        return set_flag(value, &server.read_only);
    }
    if (!strcmp(key, "share")) {
        return set_flag(value, &server.share);
    }
    if (!strcmp(key, "control")) {
        return set_flag(value, &server.controlled);
    }
    nbdkit_error("the parameter %s is unknown, or given twice: see nbdkit-pcow-plugin(1)", key);
    return -1;
}

static int pcow_plugin_config_complete(void)
{
    if (!server.path) {
        nbdkit_error("file=FILE is missing: the image to serve");
        return -1;
    }
    if (server.snapshot || server.share) {
        server.read_only = 1;
    }
    if (server.controlled && server.read_only) {
        nbdkit_error("control=true is for an image that is open for writing");
        return -1;
    }
    return 0;
}

static int pcow_plugin_get_ready(void)
{
    unsigned flags = server.read_only ? 0 : PCOW_OPEN_WRITE;
    struct pcow_error error;

    if (server.share) {
        flags |= PCOW_OPEN_FORCE_SHARE;
    }
    if (pcow_open(server.path, flags, server.snapshot, &server.image, &error)) {
        return failed(&error);
    }
    if (!server.read_only && check_no_revert(server.image, &error)) {
        return failed(&error);
    }
    return server.controlled && control_listen(&server.control, server.path, server.image, &error)
               ? failed(&error)
               : 0;
}

static int pcow_plugin_after_fork(void)
{
    /* in the background this is a child of the process that opened it */
    pcow_adopt(server.image);
    if (server.control && control_start(server.control)) {
        nbdkit_error("no thread can be started for the control socket");
        return -1;
    }
    return 0;
}

/*
 * After the last connection: what was written is durable when the server has ended, whether its
 * clients flushed or not.
 */
static void pcow_plugin_cleanup(void)
{
    struct pcow_error error;

    control_end(server.control);
    server.control = NULL;
    if (!server.read_only && pcow_flush(server.image, &error)) {
        failed(&error);
    }
    if (!server.read_only && pcow_finish(server.image, &error)) {
        failed(&error);
    }
    pcow_close(server.image);
    server.image = NULL;
}

static void pcow_plugin_unload(void)
{
    control_end(server.control);
    /* get_ready() was the last that ran: nbdkit calls no cleanup() then */
    pcow_close(server.image);
    free(server.path);
    free(server.snapshot);
    free(server.peer);
}

static int pcow_plugin_preconnect(int readonly)
{
    int64_t pid;

    (void)readonly;
    if (!server.peer) {
        return 0;
    }
    pid = nbdkit_peer_pid();
    if (peer_is_confined_by(pid, server.peer)) {
        return 0;
    }
    nbdkit_error("process %" PRId64 " is refused: this is for %s alone", pid, server.peer);
    return -1;
}

static void *pcow_plugin_open(int readonly)
{
    /* nbdkit itself refuses writes of such a connection */
    (void)readonly;
    return server.image;
}

static int64_t pcow_plugin_get_size(void *handle)
{
    return (int64_t)pcow_size(handle);
}

static int pcow_plugin_block_size(void *handle, uint32_t *minimum, uint32_t *preferred,
                                  uint32_t *maximum)
{
    (void)handle;
    *minimum = 1;
    *preferred = PCOW_PAGE_SIZE;
    *maximum = MAX_REQUEST;
    return 0;
}

static int pcow_plugin_can_write(void *handle)
{
    (void)handle;
    return !server.read_only;
}

/* A flush on any connection covers what all of them have had answered: there is one image. */
static int pcow_plugin_can_multi_conn(void *handle)
{
    (void)handle;
    return 1;
}

static int pcow_plugin_pread(void *handle, void *buffer, uint32_t length, uint64_t offset,
                             uint32_t flags)
{
    struct pcow_error error;
    int ret;

    (void)flags;
    control_enter(server.control);
    ret = pcow_read(handle, offset, buffer, length, &error);
    control_leave(server.control);
    return ret ? failed(&error) : 0;
}

static int pcow_plugin_pwrite(void *handle, const void *buffer, uint32_t length, uint64_t offset,
                              uint32_t flags)
{
    struct pcow_error error;
    int ret;

    (void)flags;
    control_enter(server.control);
    ret = pcow_write(handle, offset, buffer, length, &error);
    control_leave(server.control);
    return ret ? failed(&error) : 0;
}

/*
 * NBD lets a server ignore a trim; here it reads as zeros afterwards, so both requests are the
 * same.
 */
static int pcow_plugin_zero(void *handle, uint32_t length, uint64_t offset, uint32_t flags)
{
    struct pcow_error error;
    int ret;

    (void)flags;
    control_enter(server.control);
    ret = pcow_write_zeroes(handle, offset, length, &error);
    control_leave(server.control);
    return ret ? failed(&error) : 0;
}

static int pcow_plugin_flush(void *handle, uint32_t flags)
{
    struct pcow_error error;
    int ret;

    (void)flags;
    control_enter(server.control);
    ret = pcow_flush(handle, &error);
    control_leave(server.control);
    return ret ? failed(&error) : 0;
}

static int pcow_plugin_can_extents(void *handle)
{
    (void)handle;
    return 1;
}

static int pcow_plugin_extents(void *handle, uint32_t length, uint64_t offset, uint32_t flags,
                               struct nbdkit_extents *extents)
{
    uint64_t end = offset + length;
    struct pcow_error error;

    /* Extents of libpcow begin at pages; nbdkit cuts off what lies in front of the request. */
    offset &= ~(PCOW_PAGE_SIZE - 1);
    while (offset < end) {
        struct pcow_extent extent;
        int ret;

        control_enter(server.control);
        ret = pcow_get_extent(handle, offset, pcow_size(handle) - offset, &extent, &error);
        control_leave(server.control);
        if (ret) {
            return failed(&error);
        }
        if (nbdkit_add_extent(extents, extent.offset, extent.length,
                              (extent.data ? 0 : NBDKIT_EXTENT_HOLE)
                                  | (extent.zero ? NBDKIT_EXTENT_ZERO : 0))) {
            return -1;
        }
        if (flags & NBDKIT_FLAG_REQ_ONE) {
            break;
        }
        offset = extent.offset + extent.length;
    }
    return 0;
}

static struct nbdkit_plugin plugin = {
    .name = "pcow",
    .longname = "pcow images",
    .version = PCOW_VERSION_TEXT,
    .description = "serve a pcow image, or a snapshot of it",
    .magic_config_key = "file",
    .config_help =
        "file=FILE       (required) the image\n"
        "snapshot=NAME   a snapshot of it, read-only, also while somebody writes to the image\n"
        "readonly=true   open it read-only\n"
        "control=true    take snapshots by commands on .NAME.control beside the image\n"
        "peer=PROFILE    only processes that AppArmor confines by this profile may connect\n"
        "share=true      read-only and without a lock; what a writer changes meanwhile may be seen "
        "half",
    .config = pcow_plugin_config,
    .config_complete = pcow_plugin_config_complete,
    .get_ready = pcow_plugin_get_ready,
    .after_fork = pcow_plugin_after_fork,
    .cleanup = pcow_plugin_cleanup,
    .unload = pcow_plugin_unload,
    .preconnect = pcow_plugin_preconnect,
    .open = pcow_plugin_open,
    .get_size = pcow_plugin_get_size,
    .block_size = pcow_plugin_block_size,
    .can_write = pcow_plugin_can_write,
    .can_multi_conn = pcow_plugin_can_multi_conn,
    .can_extents = pcow_plugin_can_extents,
    .pread = pcow_plugin_pread,
    .pwrite = pcow_plugin_pwrite,
    .trim = pcow_plugin_zero,
    .zero = pcow_plugin_zero,
    .flush = pcow_plugin_flush,
    .extents = pcow_plugin_extents,
    .errno_is_preserved = 0,
};

NBDKIT_DLL_PUBLIC struct nbdkit_plugin *plugin_init(void);
NBDKIT_REGISTER_PLUGIN(plugin)
