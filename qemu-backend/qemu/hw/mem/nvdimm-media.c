/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The media of NVDIMMs, apart from the caches before it.  See nvdimm-media.h.
 *
 * A line that is written back waits, with the bytes it has at that moment,
 * until a fence: a later store to it is not part of it, and without a fence it
 * is lost, which is the worst that a CPU may do.  The list is one for all CPUs,
 * since a thread may write back on one and fence on another; a fence of any CPU
 * so settles what all wrote back.  Where the list is full its oldest half goes
 * to the media unfenced, as a CPU may do as well.
 */
#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/thread.h"
#include "system/tcg.h"
#include "hw/mem/nvdimm-media.h"

/* bytes; Intel SDM, CPUID.01H:EBX[15:8] of the CPUs that TCG has */
#define LINE ((uint64_t)64)
#define MAX_MEDIA 8
#define MAX_WAITING 4096

typedef struct Media {
    const uint8_t *base;
    uint64_t size;
    uint8_t *kept;                               /* the file */
} Media;

typedef struct WaitingLine {
    uint8_t *to;
    uint8_t bytes[64];
} WaitingLine;

static struct {
    QemuMutex lock;                              /* of waiting and count */
    Media media[MAX_MEDIA];
    unsigned used;                               /* written before CPUs run */
    WaitingLine waiting[MAX_WAITING];
    unsigned count;
} state;

bool nvdimm_media_add(void *base, uint64_t size, const char *path, Error **errp)
{
    Media *media = &state.media[state.used];
    struct stat about;
    void *kept;
    int fd;

    if (!tcg_enabled()) {
        error_setg(
            errp,
            "x-media works with -accel tcg only: no other accelerator tells of flushed lines");
        return false;
    }
    if (state.used == MAX_MEDIA) {
        error_setg(errp, "x-media is for %d NVDIMMs at most", MAX_MEDIA);
        return false;
    }
    fd = qemu_open(path, O_RDWR, errp);
    if (fd < 0) {
        return false;
    }
    if (fstat(fd, &about) || (uint64_t)about.st_size != size) {
        error_setg(errp, "x-media: %s has %" PRIu64 " bytes, the memory %" PRIu64, path,
                   (uint64_t)about.st_size, size);
        close(fd);
        return false;
    }
    kept = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (kept == MAP_FAILED) {
        error_setg_errno(errp, errno, "x-media: %s cannot be mapped", path);
        return false;
    }
    if (!state.used) {
        qemu_mutex_init(&state.lock);
    }
    *media = (Media){ .base = base, .size = size, .kept = kept };
    state.used++;
    return true;
}

bool nvdimm_media_used(void)
{
    return state.used;
}

static Media *media_of(const uint8_t *host)
{
    for (unsigned i = 0; i < state.used; i++) {
        Media *media = &state.media[i];

        if (host >= media->base && host < media->base + media->size) {
            return media;
        }
    }
    return NULL;
}

static void settle(unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        memcpy(state.waiting[i].to, state.waiting[i].bytes, LINE);
    }
    state.count -= count;
    memmove(state.waiting, state.waiting + count, state.count * sizeof(state.waiting[0]));
}

void nvdimm_media_write_back(const void *host, uint64_t size)
{
    Media *media = media_of(host);
    uint64_t first, end;

    if (!media || !size) {
        return;
    }
    first = QEMU_ALIGN_DOWN((uint64_t)((const uint8_t *)host - media->base), LINE);
    end = MIN((uint64_t)((const uint8_t *)host - media->base) + size, media->size);
    qemu_mutex_lock(&state.lock);
    for (uint64_t offset = first; offset < end; offset += LINE) {
        if (state.count == MAX_WAITING) {
            settle(MAX_WAITING / 2);
        }
        state.waiting[state.count].to = media->kept + offset;
        memcpy(state.waiting[state.count].bytes, media->base + offset, LINE);
        state.count++;
    }
    qemu_mutex_unlock(&state.lock);
}

void nvdimm_media_fence(void)
{
    qemu_mutex_lock(&state.lock);
    settle(state.count);
    qemu_mutex_unlock(&state.lock);
}
