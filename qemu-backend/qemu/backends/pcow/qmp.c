/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * QMP commands and events of memory backends on pcow images.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/core/cpu.h"
#include "hw/mem/memory-device.h"
#include "hw/virtio/vhost.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-pcow.h"
#include "qemu/timer.h"
#include "qemu/uuid.h"
#include "system/cpus.h"
#include "system/hostmem-pcow.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"
#include "system/system.h"

void hostmem_pcow_handle_events(void *opaque)
{
    HostMemPcow *pcow = opaque;
    struct pcow_event event;

    while (pcow_map_next_event(pcow->map, &event)) {
        switch (event.kind) {
        case PCOW_EVENT_POOL_FULL:
            if (pcow->full == HOST_MEM_PCOW_FULL_WAIT) {
                hostmem_pcow_tell_waits(pcow, event.offset);
            }                   /* else backends/pcow/error.c tells */
            break;
        case PCOW_EVENT_POOL_RESUMED:
            hostmem_pcow_tell_resumed(pcow);
            break;
        case PCOW_EVENT_ERROR:
            hostmem_pcow_tell_error(pcow, event.offset, event.error,
                                    "the guest got an error");
            break;
        case PCOW_EVENT_WITHDRAWN:
            vhost_forget_memory();
            hostmem_pcow_forget_areas();
            break;
        }
    }
}

#define LISTEN_INTERVAL_MS 100

static void keep_listening(HostMemPcow *pcow)
{
    timer_mod(pcow->listener,
              qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + LISTEN_INTERVAL_MS);
}

void hostmem_pcow_handle_full(EventNotifier *notifier)
{
    HostMemPcow *pcow = container_of(notifier, HostMemPcow, became_full);

    if (event_notifier_test_and_clear(notifier)) {
        hostmem_pcow_tell_full(pcow, qatomic_read(&pcow->full_offset));
        keep_listening(pcow);
    }
}

void hostmem_pcow_handle_silence(void *opaque)
{
    HostMemPcow *pcow = opaque;

    /* while the VM is stopped nobody tries, and that says nothing */
    if (!runstate_is_running()) {
        qatomic_set(&pcow->full_at, get_clock());
    }
    if (get_clock() - qatomic_read(&pcow->full_at) < NANOSECONDS_PER_SECOND) {
        keep_listening(pcow);
        return;
    }
    qatomic_set(&pcow->waiting, false);
    hostmem_pcow_tell_resumed(pcow);
}

HostMemPcow *hostmem_pcow_by_id(const char *id, Error **errp)
{
    Object *obj = object_resolve_path_component(object_get_objects_root(), id);

    if (obj && object_dynamic_cast(obj, TYPE_MEMORY_BACKEND_FILE)) {
        HostMemPcow *pcow = hostmem_file_get_pcow(obj);

        if (pcow->map) {
            return pcow;
        }
    }
    error_setg(errp, "'%s' is not the id of a memory backend on a pcow image; "
               "query-pcow lists them", id);
    return NULL;
}

static char *uuid_to_string(const uint8_t *bytes)
{
    QemuUUID uuid;

    memcpy(uuid.data, bytes, sizeof(uuid.data));
    return qemu_uuid_unparse_strdup(&uuid);
}

static PcowSnapshotInfo *snapshot_info(const struct pcow_snapshot *snapshot)
{
    PcowSnapshotInfo *info = g_new0(PcowSnapshotInfo, 1);

    info->id = g_strdup_printf("%" PRIu32, snapshot->id);
    info->name = g_strdup(snapshot->name);
    if (snapshot->parent_id) {
        info->parent_id = g_strdup_printf("%" PRIu32, snapshot->parent_id);
    }
    info->date_sec = snapshot->date_seconds;
    info->date_nsec = snapshot->date_nanoseconds;
    info->virtual_size = snapshot->virtual_size;
    info->vm_state_size = snapshot->state_size;
    info->data_size = snapshot->data_size;
    info->shared_size = snapshot->shared_size;
    info->delete_frees = snapshot->delete_frees;
    info->current = snapshot->current;
    info->pinned = snapshot->pinned;
    return info;
}

static bool list_snapshots(HostMemPcow *pcow, PcowSnapshotInfoList **tail,
                           Error **errp)
{
    struct pcow_snapshot *list;
    struct pcow_error error;
    size_t count;

    if (pcow_snapshot_list(pcow->image, &list, &count, &error) < 0) {
        error_setg(errp, "%s", error.message);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        QAPI_LIST_APPEND(tail, snapshot_info(&list[i]));
    }
    free(list);
    return true;
}

static PcowStats *get_stats(HostMemPcow *pcow, HostMemPcowEngine *engine)
{
    PcowStats *stats = g_new0(PcowStats, 1);
    struct pcow_map_stats s;

    pcow_map_get_stats(pcow->map, &s);
    *engine = (HostMemPcowEngine)s.engine;
    stats->write_traps = s.write_traps + qatomic_read(&pcow->write_traps);
    stats->read_traps = s.read_traps + qatomic_read(&pcow->read_traps);
    stats->pages_copied = s.pages_copied;
    stats->pages_zeroed = s.pages_zeroed;
    stats->slabs_promoted = s.slabs_promoted;
    stats->pool_full_waits = s.pool_full_waits +
                             qatomic_read(&pcow->full_waits);
    stats->flushes = s.flushes;
    stats->watches = s.watches;
    stats->mappings = s.vmas;
    stats->mapping_budget = s.vma_budget;
    stats->memory = s.memory;
    return stats;
}

/* The device that the backend is plugged into, or NULL. */
static Object *find_front_end(HostMemPcow *pcow, const char **type)
{
    g_autofree char *path = object_get_canonical_path(OBJECT(pcow->backend));
    MemoryDeviceInfoList *list = qmp_memory_device_list();
    const char *id = NULL;
    Object *device = NULL;

    for (MemoryDeviceInfoList *i = list; i; i = i->next) {
        MemoryDeviceInfo *info = i->value;

        switch (info->type) {
        case MEMORY_DEVICE_INFO_KIND_DIMM:
            if (!strcmp(info->u.dimm.data->memdev, path)) {
                *type = "pc-dimm";
                id = info->u.dimm.data->id;
            }
            break;
        case MEMORY_DEVICE_INFO_KIND_NVDIMM:
            if (!strcmp(info->u.nvdimm.data->memdev, path)) {
                *type = "nvdimm";
                id = info->u.nvdimm.data->id;
            }
            break;
        case MEMORY_DEVICE_INFO_KIND_VIRTIO_PMEM:
            if (!strcmp(info->u.virtio_pmem.data->memdev, path)) {
                *type = "virtio-pmem";
                id = info->u.virtio_pmem.data->id;
            }
            break;
        default:
            break;
        }
    }
    if (id) {
        device = object_resolve_path_type(id, TYPE_DEVICE, NULL);
    }
    qapi_free_MemoryDeviceInfoList(list);
    return device;
}

static bool is_virtio_pmem_on_image(const MemoryDeviceInfo *device)
{
    Object *backend;

    if (device->type != MEMORY_DEVICE_INFO_KIND_VIRTIO_PMEM) {
        return false;
    }
    backend = object_resolve_path_type(device->u.virtio_pmem.data->memdev,
                                       TYPE_MEMORY_BACKEND, NULL);
    return backend && MEMORY_BACKEND(backend)->mr.ram_block->pcow;
}

MemoryDeviceInfoList *hostmem_pcow_listed(MemoryDeviceInfoList *devices)
{
    MemoryDeviceInfoList **link = &devices;

    while (*link) {
        MemoryDeviceInfoList *one = *link;

        if (is_virtio_pmem_on_image(one->value)) {
            *link = one->next;
            one->next = NULL;
            qapi_free_MemoryDeviceInfoList(one);
        } else {
            link = &one->next;
        }
    }
    return devices;
}

static PcowFailureList *failures(enum pcow_persistence persistence,
                                 bool flushed)
{
    unsigned survived = pcow_persistence_survives(persistence, flushed);
    PcowFailureList *list = NULL, **tail = &list;

    for (PcowFailure f = 0; f < PCOW_FAILURE__MAX; f++) {
        if (survived & 1u << f) {
            QAPI_LIST_APPEND(tail, f);
        }
    }
    return list;
}

static PcowDurability *get_durability(HostMemPcow *pcow,
                                      enum pcow_persistence persistence)
{
    PcowDurability *durability = g_new0(PcowDurability, 1);
    const char *type = NULL;
    Object *device = find_front_end(pcow, &type);
    bool is_virtio = type && !strcmp(type, "virtio-pmem");

    QEMU_BUILD_BUG_ON(1 << PCOW_FAILURE_PROCESS_CRASH != PCOW_SURVIVES_PROCESS ||
                      1 << PCOW_FAILURE_POWER_LOSS != PCOW_SURVIVES_POWER);
    /* What reaches the host as a flush; an nvdimm's flush stays in the CPU. */
    durability->guest_flush = failures(persistence, is_virtio ||
                                       persistence == PCOW_PERSISTENCE_PMEM);
    durability->host_flush = failures(persistence, true);
    if (type) {
        durability->front_end = g_strdup(type);
    }
    if (pcow->readonly) {
        durability->promise = PCOW_PROMISE_READ_ONLY;
    } else if (device && type && !strcmp(type, "nvdimm") &&
               object_property_get_bool(device, "unarmed", NULL)) {
        durability->promise = PCOW_PROMISE_READ_ONLY;
    } else if (persistence == PCOW_PERSISTENCE_PMEM ||
               (is_virtio && persistence == PCOW_PERSISTENCE_PAGE_CACHE)) {
        durability->promise = PCOW_PROMISE_DURABLE;
    } else {
        durability->promise = PCOW_PROMISE_VOLATILE;
    }
    return durability;
}

static void get_spare(const HostMemPcow *pcow, PcowInfo *info)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(pcow->map, &stats);
    info->spare = stats.slabs_spare * (uint64_t)PCOW_SLAB_SIZE;
    info->spare_wanted = stats.slabs_spare_wanted * (uint64_t)PCOW_SLAB_SIZE;
}

static bool append_info(HostMemPcow *pcow, void *opaque, Error **errp)
{
    PcowInfoList ***tail = opaque;
    PcowInfo *info = g_new0(PcowInfo, 1);
    strList **chain = &info->chain;
    struct pcow_info i;

    QEMU_BUILD_BUG_ON((int)HOST_MEM_PCOW_PERSISTENCE_PMEM !=
                      PCOW_PERSISTENCE_PMEM);
    QAPI_LIST_APPEND(*tail, info);
    pcow_get_info(pcow->image, &i);
    info->id = g_strdup(pcow->id);
    info->filename = g_strdup(pcow_path(pcow->image));
    info->uuid = uuid_to_string(i.uuid);
    info->format = i.format;
    info->virtual_size = i.virtual_size;
    info->data_size = i.data_size;
    info->actual_size = i.allocated_size;
    info->read_only = pcow->readonly;
    info->persistence = (HostMemPcowPersistence)i.persistence;
    info->durability = get_durability(pcow, i.persistence);
    info->full_policy = pcow->full;
    info->pool_low = pcow->low;
    get_spare(pcow, info);
    info->stats = get_stats(pcow, &info->engine);
    for (struct pcow_image *im = pcow->image; im; im = pcow_base(im)) {
        QAPI_LIST_APPEND(chain, g_strdup(pcow_path(im)));
    }
    return list_snapshots(pcow, &info->snapshots, errp);
}

PcowInfoList *coroutine_fn qmp_query_pcow(Error **errp)
{
    PcowInfoList *list = NULL, **tail = &list;

    hostmem_pcow_await_changes();
    if (!hostmem_pcow_foreach(append_info, &tail, errp)) {
        qapi_free_PcowInfoList(list);
        return NULL;
    }
    return list;
}
