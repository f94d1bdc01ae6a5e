/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Where the images lie among the memory of this process, and how they stay
 * there while somebody is at one.
 */
#include "qemu/osdep.h"
#include "qemu/rcu.h"
#include "qemu/thread.h"
#include "system/hostmem-pcow.h"

uintptr_t hostmem_pcow_low, hostmem_pcow_high;

/*
 * Where the images lie, for who has an address and must know quickly, or is in
 * a signal handler: the list of all RAM blocks is long.  Under RCU.
 */
typedef struct Images {
    struct rcu_head rcu;
    unsigned count;
    struct {
        uintptr_t low, high;
        HostMemPcow *pcow;
    } at[];
} Images;

static Images *images;

/* All but @without, and room for one more.  With the BQL. */
static Images *copy_images(const HostMemPcow *without)
{
    unsigned count = images ? images->count : 0;
    Images *copy = g_malloc0(sizeof(*copy) + (count + 1) * sizeof(*copy->at));

    for (unsigned i = 0; i < count; i++) {
        if (images->at[i].pcow != without) {
            copy->at[copy->count++] = images->at[i];
        }
    }
    return copy;
}

static void publish_images(Images *now)
{
    Images *before = images;
    uintptr_t low = now->count ? UINTPTR_MAX : 0, high = 0;

    for (unsigned i = 0; i < now->count; i++) {
        low = MIN(low, now->at[i].low);
        high = MAX(high, now->at[i].high);
    }
    qatomic_rcu_set(&images, now);
    qatomic_set(&hostmem_pcow_low, low);
    qatomic_set(&hostmem_pcow_high, high);
    if (before) {
        g_free_rcu(before, rcu);
    }
}

void hostmem_pcow_add_place(HostMemPcow *pcow, void *host, uint64_t length)
{
    Images *now = copy_images(pcow);

    now->at[now->count].low = (uintptr_t)host;
    now->at[now->count].high = (uintptr_t)host + length;
    now->at[now->count++].pcow = pcow;
    publish_images(now);
}

HostMemPcow *hostmem_pcow_find(const void *host, uint64_t *offset)
{
    uintptr_t address = (uintptr_t)host;
    const Images *now;

    if (!hostmem_pcow_may_cover(host)) {
        return NULL;
    }
    RCU_READ_LOCK_GUARD();
    now = qatomic_rcu_read(&images);
    for (unsigned i = 0; now && i < now->count; i++) {
        if (address >= now->at[i].low && address < now->at[i].high) {
            *offset = address - now->at[i].low;
            return now->at[i].pcow;
        }
    }
    return NULL;
}

static QemuMutex images_lock;

void hostmem_pcow_lock_images(void)
{
    qemu_mutex_lock(&images_lock);
}

void hostmem_pcow_unlock_images(void)
{
    qemu_mutex_unlock(&images_lock);
}

/*
 * No flat view has the memory any more, and the RAM block is off the list, but
 * a vCPU that found it there may be at it.  synchronize_rcu() is no way to wait
 * for it: readers may need the BQL.
 */
void hostmem_pcow_remove_place(HostMemPcow *pcow)
{
    publish_images(copy_images(pcow));
    hostmem_pcow_forget_errors(pcow);
    hostmem_pcow_lock_images();
    hostmem_pcow_unlock_images();
}

void hostmem_pcow_places_init(void)
{
    qemu_mutex_init(&images_lock);
}
