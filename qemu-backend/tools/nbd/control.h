/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshots of an image that is being served: commands on a Unix socket beside it, ".NAME.control",
 * as QEMU takes them by QMP.
 *
 * A command is a line, its words separated by tabs: "snapshot-create NAME", "snapshot-delete NAME",
 * "snapshot-rename NAME NEW-NAME", "pause" (requests of clients wait from now on) and "resume"; the
 * end of a connection resumes what it has paused. The answer is a line, "ok", or "error" with a tab
 * and a message. Whoever may write to the image may write to the socket.
 */
#ifndef PCOW_NBD_CONTROL_H
#define PCOW_NBD_CONTROL_H

#include "pcow.h"

struct control;

/*
 * Listen beside the image at path, which is open for writing, so that a socket that is there
 * already is nobody's. Negative errno with a message: the directory cannot be written, or the name
 * is too long for a socket.
 */
int control_listen(struct control **control, const char *path, pcow_image *image,
                   struct pcow_error *error);
/*
 * Take commands for the image from now on, in a thread: after nbdkit has gone into the background.
 * Negative errno.
 */
int control_start(struct control *control);
/*
 * Around each request of a client, which is not done while somebody has paused; control may be
 * NULL.
 */
void control_enter(struct control *control);
void control_leave(struct control *control);
/* End it, and take the socket away; control may be NULL. */
void control_end(struct control *control);

#endif
