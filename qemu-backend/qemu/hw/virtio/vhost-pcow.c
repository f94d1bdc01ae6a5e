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
    unsigned asked;             /* by the kernel, while one is unanswered */
    bool deaf;                  /* no kick reaches the kernel */
    GArray *backends;           /* vhost_vring_file: queues that begin later */
    bool runs_later;            /* vsock: the same for all of them */
    QEMUTimer *retry;
};

static unsigned holds;

static EventNotifier *kick_of(struct vhost_dev *dev, unsigned i)
{
    return virtio_queue_get_host_notifier(
        virtio_get_queue(dev->vdev, dev->vq_index + i));
}

static void kick(struct vhost_dev *dev)
{
    for (unsigned i = 0; i < dev->nvqs; i++) {
        event_notifier_set(kick_of(dev, i));
    }
}

static void listen_to(struct vhost_dev *dev, unsigned i, bool listen)
{
    struct vhost_vring_file file = {
        .index = i,
        .fd = listen ? event_notifier_get_fd(kick_of(dev, i))
                     : VHOST_FILE_UNBIND,
    };

    dev->vhost_ops->vhost_set_vring_kick(dev, &file);
}

/* What comes while it is deaf, it hears later. */
static void set_deaf(struct vhost_dev *dev, bool deaf)
{
    if (dev->pcow->deaf == deaf) {
        return;
    }
    dev->pcow->deaf = deaf;
    for (unsigned i = 0; i < dev->nvqs; i++) {
        if (dev->vqs[i].desc_phys) {
            listen_to(dev, i, !deaf);
        }
    }
}

static void set_timer(struct VhostPcow *pcow)
{
    if (!timer_pending(pcow->retry)) {
        timer_mod(pcow->retry,
                  qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + RETRY_MS);
    }
}

static void ask_later(struct VhostPcow *pcow, uint64_t iova, bool is_write)
{
    Question question = { iova, is_write };

    set_timer(pcow);
    for (guint i = 0; i < pcow->unanswered->len; i++) {
        Question *other = &g_array_index(pcow->unanswered, Question, i);

        if (other->iova / PCOW_PAGE_SIZE == iova / PCOW_PAGE_SIZE) {
            other->is_write |= is_write;
            return;
        }
    }
    g_array_append_val(pcow->unanswered, question);
}

static int tell(struct vhost_dev *dev, uint64_t iova, bool is_write)
{
    int ret = holds ? -EAGAIN : vhost_pcow_answer(dev, iova, is_write);

    if (ret == -EAGAIN) {
        ask_later(dev->pcow, iova, is_write);
        return 0;
    }
    if (ret < 0) {
        virtio_error(dev->vdev, "vhost cannot access guest memory at 0x%"
                     PRIx64 ": %s", iova, strerror(-ret));
        set_deaf(dev, true);
    }
    return ret;
}

int vhost_pcow_tell(struct vhost_dev *dev, uint64_t iova, bool is_write)
{
    if (virtio_device_disabled(dev->vdev)) {
        /* The guest has been told. */
        set_deaf(dev, true);
        return -EIO;
    }
    if (!dev->pcow->unanswered->len) {
        dev->pcow->asked = 0;
    } else if (++dev->pcow->asked > MAX_UNANSWERED) {
        set_deaf(dev, true);
    }
    return tell(dev, iova, is_write);
}

/* -EAGAIN: there is no space for it now */
static int tell_ring(struct vhost_dev *dev, unsigned i)
{
    if (!dev->vqs[i].desc_phys) {
        return 0;               /* the guest does not use it */
    }
    return holds ? -EAGAIN
                 : vhost_pcow_answer(dev, dev->vqs[i].used_phys, true);
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
    int ret;

    drop_backend(dev->pcow->backends, file->index);
    if (file->fd < 0) {
        return dev->vhost_ops->vhost_net_set_backend(dev, file);
    }
    ret = tell_ring(dev, file->index);
    if (ret == 0) {
        /* It keeps where a ring was, and would look for another one there. */
        vhost_pcow_forget(dev);
        ret = tell_ring(dev, file->index);
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
    ret = dev->vhost_ops->vhost_net_set_backend(dev, file);
    if (ret == 0) {
        event_notifier_set(kick_of(dev, file->index));
    }
    if (dev->pcow->deaf) {
        /* A queue that is started is listened to. */
        listen_to(dev, file->index, false);
    }
    return ret;
}

int vhost_pcow_vsock_set_running(struct vhost_dev *dev, int start)
{
    int ret;

    dev->pcow->runs_later = false;
    if (!start) {
        return dev->vhost_ops->vhost_vsock_set_running(dev, start);
    }
    for (unsigned i = 0; i < dev->nvqs; i++) {
        ret = tell_ring(dev, i);
        if (ret == -EAGAIN) {
            dev->pcow->runs_later = true;
            set_timer(dev->pcow);
            return 0;
        }
        if (ret < 0) {
            errno = -ret;
            return ret;
        }
    }
    ret = dev->vhost_ops->vhost_vsock_set_running(dev, start);
    if (ret == 0) {
        kick(dev);
    }
    return ret;
}

static void retry_start(struct vhost_dev *dev)
{
    struct VhostPcow *pcow = dev->pcow;
    GArray *files = pcow->backends;
    int ret = 0;

    pcow->backends = g_array_new(false, false, sizeof(struct vhost_vring_file));
    for (guint i = 0; i < files->len && ret == 0; i++) {
        ret = vhost_pcow_set_backend(
            dev, &g_array_index(files, struct vhost_vring_file, i));
    }
    g_array_unref(files);
    if (pcow->runs_later) {
        ret = vhost_pcow_vsock_set_running(dev, 1);
    }
    if (ret < 0) {
        virtio_error(dev->vdev, "vhost cannot begin: %s", strerror(errno));
    }
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
    retry_start(dev);
    for (guint i = 0; i < questions->len; i++) {
        Question *question = &g_array_index(questions, Question, i);

        tell(dev, question->iova, question->is_write);
    }
    g_array_unref(questions);
    if (!pcow->unanswered->len && !virtio_device_disabled(dev->vdev)) {
        pcow->asked = 0;
        set_deaf(dev, false);
    }
}

void vhost_pcow_queue_was_reset(struct vhost_dev *dev)
{
    if (!dev->pcow || !dev->started) {
        return;
    }
    g_array_set_size(dev->pcow->unanswered, 0);
    dev->pcow->asked = 0;
    set_deaf(dev, virtio_device_disabled(dev->vdev));
    kick(dev);
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

static bool kernel_has_iommu(struct vhost_dev *dev)
{
#ifdef VIRTIO_FEATURES_NU64S            /* since 10.2 */
    uint64_t features[VIRTIO_FEATURES_NU64S];

    return dev->vhost_ops->vhost_get_features_ex(dev, features) == 0 &&
           virtio_has_feature_ex(features, VIRTIO_F_IOMMU_PLATFORM);
#else
    uint64_t features;

    return dev->vhost_ops->vhost_get_features(dev, &features) == 0 &&
           virtio_has_feature(features, VIRTIO_F_IOMMU_PLATFORM);
#endif
}

bool vhost_pcow_can_ask(struct vhost_dev *dev)
{
    return dev->vhost_ops->backend_type == VHOST_BACKEND_TYPE_KERNEL &&
           kernel_has_iommu(dev);
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

void vhost_pcow_await_questions(struct vhost_dev *dev)
{
    struct vhost_msg_v2 old;

    while (dev->pcow && read((uintptr_t)dev->opaque, &old, sizeof(old)) > 0) {
        /* of before the device was stopped */
    }
}

void vhost_pcow_stop(struct vhost_dev *dev)
{
    struct VhostPcow *pcow = dev->pcow;

    if (!pcow) {
        return;
    }
    timer_del(pcow->retry);
    g_array_set_size(pcow->unanswered, 0);
    g_array_set_size(pcow->backends, 0);
    pcow->runs_later = false;
    pcow->asked = 0;
    /* A queue that has kept its backend shall find nothing, and not ask. */
    if (dev->started) {
        vhost_pcow_forget(dev);
        pcow->deaf = false;
        set_deaf(dev, true);
    }
    pcow->deaf = false;
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
