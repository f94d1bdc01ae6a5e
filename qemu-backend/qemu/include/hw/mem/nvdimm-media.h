/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What an NVDIMM keeps when the power fails, under TCG.
 *
 * The memory of a guest is what its CPUs see, caches included.  With the
 * property x-media=FILE of an nvdimm, FILE gets what has left the caches: a
 * line (64 bytes) that was written back by CLWB, CLFLUSHOPT, CLFLUSH or a
 * non-temporal store, and then ordered by SFENCE, MFENCE or CLFLUSH of any CPU.
 * Whoever kills QEMU and goes on with FILE has cut the power of a machine whose
 * caches are lost.  For tests: it finds what was not flushed, or not fenced.
 *
 * Not seen: writes of devices (DMA) into the NVDIMM, and the order that a
 * locked instruction gives.
 */
#ifndef HW_MEM_NVDIMM_MEDIA_H
#define HW_MEM_NVDIMM_MEDIA_H

/*
 * Keep what is written back from the caches of memory at base in a file.
 *
 * path: a file of size bytes with the contents of the memory.
 * Returns false with an error: the file cannot be used, or another accelerator
 * than TCG runs the guest.
 */
bool nvdimm_media_add(void *base, uint64_t size, const char *path, Error **errp);

/* Whether any NVDIMM has such a file; settled before CPUs run. */
bool nvdimm_media_used(void);

/*
 * The lines that hold these bytes leave the caches, in no order until the next
 * fence.
 */
void nvdimm_media_write_back(const void *host, uint64_t size);

/* What was written back before is on the media when this returns. */
void nvdimm_media_fence(void);

#endif
