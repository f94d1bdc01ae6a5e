/* SPDX-License-Identifier: BSD-3-Clause */
/* qcow2 images are read and written by qemu-nbd, a child process, over a Unix socket that only this user can reach. */
#ifndef IMG_NBD_H
#define IMG_NBD_H

#include <libnbd.h>
#include <pcow.h>
#include <stdbool.h>

struct nbd_server_options {
    const char *path;                          /* of a qcow2 file without backing file */
    const char *snapshot;                      /* only if not writable */
    bool writable, force_share;
};

/* Ask qemu-img whether the metadata are sound: QEMU itself reads what a truncated file lacks as zeros.  -EBADMSG if not. */
int nbd_check_file(const struct nbd_server_options *options, struct pcow_error *error);

/* Start qemu-nbd on a file and connect to it; nbd_close() ends it. */
int nbd_serve(const struct nbd_server_options *options, struct nbd_handle **nbd, struct pcow_error *error);

/* Fill error from the last failure of libnbd. */
int nbd_fail(const char *path, const char *what, struct pcow_error *error);

#endif
