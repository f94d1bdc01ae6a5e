/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * qcow2 images are read and written by qemu-nbd, a child process, over a Unix socket that only this
 * user can reach.
 */
#ifndef IMG_NBD_H
#define IMG_NBD_H

#include <libnbd.h>
#include <pcow.h>
#include <stdbool.h>
#include <stdint.h>

/*
 * libnbd is loaded when a qcow2 image is opened, not when the program starts: it brings sixteen
 * libraries with it (TLS, XML, ICU), whose loading takes several times as long as a whole command
 * on a pcow image.
 */
#define LIBNBD_CALLS(CALL) \
    CALL(create) CALL(close) CALL(get_error) CALL(get_errno) CALL(add_meta_context) \
    CALL(can_meta_context) CALL(connect_systemd_socket_activation) CALL(get_size) \
    CALL(block_status) CALL(pread) CALL(pwrite) CALL(zero) CALL(flush) CALL(shutdown)

struct nbd {
    struct nbd_handle *handle;
#define LIBNBD_CALL(name) __typeof__(nbd_##name) *name;
    LIBNBD_CALLS(LIBNBD_CALL)
#undef LIBNBD_CALL
};

struct nbd_server_options {
    const char *path;                          /* of a qcow2 file without backing file */
    bool held;                                 /* by a descriptor, whose place in /proc path is */
    const char *shown_path;                    /* what errors call it */
    const char *snapshot;                      /* only if not writable */
    bool writable, force_share;
};

/*
 * Ask qemu-img whether the metadata are sound: QEMU itself reads what a truncated file lacks as
 * zeros. -EBADMSG if not.
 */
int nbd_check_file(const struct nbd_server_options *options, struct pcow_error *error);

/*
 * Start qemu-nbd on a file of size bytes and connect to it; nbd_end() ends it. -ELIBACC if libnbd
 * cannot be loaded.
 */
int nbd_serve(const struct nbd_server_options *options, struct nbd *nbd, uint64_t *size,
              struct pcow_error *error);

/* Fill error from the last failure of libnbd. */
int nbd_fail(const struct nbd *nbd, const char *path, const char *what, struct pcow_error *error);

void nbd_end(const struct nbd *nbd);

#endif
