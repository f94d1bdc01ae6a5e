/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A revert of a whole VM that ended halfway: the next start of the VM finishes it, and drops what
 * was written since.
 */
#ifndef TOOLS_UNFINISHED_H
#define TOOLS_UNFINISHED_H

#include <pcow.h>

/*
 * The snapshot that is reverted to is called so meanwhile, see migration/pcow/carrier.c and
 * etc/libvirt/bin/qemu-img.
 */
#define UNFINISHED_REVERT ".loading-"

/* Is there none in the image?  -EBUSY with words for whoever would change it in vain. */
int check_no_revert(const pcow_image *image, struct pcow_error *error);

#endif
