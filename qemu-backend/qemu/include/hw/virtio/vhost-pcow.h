/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vhost in the kernel beside pcow images.
 *
 * The kernel cannot store to a page of an image that must be copied first.  So
 * it is given a device with an IOTLB, as if there were an IOMMU, although the
 * guest knows of none: then the kernel asks where memory is before it accesses
 * it.  The answer comes when it may store there, and is taken back before pages
 * may become read-only.
 *
 * All of this with the BQL.
 */
#ifndef HW_VIRTIO_VHOST_PCOW_H
#define HW_VIRTIO_VHOST_PCOW_H

#include "hw/virtio/vhost.h"

/* Is its kernel's vhost one that can ask?  vhost-scsi is not. */
bool vhost_pcow_can_ask(struct vhost_dev *dev);
/*
 * The device is about to start.  If there are images, and the kernel can ask,
 * it does from now on; not before it is reset would it stop asking.  Fails if
 * there are images, and it cannot.
 */
bool vhost_pcow_start(struct vhost_dev *dev, Error **errp);
/* Just before what the kernel asks is read */
void vhost_pcow_await_questions(struct vhost_dev *dev);
/*
 * VHOST_NET_SET_BACKEND, VHOST_VSOCK_SET_RUNNING.  The kernel begins with the
 * used ring, and does not ask for it.  Where there is no space for that, it
 * begins later.  Return as an ioctl does.
 */
int vhost_pcow_set_backend(struct vhost_dev *dev,
                           struct vhost_vring_file *file);
int vhost_pcow_vsock_set_running(struct vhost_dev *dev, int start);
/*
 * A queue has lost its backend, and the kernel with it what it asked, for any
 * queue: it asks anew.
 */
void vhost_pcow_queue_was_reset(struct vhost_dev *dev);
/* The device is stopping, and wants no answers any more. */
void vhost_pcow_stop(struct vhost_dev *dev);
void vhost_pcow_cleanup(struct vhost_dev *dev);

/*
 * The kernel asks for the memory at @iova, to store to it or to load from it.
 * Returns 0 if it was told, or will be as soon as there is space for that;
 * -errno, with the device in need of a reset, if it cannot be.
 */
int vhost_pcow_tell(struct vhost_dev *dev, uint64_t iova, bool is_write);
/*
 * Take back what it was told: when this returns the kernel accesses nothing any
 * more, and asks anew.  Nothing happens if the device does not ask.
 */
void vhost_pcow_forget(struct vhost_dev *dev);
/* Answer what could not be answered when it was asked. */
void vhost_pcow_retry(struct vhost_dev *dev);
/* From one to the other of these no device gets an answer. */
void vhost_pcow_begin_hold(void);
void vhost_pcow_end_hold(void);

/* ---- vhost-pcow-answer.c ---- */

/*
 * Make the page at @iova accessible, and tell the kernel of it, and of what is
 * accessible around it.  Returns -EAGAIN if there is no space for that now.
 */
int vhost_pcow_answer(struct vhost_dev *dev, uint64_t iova, bool is_write);

#endif
