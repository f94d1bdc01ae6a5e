/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/nbd.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "json_output.h"
#include "report.h"

int nbd_fail(const char *path, const char *what, struct pcow_error *error)
{
    const char *problem = nbd_get_error();
    int code = nbd_get_errno();

    return fail(error, code > 0 ? -code : -EIO, "%s: cannot %s through qemu-nbd: %s", path, what,
                problem ? problem : "unknown error");
}

/* The file as block driver options: nothing in a file name is then taken for a protocol, and no backing file is opened. */
static json_object *describe(const struct nbd_server_options *options, const char *absolute_path)
{
    json_object *image = json_object_new_object(), *file = json_object_new_object();

    json_put_text(image, "driver", "qcow2");
    json_object_object_add(image, "backing", NULL);
    if (options->writable) {
        json_put_text(image, "discard", "unmap");
    } else if (options->force_share) {
        json_put_bool(image, "force-share", true);
    }
    json_put_text(file, "driver", "file");
    json_object_object_add(file, "filename", json_object_new_string(absolute_path));
    json_object_object_add(image, "file", file);
    return image;
}

static int connect_to_server(struct nbd_handle *nbd, const struct nbd_server_options *options, char *image,
                             struct pcow_error *error)
{
    char *arguments[6] = {"qemu-nbd"};
    unsigned count = 1;

    if (!options->writable) {
        arguments[count++] = "--read-only";
    }
    if (options->snapshot) {
        arguments[count++] = "--load-snapshot";
        arguments[count++] = (char *)options->snapshot;
    }
    arguments[count] = image;
    if (nbd_add_meta_context(nbd, LIBNBD_CONTEXT_BASE_ALLOCATION) || nbd_connect_systemd_socket_activation(nbd, arguments)) {
        nbd_fail(options->path, "open it", error);
        return fail(error, -EIO, "%s: qemu-nbd (package qemu-utils) did not open it as qcow2%s%s", options->path,
                    options->snapshot ? ", snapshot " : "", options->snapshot ? options->snapshot : "");
    }
    return 0;
}

int nbd_serve(const struct nbd_server_options *options, struct nbd_handle **nbd, struct pcow_error *error)
{
    char absolute_path[PATH_MAX], *name;
    json_object *image;
    int r;

    if (!realpath(options->path, absolute_path)) {
        return fail(error, -errno, "%s: %s", options->path, strerror(errno));
    }
    *nbd = nbd_create();
    if (!*nbd) {
        return nbd_fail(options->path, "open it", error);
    }
    image = describe(options, absolute_path);
    name = malloc(strlen(json_object_to_json_string(image)) + sizeof("json:"));
    if (!name) {
        r = fail(error, -ENOMEM, "out of memory");
    } else {
        strcpy(name, "json:");
        strcat(name, json_object_to_json_string(image));
        r = connect_to_server(*nbd, options, name, error);
    }
    free(name);
    json_object_put(image);
    if (r) {
        nbd_close(*nbd);
    }
    return r;
}
