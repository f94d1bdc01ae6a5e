/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A pcow image in the stream of a live migration: a section for each that is
 * writable.  Of others the stream has the identity only.
 *
 * The destination has a new, empty image on the same base.  The source sends
 * what its image holds beyond that base, so what both share never travels:
 * first as it was at a snapshot that is taken when the migration begins, while
 * the guest runs; then, round by round, what differs at the next snapshot; the
 * last of them, taken when the guest has stopped, completes it.  Nothing keeps
 * a log of stores for that: two snapshots of one file tell by themselves where
 * they differ, as what they have in common lies in the same place.
 *
 * A section is a sequence of records, each begun by a big-endian 64-bit word:
 * an offset, a multiple of 4 KiB, with the kind of record in its low bits.
 *
 *   HEADER  be32 version, be64 size of the image in bytes, 32 bytes, the hash
 *           of what it stands on (HostMemPcowIdentity); always first
 *   DATA    be32 length, that many bytes
 *   ZERO    be32 length: they read as zeros
 *   END     no more in this part of the section
 *   FINISH  no more at all: what came is complete, and is made durable
 */
#ifndef MIGRATION_PCOW_STREAM_H
#define MIGRATION_PCOW_STREAM_H

#include "qemu/units.h"
#include "migration/qemu-file-types.h"
#include "system/hostmem-pcow.h"

#define HOSTMEM_PCOW_STREAM_VERSION 1
#define HOSTMEM_PCOW_STREAM_PAGE 4096
#define HOSTMEM_PCOW_STREAM_LENGTH (64 * KiB)   /* of a record, at most */

typedef enum HostMemPcowRecord {
    HOSTMEM_PCOW_HEADER = 1,
    HOSTMEM_PCOW_DATA,
    HOSTMEM_PCOW_ZERO,
    HOSTMEM_PCOW_END,
    HOSTMEM_PCOW_FINISH,
} HostMemPcowRecord;

/* ---- migration/pcow/difference.c ---- */

typedef struct HostMemPcowDifference {
    struct pcow_image *last, *next; /* snapshots; no last: an empty image */
    uint64_t offset;                /* so far */
    uint8_t data[HOSTMEM_PCOW_STREAM_LENGTH], old[HOSTMEM_PCOW_STREAM_LENGTH];
} HostMemPcowDifference;

void hostmem_pcow_put_record(QEMUFile *f, uint64_t offset,
                             HostMemPcowRecord kind);
/*
 * Go on, to the end of the image or, unless @all, of what the rate allows.
 * Returns 1 at the end, 0 before it, -errno with @errp set, or without if it is
 * the stream that failed.  Any thread, one at a time.
 */
int hostmem_pcow_send_difference(QEMUFile *f, HostMemPcowDifference *diff,
                                 bool all, Error **errp);

/* ---- migration/pcow/incoming.c ---- */

/* As SaveVMHandlers.load_state */
int hostmem_pcow_incoming_load(QEMUFile *f, void *pcow, int version);
void hostmem_pcow_incoming_register(HostMemPcow *pcow);
void hostmem_pcow_incoming_unregister(HostMemPcow *pcow);

#endif
