/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/nbd.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/qemu_img.h"
#include "json_output.h"
#include "report.h"

#define LIBNBD "libnbd.so.0"

static int find_call(void *library, const char *name, void *call, struct pcow_error *error)
{
    void *found = dlsym(library, name);

    if (!found) {
        return fail(error, -ELIBACC,
                    LIBNBD " has no %s(): libnbd 1.4 or later is needed for qcow2 images", name);
    }
    memcpy(call, &found, sizeof(found));
    return 0;
}

/* It stays loaded to the end of the program. */
static int load(struct nbd *nbd, struct pcow_error *error)
{
    void *library = dlopen(LIBNBD, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int r = 0;

    if (!library) {
        return fail(error, -ELIBACC,
                    "qcow2 images are read and written with libnbd (package libnbd0): %s",
                    dlerror());
    }
#define LIBNBD_CALL(name) r = r ? r : find_call(library, "nbd_" #name, &nbd->name, error);
    LIBNBD_CALLS(LIBNBD_CALL)
#undef LIBNBD_CALL
    dlclose(library);
    return r;
}

int nbd_fail(const struct nbd *nbd, const char *path, const char *what, struct pcow_error *error)
{
    const char *problem = nbd->get_error();
    int code = nbd->get_errno();

    return fail(error, code > 0 ? -code : -EIO, "%s: cannot %s through qemu-nbd: %s", path, what,
                problem ? problem : "unknown error");
}

/*
 * The file as a "json:" name, which the caller frees: nothing in a path is then taken for a
 * protocol, and no backing file is opened.
 */
static int describe(const struct nbd_server_options *options, char **name, struct pcow_error *error)
{
    json_object *image, *file;
    char path[PATH_MAX];

    if (options->held) {
        snprintf(path, sizeof(path), "%s", options->path);
    } else if (!realpath(options->path, path)) {
        return fail(error, -errno, "%s: %s", options->shown_path, strerror(errno));
    }
    image = json_object_new_object();
    file = json_object_new_object();
    json_put_text(image, "driver", "qcow2");
    json_object_object_add(image, "backing", NULL);
    if (options->writable) {
        json_put_text(image, "discard", "unmap");
    } else if (options->force_share) {
        json_put_bool(image, "force-share", true);
    }
    json_put_text(file, "driver", "file");
    json_object_object_add(file, "filename", json_object_new_string(path));
    json_object_object_add(image, "file", file);
    if (asprintf(name, "json:%s", json_object_to_json_string(image)) < 0) {
        *name = NULL;
    }
    json_object_put(image);
    return *name ? 0 : fail(error, -ENOMEM, "out of memory");
}

int nbd_check_file(const struct nbd_server_options *options, struct pcow_error *error)
{
    const int corrupted = 2;                   /* qemu-img check's exit code */
    char *name, *arguments[] = {"qemu-img", "check", "-q", NULL, NULL};
    int status, r = describe(options, &name, error);

    if (r) {
        return r;
    }
    arguments[3] = name;
    r = qemu_img_run(arguments, true, &status, error);
    free(name);
    if (!r && status == corrupted) {
        r = fail(error, -EBADMSG,
                 "%s is damaged or cut short ('qemu-img check -f qcow2' shows where); repair it or "
                 "get it "
                 "again",
                 options->shown_path);
    }
    return r;
}

static int connect_to_server(const struct nbd *nbd, const struct nbd_server_options *options,
                             char *name, struct pcow_error *error)
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
    arguments[count] = name;
    if (nbd->add_meta_context(nbd->handle, LIBNBD_CONTEXT_BASE_ALLOCATION)
        || nbd->connect_systemd_socket_activation(nbd->handle, arguments)) {
        return fail(error, -EIO, "%s: qemu-nbd (package qemu-utils) did not open it as qcow2%s%s",
                    options->shown_path, options->snapshot ? ", snapshot " : "",
                    options->snapshot ? options->snapshot : "");
    }
    return 0;
}

static int find_size(const struct nbd *nbd, const struct nbd_server_options *options,
                     uint64_t *size, struct pcow_error *error)
{
    int64_t found = nbd->get_size(nbd->handle);

    if (found < 0) {
        return nbd_fail(nbd, options->shown_path, "find its size", error);
    }
    *size = (uint64_t)found;
    return 0;
}

int nbd_serve(const struct nbd_server_options *options, struct nbd *nbd, uint64_t *size,
              struct pcow_error *error)
{
    char *name;
    int r = load(nbd, error);

    r = r ? r : describe(options, &name, error);
    if (r) {
        return r;
    }
    nbd->handle = nbd->create();
    r = nbd->handle ? connect_to_server(nbd, options, name, error)
                    : nbd_fail(nbd, options->shown_path, "open it", error);
    r = r ? r : find_size(nbd, options, size, error);
    free(name);
    if (r && nbd->handle) {
        nbd->close(nbd->handle);
    }
    return r;
}

void nbd_end(const struct nbd *nbd)
{
    nbd->close(nbd->handle);
}
