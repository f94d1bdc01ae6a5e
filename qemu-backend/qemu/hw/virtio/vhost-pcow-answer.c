/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Where memory is that vhost in the kernel asks for, ready to be accessed. */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/virtio/vhost-backend.h"
#include "hw/virtio/vhost-pcow.h"
#include "hw/virtio/virtio.h"
#include "qemu/rcu.h"
#include "standard-headers/linux/vhost_types.h"
#include "system/hostmem-pcow.h"
#include "system/pcow-compat.h"

/* How much one answer tells of at most: of any memory, and of an image */
#define WINDOW (1ULL << 30)
#define IMAGE_WINDOW (64ULL << 20)

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

/*
 * Was the kernel told that it is memory?  What it stores elsewhere is not
 * logged.
 */
static bool is_in_table(const struct vhost_dev *dev, hwaddr gpa)
{
    for (unsigned i = 0; i < dev->mem->nregions; i++) {
        const struct vhost_memory_region *region = dev->mem->regions + i;

        if (gpa >= region->guest_phys_addr &&
            gpa - region->guest_phys_addr < region->memory_size) {
            return true;
        }
    }
    return false;
}

/*
 * What lies around @gpa, but not outside of @begin to @end.  Memory that the
 * guest only reads is not in the kernel's table, but QEMU's own device would
 * send from there.
 */
static bool find_piece(struct vhost_dev *dev, AddressSpace *as, hwaddr gpa,
                       hwaddr begin, hwaddr end, Piece *piece)
{
    MemoryRegionSection section = memory_region_find(as->root, begin,
                                                     end - begin);
    bool found;

    if (!contains(&section, gpa)) {
        memory_region_unref(section.mr);
        begin = gpa & -PCOW_PAGE_SIZE;
        section = memory_region_find(as->root, begin, end - begin);
    }
    found = contains(&section, gpa) && memory_region_is_ram(section.mr) &&
            (is_in_table(dev, gpa) || memory_region_is_rom(section.mr));
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
    if (offset % PCOW_PAGE_SIZE) {
        return -EINVAL;         /* no board maps it so */
    }
    piece->is_writable &= !block->pcow->readonly;
    if (piece->is_writable) {
        ret = hostmem_pcow_make_writable(piece->host + at, true);
        if (ret == -ENOSPC &&
            !hostmem_pcow_fails_when_full(piece->host + at)) {
            return -EAGAIN;
        }
    } else {
        ret = hostmem_pcow_resolve(block->pcow, offset, 1, false, false);
    }
    if (ret == 0 && !hostmem_pcow_can_load(piece->host + at)) {
        ret = -EIO;             /* mapped, but the host has lost it */
    }
    if (ret < 0) {
        hostmem_pcow_tell_error(block->pcow, offset, ret,
                                "a device that vhost serves does not get it");
        return ret;
    }
    cut(piece, at, block->pcow, offset);
    return 0;
}

int vhost_pcow_answer(struct vhost_dev *dev, uint64_t iova, bool is_write)
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
    if (!find_piece(dev, entry.target_as, gpa, begin, end, &piece)) {
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
