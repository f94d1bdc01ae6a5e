/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "qemu/osdep.h"
#include <pcow.h>
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "hw/virtio/vhost-backend.h"
#include "hw/virtio/vhost-pcow.h"
#include "hw/virtio/virtio.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/rcu.h"
#include "qemu/timer.h"
#include "standard-headers/linux/virtio_config.h"
#include "system/hostmem-pcow.h"

/* How much one answer tells of at most: of any memory, and of an image */
#define WINDOW (1ULL << 30)
#define IMAGE_WINDOW (64ULL << 20)
#define RETRY_FULL_MS 10
#define RETRY_HELD_MS 1

typedef struct Question {
    uint64_t iova;
    bool is_write;
} Question;

struct VhostPcow {
    GArray *unanswered;         /* of Question, each page once */
    QEMUTimer *retry;
};

/* A part of what is in one piece in the guest and here */
typedef struct Piece {
    uint8_t *host;              /* of its first byte */
    hwaddr gpa;                 /* the same */
    uint64_t size;
    bool is_writable;
} Piece;

static bool contains(const MemoryRegionSection *section, hwaddr gpa)
{
    return section->mr && gpa >= section->offset_within_address_space &&
           gpa - section->offset_within_address_space <
           int128_get64(section->size);
}

/* What lies around @gpa, but not outside of @begin to @end */
static bool find_piece(AddressSpace *as, hwaddr gpa, hwaddr begin, hwaddr end,
                       Piece *piece)
{
    MemoryRegionSection section = memory_region_find(as->root, begin,
                                                     end - begin);
    bool found;

    if (!contains(&section, gpa)) {
        memory_region_unref(section.mr);
        begin = gpa & -PCOW_PAGE_SIZE;
        section = memory_region_find(as->root, begin, end - begin);
    }
    found = contains(&section, gpa) && memory_region_is_ram(section.mr);
    if (found) {
        *piece = (Piece) {
            .host = (uint8_t *)memory_region_get_ram_ptr(section.mr) +
                    section.offset_within_region,
            .gpa = section.offset_within_address_space,
            .size = int128_get64(section.size),
            .is_writable = !section.readonly && !section.mr->readonly,
        };
    }
    memory_region_unref(section.mr);
    return found;
}

/* Cut @piece to what may be accessed around the page at @at. */
static void cut(Piece *piece, uint64_t at, const HostMemPcow *pcow,
                uint64_t offset)
{
    uint64_t first = at, end = at + PCOW_PAGE_SIZE;
    uint64_t least = at - MIN(at, IMAGE_WINDOW / 2);
    uint64_t most = MIN(piece->size, at + IMAGE_WINDOW / 2);

    while (first > least &&
           pcow_map_is_accessible(pcow->map, offset - (at - first) - 1,
                                  piece->is_writable)) {
        first -= MIN(first - least, PCOW_PAGE_SIZE);
    }
    while (end < most &&
           pcow_map_is_accessible(pcow->map, offset + (end - at),
                                  piece->is_writable)) {
        end += PCOW_PAGE_SIZE;
    }
    piece->host += first;
    piece->gpa += first;
    piece->size = MIN(end, most) - first;
}

/*
 * Let the kernel access the page at @gpa, and cut @piece to what it may access
 * together with it.  Always for stores, where the guest may store: the kernel
 * would not ask again for a page that it was told of for loads.
 */
static int prepare(Piece *piece, hwaddr gpa)
{
    uint64_t at = (gpa - piece->gpa) & -PCOW_PAGE_SIZE;
    RAMBlock *block;
    ram_addr_t offset;
    int ret;

    if (!hostmem_pcow_may_cover(piece->host + at)) {
        return 0;
    }
    block = qemu_ram_block_from_host(piece->host + at, false, &offset);
    if (!block || !block->pcow) {
        return 0;
    }
    piece->is_writable &= !block->pcow->readonly;
    if (piece->is_writable) {
        ret = hostmem_pcow_make_writable(piece->host + at);
        if (ret == -ENOSPC &&
            !hostmem_pcow_fails_when_full(piece->host + at)) {
            return -EAGAIN;
        }
    } else {
        ret = hostmem_pcow_resolve(block->pcow, offset, 1, false, false);
    }
    if (ret < 0) {
        hostmem_pcow_tell_error(block->pcow, offset, ret, "a device of the "
                                "guest that vhost serves has to be reset");
        return ret;
    }
    cut(piece, at, block->pcow, offset);
    return 0;
}

/* -EAGAIN: not now */
static int answer(struct vhost_dev *dev, uint64_t iova, bool is_write)
{
    AddressSpace *as = dev->vdev->dma_as;
    IOMMUTLBEntry entry;
    hwaddr gpa, begin, end;
    Piece piece;
    int ret;

    RCU_READ_LOCK_GUARD();
    entry = address_space_get_iotlb_entry(as, iova, is_write,
                                          MEMTXATTRS_UNSPECIFIED);
    if (!entry.target_as) {
        return -EFAULT;
    }
    gpa = entry.translated_addr + (iova & entry.addr_mask);
    begin = gpa & -WINDOW;
    end = begin + WINDOW;
    if (entry.target_as != as) {
        /* The guest has an IOMMU: what is around that is elsewhere. */
        begin = entry.translated_addr;
        end = begin + entry.addr_mask + 1;
    }
    if (!find_piece(entry.target_as, gpa, begin, end, &piece)) {
        return -EFAULT;
    }
    ret = prepare(&piece, gpa);
    if (ret < 0) {
        return ret;
    }
    if (is_write && !piece.is_writable) {
        return -EACCES;
    }
    return vhost_backend_update_device_iotlb(dev, iova - gpa + piece.gpa,
                                             (uintptr_t)piece.host, piece.size,
                                             piece.is_writable ? IOMMU_RW
                                                               : IOMMU_RO);
}

static void ask_later(struct VhostPcow *pcow, uint64_t iova, bool is_write)
{
    Question question = { iova, is_write };
    GArray *list = pcow->unanswered;

    for (guint i = 0; i < list->len; i++) {
        Question *other = &g_array_index(list, Question, i);

        if (other->iova / PCOW_PAGE_SIZE == iova / PCOW_PAGE_SIZE) {
            other->is_write |= is_write;
            return;
        }
    }
    g_array_append_val(list, question);
}

static void set_timer(struct VhostPcow *pcow)
{
    if (pcow->unanswered->len && !timer_pending(pcow->retry)) {
        timer_mod(pcow->retry, qemu_clock_get_ms(QEMU_CLOCK_REALTIME) +
                  (hostmem_pcow_guest_is_held() ? RETRY_HELD_MS
                                                : RETRY_FULL_MS));
    }
}

int vhost_pcow_tell(struct vhost_dev *dev, uint64_t iova, bool is_write)
{
    int ret = hostmem_pcow_guest_is_held() ? -EAGAIN
                                           : answer(dev, iova, is_write);

    if (ret == -EAGAIN) {
        ask_later(dev->pcow, iova, is_write);
        set_timer(dev->pcow);
        return 0;
    }
    if (ret < 0) {
        virtio_error(dev->vdev, "vhost cannot access guest memory at 0x%"
                     PRIx64 ": %s", iova, strerror(-ret));
    }
    return ret;
}

static void retry(void *opaque)
{
    struct vhost_dev *dev = opaque;
    GArray *questions = dev->pcow->unanswered;

    dev->pcow->unanswered = g_array_new(false, false, sizeof(Question));
    for (guint i = 0; i < questions->len; i++) {
        Question *question = &g_array_index(questions, Question, i);

        vhost_pcow_tell(dev, question->iova, question->is_write);
    }
    g_array_unref(questions);
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
    dev->pcow->retry = timer_new_ms(QEMU_CLOCK_REALTIME, retry, dev);
    return true;
}

void vhost_pcow_stop(struct vhost_dev *dev)
{
    if (dev->pcow) {
        timer_del(dev->pcow->retry);
        g_array_set_size(dev->pcow->unanswered, 0);
    }
}

void vhost_pcow_cleanup(struct vhost_dev *dev)
{
    if (dev->pcow) {
        timer_free(dev->pcow->retry);
        g_array_unref(dev->pcow->unanswered);
        g_free(dev->pcow);
        dev->pcow = NULL;
    }
}
