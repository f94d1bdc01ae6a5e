/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "signal": what is not to be stored to is mapped for loads alone, and the store is a
 * SIGSEGV (dispatch.c). It keeps no slab, and adds nothing. Engine "kvm" is the same, for a range
 * that vCPUs store to as well.
 */
#include "monitor/monitor.h"

static bool is_ready(struct pcow_map *map)
{
    (void)map;
    return true;
}

static void close_nothing(struct pcow_map *map)
{
    (void)map;
}

static bool can_keep_none(const struct pcow_map *map, uint64_t guest_slab)
{
    (void)map;
    (void)guest_slab;
    return false;
}

static bool keep_none(struct pcow_map *map, uint64_t guest_slab, bool at_once)
{
    (void)map;
    (void)guest_slab;
    (void)at_once;
    return false;
}

const struct engine engine_signal = {
    .number = PCOW_ENGINE_SIGNAL,
    .prepare = is_ready,
    .close = close_nothing,
    .can_keep = can_keep_none,
    .keep = keep_none,
};

/*
 * The watch will need userfaultfd, perhaps after privileges were dropped; if it cannot be had now,
 * it may be then.
 */
static bool prepare_watch(struct pcow_map *map)
{
    if (map->image->file.writable)
        uffd_open(map, NULL);
    return true;
}

const struct engine engine_kvm = {
    .number = PCOW_ENGINE_KVM,
    .keeps_tables = true,
    .prepare = prepare_watch,
    .close = close_nothing,
    .can_keep = can_keep_none,
    .keep = keep_none,
};
