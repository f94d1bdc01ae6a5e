/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/virtio/vhost-backend.h"
#include "hw/virtio/vhost-pcow.h"
#include "hw/virtio/virtio.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/rcu.h"
#include "qemu/timer.h"
#include "linux-headers/linux/vhost.h"
#include "standard-headers/linux/virtio_config.h"
#include "system/hostmem-pcow.h"

#define RETRY_MS 10
/*
 * Each question takes memory of the kernel, until it is answered, and the guest
 * can have the same one asked with each kick.  So after that many it is not
 * listened to until there are answers.
 */
#define MAX_UNANSWERED 64

typedef struct Question {
    uint64_t iova;
    bool is_write;
} Question;

struct VhostPcow {
    GArray *unanswered;         /* of Question, each page once */
    unsigned count;             /* of them, with those of the same page */
    bool deaf;                  /* no kick reaches the kernel */
    GArray *backends;           /* vhost_vring_file: queues that begin later */
    QEMUTimer *retry;
};

static unsigned holds;

static EventNotifier *kick_of(struct vhost_dev *dev, unsigned i)
{
    return virtio_queue_get_host_notifier(
        virtio_get_queue(dev->vdev, dev->vq_index + i));
}

void vhost_pcow_kick(struct vhost_dev *dev)
{
    for (unsigned i = 0; dev->pcow && i < dev->nvqs; i++) {
        event_notifier_set(kick_of(dev, i));
    }
}

/* What comes while it is deaf, it hears later. */
static void set_deaf(struct vhost_dev *dev, bool deaf)
{
    if (dev->pcow->deaf == deaf) {
        return;
    }
    dev->pcow->deaf = deaf;
    for (unsigned i = 0; i < dev->nvqs; i++) {
        struct vhost_vring_file file = {
            .index = i,
            .fd = deaf ? VHOST_FILE_UNBIND
                       : event_notifier_get_fd(kick_of(dev, i)),
        };

        if (dev->vqs[i].desc_phys) {
            dev->vhost_ops->vhost_set_vring_kick(dev, &file);
        }
    }
}

static void set_timer(struct VhostPcow *pcow)
{
    if ((pcow->unanswered->len || pcow->backends->len) &&
        !timer_pending(pcow->retry)) {
        timer_mod(pcow->retry,
                  qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + RETRY_MS);
    }
}

static void ask_later(struct vhost_dev *dev, uint64_t iova, bool is_write)
{
    Question question = { iova, is_write };
    GArray *list = dev->pcow->unanswered;

    if (++dev->pcow->count > MAX_UNANSWERED) {
        set_deaf(dev, true);
    }
    for (guint i = 0; i < list->len; i++) {
        Question *other = &g_array_index(list, Question, i);

        if (other->iova / PCOW_PAGE_SIZE == iova / PCOW_PAGE_SIZE) {
            other->is_write |= is_write;
            return;
        }
    }
    g_array_append_val(list, question);
    set_timer(dev->pcow);
}

int vhost_pcow_tell(struct vhost_dev *dev, uint64_t iova, bool is_write)
{
    int ret;

    if (virtio_device_disabled(dev->vdev)) {
        return -EIO;            /* has been told */
    }
    ret = holds ? -EAGAIN : vhost_pcow_answer(dev, iova, is_write);
    if (ret == -EAGAIN) {
        ask_later(dev, iova, is_write);
        return 0;
    }
    if (ret < 0) {
        virtio_error(dev->vdev, "vhost cannot access guest memory at 0x%"
                     PRIx64 ": %s", iova, strerror(-ret));
        set_deaf(dev, true);
    }
    return ret;
}

int vhost_pcow_tell_rings(struct vhost_dev *dev)
{
    for (unsigned i = 0; i < dev->nvqs; i++) {
        int ret = holds || !dev->vqs[i].desc_phys
            ? 0 : vhost_pcow_answer(dev, dev->vqs[i].used_phys, true);

        if (ret < 0 && ret != -EAGAIN) {
            return ret;
        }
    }
    return 0;
}

static void drop_backend(GArray *backends, unsigned index)
{
    for (guint i = 0; i < backends->len; i++) {
        if (g_array_index(backends, struct vhost_vring_file, i).index ==
            index) {
            g_array_remove_index_fast(backends, i);
            return;
        }
    }
}

int vhost_pcow_set_backend(struct vhost_dev *dev,
                           struct vhost_vring_file *file)
{
    int ret = -EAGAIN;

    drop_backend(dev->pcow->backends, file->index);
    if (file->fd >= 0 && dev->vqs[file->index].desc_phys) {
        /* It keeps where a ring was, and looks for another one there. */
        vhost_pcow_forget(dev);
        if (!holds) {
            ret = vhost_pcow_answer(dev, dev->vqs[file->index].used_phys, true);
        }
        if (ret == -EAGAIN) {
            g_array_append_val(dev->pcow->backends, *file);
            set_timer(dev->pcow);
            return 0;
        }
        if (ret < 0) {
            errno = -ret;
            return ret;
        }
    }
    ret = dev->vhost_ops->vhost_net_set_backend(dev, file);
    if (ret == 0 && file->fd >= 0) {
        event_notifier_set(kick_of(dev, file->index));
    }
    return ret;
}

static void retry_backends(struct vhost_dev *dev)
{
    GArray *files = dev->pcow->backends;

    dev->pcow->backends = g_array_new(false, false,
                                      sizeof(struct vhost_vring_file));
    for (guint i = 0; i < files->len; i++) {
        struct vhost_vring_file *file =
            &g_array_index(files, struct vhost_vring_file, i);

        if (vhost_pcow_set_backend(dev, file) < 0) {
            virtio_error(dev->vdev, "vhost cannot begin with queue %u: %s",
                         dev->vq_index + file->index, strerror(errno));
        }
    }
    g_array_unref(files);
}

void vhost_pcow_retry(struct vhost_dev *dev)
{
    struct VhostPcow *pcow = dev->pcow;
    GArray *questions;

    if (!pcow || !dev->started) {
        return;
    }
    questions = pcow->unanswered;
    pcow->unanswered = g_array_new(false, false, sizeof(Question));
    retry_backends(dev);
    for (guint i = 0; i < questions->len; i++) {
        Question *question = &g_array_index(questions, Question, i);

        vhost_pcow_tell(dev, question->iova, question->is_write);
    }
    g_array_unref(questions);
    if (!pcow->unanswered->len && !virtio_device_disabled(dev->vdev)) {
        pcow->count = 0;
        set_deaf(dev, false);
    }
}

static void retry(void *opaque)
{
    vhost_pcow_retry(opaque);
}

void vhost_pcow_begin_hold(void)
{
    holds++;
}

void vhost_pcow_end_hold(void)
{
    holds--;
}

void vhost_pcow_forget(struct vhost_dev *dev)
{
    if (dev->pcow && dev->started &&
        vhost_backend_invalidate_device_iotlb(dev, 0, UINT64_MAX) < 0) {
        error_report("vhost does not forget where memory is");
    }
}

bool vhost_pcow_can_ask(struct vhost_dev *dev)
{
    uint64_t features;

    return dev->vhost_ops->backend_type == VHOST_BACKEND_TYPE_KERNEL &&
           dev->vhost_ops->vhost_get_features(dev, &features) == 0 &&
           features & 1ULL << VIRTIO_F_IOMMU_PLATFORM;
}

bool vhost_pcow_start(struct vhost_dev *dev, Error **errp)
{
    if (dev->pcow || !hostmem_pcow_present()) {
        return true;
    }
    if (!vhost_pcow_can_ask(dev)) {
        return hostmem_pcow_check_no_vhost(errp);
    }
    dev->pcow = g_new0(struct VhostPcow, 1);
    dev->pcow->unanswered = g_array_new(false, false, sizeof(Question));
    dev->pcow->backends = g_array_new(false, false,
                                      sizeof(struct vhost_vring_file));
    dev->pcow->retry = timer_new_ms(QEMU_CLOCK_REALTIME, retry, dev);
    return true;
}

void vhost_pcow_stop(struct vhost_dev *dev)
{
    if (dev->pcow) {
        timer_del(dev->pcow->retry);
        g_array_set_size(dev->pcow->unanswered, 0);
        g_array_set_size(dev->pcow->backends, 0);
        dev->pcow->count = 0;
        dev->pcow->deaf = false;
    }
}

void vhost_pcow_cleanup(struct vhost_dev *dev)
{
    if (dev->pcow) {
        timer_free(dev->pcow->retry);
        g_array_unref(dev->pcow->unanswered);
        g_array_unref(dev->pcow->backends);
        g_free(dev->pcow);
        dev->pcow = NULL;
    }
}
