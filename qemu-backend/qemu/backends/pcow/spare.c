/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What is kept of the pools for the last checkpoint of the VM, which may have
 * to be taken when they have no room: see pcow_map_keep_spare().  All images of
 * the VM have some, also those that are plugged later on.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "system/hostmem-pcow.h"

/* Looks in which some may be missing, as a checkpoint has used it */
#define MOST_MISSING 5

static struct {
    const HostMemPcow *home;    /* NULL: nothing is kept */
    uint64_t state_size;        /* bytes of VM state that it is for */
} wanted;

static bool keep(HostMemPcow *pcow, void *opaque, Error **errp)
{
    struct pcow_error error;

    if (pcow->map && !pcow->readonly &&
        pcow_map_keep_spare(pcow->map, wanted.home != NULL,
                            pcow == wanted.home ? wanted.state_size : 0,
                            &error) < 0) {
        warn_report_once("no room is kept for the last checkpoint: %s",
                         error.message);
    }
    return true;
}

void hostmem_pcow_keep_spare(const HostMemPcow *home, uint64_t state_size)
{
    wanted.home = home;
    wanted.state_size = state_size;
    hostmem_pcow_foreach(keep, NULL, NULL);
}

static bool use(HostMemPcow *pcow, void *opaque, Error **errp)
{
    const bool *used = opaque;

    if (pcow->map && !pcow->readonly) {
        pcow_map_use_spare(pcow->map, *used);
    }
    return true;
}

void hostmem_pcow_use_spare(bool used)
{
    hostmem_pcow_foreach(use, &used, NULL);
}

bool hostmem_pcow_lend_spare(const void *address)
{
    uint64_t offset;
    HostMemPcow *pcow = hostmem_pcow_find(address, &offset);

    return pcow && pcow_map_lend_spare(pcow->map);
}

void hostmem_pcow_look_at_spare(HostMemPcow *pcow)
{
    struct pcow_map_stats stats;
    bool missing;

    if (!wanted.home && !pcow->spare_missing) {
        return;
    }
    keep(pcow, NULL, NULL);
    pcow_map_get_stats(pcow->map, &stats);
    missing = stats.slabs_spare < stats.slabs_spare_wanted;
    if (missing && ++pcow->spare_missing == MOST_MISSING) {
        warn_report("pcow image '%s': its pool has no room that could be kept "
                    "for the last checkpoint of the VM: if the host goes down "
                    "before it has, the VM goes on from an older one; free "
                    "space or extend the pool", pcow_path(pcow->image));
    }
    if (!missing && pcow->spare_missing >= MOST_MISSING && wanted.home) {
        info_report("pcow image '%s': there is room for the last checkpoint "
                    "of the VM again", pcow_path(pcow->image));
    }
    pcow->spare_missing = missing ? MIN(pcow->spare_missing, MOST_MISSING) : 0;
}
