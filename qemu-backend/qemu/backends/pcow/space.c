/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Tells that the pool of an image runs out of space while there still is some.
 *
 * Others use the pool as well, so the space is looked at by the clock, and not
 * when this image takes some of it.
 */
#include "qemu/osdep.h"
#include <sys/statvfs.h>
#include <pcow.h>
#include "qapi/error.h"
#include "qapi/qapi-events-pcow.h"
#include "qapi/visitor.h"
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "system/hostmem-pcow.h"

#define LOOK_INTERVAL_MS 1000
#define DEFAULT_WATERMARK 10    /* percent */
/* Percent above the watermark that end it, so that it does not flutter */
#define HYSTERESIS 1

static uint8_t watermark(const HostMemPcow *pcow)
{
    return pcow->has_watermark ? pcow->watermark : DEFAULT_WATERMARK;
}

static void tell_space(HostMemPcow *pcow, uint64_t free, uint64_t size)
{
    const char *path = pcow_path(pcow->image);
    const char *consequence = pcow->full == HOST_MEM_PCOW_FULL_FAIL
        ? "the guest's stores fail when nothing is"
        : "the guest waits when nothing is";

    qapi_event_send_pcow_pool_low(pcow->id, pcow->low, free, size,
                                  watermark(pcow));
    if (pcow->low) {
        warn_report("pcow image '%s': %" PRIu64 " MiB of %" PRIu64 " MiB are "
                    "free in its pool, less than %u %%; %s: free space or "
                    "extend the pool", path, free / MiB, size / MiB,
                    watermark(pcow), consequence);
    } else {
        info_report("pcow image '%s': there is enough space in its pool again",
                    path);
    }
}

static void look(void *opaque)
{
    HostMemPcow *pcow = opaque;
    unsigned mark = watermark(pcow) + (pcow->low ? HYSTERESIS : 0);
    const char *path = pcow_path(pcow->image);
    bool blind;
    struct statvfs st;

    /* a pool that cannot be looked at stays what it was */
    blind = fstatvfs(pcow_fd(pcow->image), &st) < 0;
    if (blind && !pcow->blind) {
        warn_report("pcow image '%s': the free space of its pool cannot be "
                    "looked at, so nothing tells when that becomes low: %s",
                    path, strerror(errno));
    }
    pcow->blind = blind;
    if (!blind && st.f_blocks) {
        uint64_t free = st.f_bavail * st.f_frsize;
        uint64_t size = st.f_blocks * st.f_frsize;
        bool low = watermark(pcow) && free < size / 100.0 * mark;

        if (low != pcow->low) {
            pcow->low = low;
            tell_space(pcow, free, size);
        }
    }
    hostmem_pcow_look_at_spare(pcow);
    timer_mod(pcow->space,
              qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + LOOK_INTERVAL_MS);
}

void hostmem_pcow_watch_space(HostMemPcow *pcow)
{
    if (!pcow->readonly) {
        pcow->space = timer_new_ms(QEMU_CLOCK_REALTIME, look, pcow);
        /* not at once: nobody has a monitor yet */
        timer_mod(pcow->space,
                  qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + LOOK_INTERVAL_MS);
    }
}

void hostmem_pcow_end_space(HostMemPcow *pcow)
{
    timer_free(pcow->space);
    pcow->space = NULL;
}

static void get_watermark(Object *obj, Visitor *v, const char *name,
                          void *opaque, Error **errp)
{
    uint8_t value = watermark(hostmem_file_get_pcow(obj));

    visit_type_uint8(v, name, &value, errp);
}

static void set_watermark(Object *obj, Visitor *v, const char *name,
                          void *opaque, Error **errp)
{
    HostMemPcow *pcow = hostmem_file_get_pcow(obj);
    uint8_t value;

    if (!visit_type_uint8(v, name, &value, errp)) {
        return;
    }
    if (value > 100) {
        error_setg(errp, "pcow-low is a percentage: give 0 to 100");
        return;
    }
    pcow->watermark = value;
    pcow->has_watermark = true;
}

void hostmem_pcow_space_class_init(ObjectClass *oc)
{
    object_class_property_add(oc, "pcow-low", "uint8", get_watermark,
                              set_watermark, NULL, NULL);
    object_class_property_set_description(oc, "pcow-low",
        "Percentage of free space in the pool of the pcow image below which "
        "an event tells");
}
