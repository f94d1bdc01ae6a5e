/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The bytes of format 2, as doc/source/reference/format.rst specifies them. Nothing here allocates
 * or does I/O.
 */
#ifndef PCOW_FORMAT_FORMAT2_H
#define PCOW_FORMAT_FORMAT2_H

#include <assert.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#include "pcow.h"
#include "util/bits.h"
#include "util/crc.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the tables of an image are little-endian and mapped: a big-endian host has to swap bytes"
#endif

#define FORMAT2_MAGIC "\x89PCOW\r\n\x1a"
#define FORMAT2_VERSION 2u

#define SLAB_BITS 21u
#define GROUP_BITS 14u
#define SLABS_PER_GROUP (1u << GROUP_BITS)
#define MAX_GROUPS 4096u
#define MAX_FILE_SLABS ((uint64_t)MAX_GROUPS << GROUP_BITS)
#define GROUP_SIZE ((uint64_t)SLABS_PER_GROUP << SLAB_BITS)

#define HEADER_SIZE 4096u
#define HEADER_COPY_OFFSET 4096u
/* Bytes that are locked, and never written: see "Locks" in format.rst. */
#define LOCK_OFFSET 12288
#define LOCK_GATE_OFFSET 12289
#define LOCK_TREE_OFFSET 12290
#define LOCK_CHECKSUMS_OFFSET 12291
#define LOCK_SNAPSHOTS_OFFSET (INT64_C(1) << 62)     /* + layer id; behind the end of any file */
#define SLAB_TABLE_OFFSET (UINT64_C(64) << 10)
#define LAYER_TABLE_OFFSET (UINT64_C(192) << 10)
#define BITMAP_OFFSET (UINT64_C(1) << 20)

#define LAYER_RECORD_SIZE 256u
#define LAYER_TABLE_0_SLOTS 3328u
#define LAYER_TABLE_SLOTS 8192u
#define MAX_LAYERS 65536u
#define MAX_LAYER_TABLE (MAX_LAYERS / LAYER_TABLE_SLOTS + 1)
#define LAYER_ID_BITS 28u
#define MAX_LAYER_ID ((1u << LAYER_ID_BITS) - 1)
#define MAX_GUEST_SLABS (PCOW_MAX_VIRTUAL_SIZE >> SLAB_BITS)

/* ---- checked words --------------------------------------------------------------------------- */

#define WORD_VALUE_MASK ((UINT64_C(1) << 56) - 1)

static inline uint64_t word_encode(uint64_t value)
{
    value &= WORD_VALUE_MASK;
    return value ? value | (uint64_t)crc8_of_word(value) << 56 : 0;
}

static inline bool word_is_valid(uint64_t word)
{
    return word == 0 || (word >> 56 == crc8_of_word(word) && (word & WORD_VALUE_MASK));
}

static inline uint64_t word_value(uint64_t word)
{
    return word & WORD_VALUE_MASK;
}

/* ---- header ---------------------------------------------------------------------------------- */

enum header_state {
    HEADER_SEALED = 1,
    HEADER_COPY_ON_READ = 2,
    HEADER_AMENDING = 4,               /* see operations/amend.c */
    HEADER_CHECKSUMS = 8,              /* when it was sealed, all its data had checksums */
};
enum base_flags { BASE_UNCHECKED = 1 };

struct base_record {
    uint8_t uuid[PCOW_UUID_SIZE];
    uint64_t generation;
    uint64_t layer;
    uint32_t format;
    uint32_t flags;
    char name[PCOW_BASE_NAME_SIZE];
    uint8_t reserved[212];
    uint32_t crc;
};

struct header {
    char magic[8];
    uint32_t version;
    uint32_t header_size;
    uint64_t incompatible_features;
    uint64_t read_only_compatible_features;
    uint64_t compatible_features;
    uint8_t uuid[PCOW_UUID_SIZE];
    uint32_t cluster_bits;
    uint32_t page_bits;
    uint32_t slab_bits;
    uint32_t group_bits;
    uint64_t created;
    uint8_t reserved0[428];
    uint32_t crc;
    /* checked words from here */
    uint64_t active_layer;
    uint64_t next_layer_id;
    uint64_t layer_slots;
    uint64_t generation;
    uint64_t base_slot;
    uint64_t state;
    /* At that generation all data had checksums, though the image is not sealed any more; or 0. */
    uint64_t summed;
    uint8_t reserved1[456];
    struct base_record base[2];
    uint8_t reserved2[2048];
};

static_assert(sizeof(struct base_record) == 512, "base record");
static_assert(sizeof(struct header) == HEADER_SIZE, "header");
static_assert(offsetof(struct header, crc) == 508 && offsetof(struct header, active_layer) == 512,
              "header fields");
static_assert(offsetof(struct header, base) == 1024, "base records");

/*
 * Is this a header that this library can use? 0, or -EMEDIUMTYPE (not ours), -ENOTSUP (version,
 * incompatible feature), -EBADMSG (damaged). path only names the file in the message.
 */
int header_validate(const struct header *header, const char *path, struct pcow_error *error);
uint32_t header_crc(const struct header *header);
uint32_t base_record_crc(const struct base_record *record);
/* 0 or -EBADMSG: crc, name. */
int base_record_validate(const struct base_record *record, const char *path,
                         struct pcow_error *error);
/*
 * A file name that may be looked up in the directory of the image: not empty, no '/', not "." or
 * "..".
 */
bool base_name_is_safe(const char *name, size_t size);

/* ---- the mirror: a second copy of the metadata, and checksums of its pages ------------------- */

/* Read-only-compatible features. */
enum { FEATURE_MIRROR = 1 };
#define FEATURES_KNOWN ((uint64_t)FEATURE_MIRROR)

/*
 * With the mirror, the first three slabs of a group hold no data: the metadata, its mirror, and
 * what is kept for checksums of data.
 */
#define MIRROR_HEADS 3u
#define MAX_HEADS MIRROR_HEADS
#define METADATA_PAGES (PCOW_SLAB_SIZE / PCOW_PAGE_SIZE)    /* of a group */
/* Pages 2 to 15 of a group's first slab are none; in the mirror, page 2 is that of checksums. */
#define METADATA_GAP_FIRST 2u
#define METADATA_GAP_END 16u
#define CHECKSUMS_PAGE 2u
/* In the page of checksums, the place of a page that has none: is any mark of them to be trusted? */
#define CHECKSUMS_UNORDERED CHECKSUMS_PAGE

static inline bool metadata_page_counts(unsigned page)
{
    return page < METADATA_GAP_FIRST || page >= METADATA_GAP_END;
}

static inline unsigned header_heads(const struct header *header)
{
    return header->read_only_compatible_features & FEATURE_MIRROR ? MIRROR_HEADS : 1;
}

/* What a word in the page of checksums says. 0: nothing was ever stored to the page. */
enum { CHECKSUM_VALID = 1, CHECKSUM_STALE = 2 };

static inline uint64_t checksum_encode(unsigned what, uint32_t crc)
{
    return word_encode(crc | (uint64_t)what << 32);
}

static inline bool checksum_is(uint64_t word, unsigned what)
{
    return word_is_valid(word) && word_value(word) >> 32 == what;
}

/* ---- layers ---------------------------------------------------------------------------------- */

enum layer_state { LAYER_FREE, LAYER_OPEN, LAYER_SNAPSHOT, LAYER_HIDDEN };
enum layer_flags {
    LAYER_PINNED = 1,                  /* see snapshot/pin.h */
    LAYER_SUMMED = 2,                  /* see snapshot/summed.h */
};

struct layer_record {
    uint64_t state;
    uint64_t parent;
    uint64_t virtual_size;
    uint64_t parent_limit;
    uint64_t state_size;
    int64_t date_seconds;
    uint32_t date_nanoseconds;
    uint32_t reserved0;
    char name[PCOW_SNAPSHOT_NAME_SIZE];
    uint8_t reserved1[68];
    uint32_t crc;
};

static_assert(sizeof(struct layer_record) == LAYER_RECORD_SIZE, "layer record");
static_assert(offsetof(struct layer_record, crc) == 252, "layer record crc");

static inline uint64_t layer_state_word(uint32_t id, enum layer_state state, unsigned flags,
                                        unsigned sequence)
{
    return word_encode((uint64_t)id | (uint64_t)state << 28 | (uint64_t)(flags & 0xff) << 32
                       | (uint64_t)(sequence & 0xff) << 40);
}

uint32_t layer_record_crc(const struct layer_record *record);
/* A snapshot name: not empty, NUL-terminated, no control characters. */
bool snapshot_name_is_valid(const char *name, size_t size);

/* ---- slab table ------------------------------------------------------------------------------ */

enum owner_kind { OWNER_NONE, OWNER_DATA, OWNER_STATE, OWNER_TABLE };

struct owner {
    enum owner_kind kind;
    uint32_t layer;
    uint32_t number;           /* guest slab, piece of state, or table */
};

#define OWNER_NUMBER_BITS 26u

static inline uint64_t owner_encode(struct owner owner)
{
    return word_encode((uint64_t)owner.number | (uint64_t)owner.layer << OWNER_NUMBER_BITS
                       | (uint64_t)owner.kind << 54);
}

static inline struct owner owner_decode(uint64_t word)
{
    uint64_t value = word_value(word);

    return (struct owner){
        .kind = (enum owner_kind)(value >> 54 & 3),
        .layer = (uint32_t)(value >> OWNER_NUMBER_BITS) & MAX_LAYER_ID,
        .number = (uint32_t)value & ((1u << OWNER_NUMBER_BITS) - 1),
    };
}

/*
 * What the writer puts in the first two words of the bitmap of a slab that he has set free, behind
 * the owner word 0: whose it was. To readers the bitmap of such a slab says nothing; but without
 * this a free slab would look like one whose owner word was lost.
 */
#define RELEASED_MARK UINT64_C(0x64657361656c6572)

static inline bool bitmap_is_released(const uint64_t *words)
{
    return words[0] == RELEASED_MARK && words[1] && word_is_valid(words[1]);
}

/* File offsets of the metadata of file slab p. */
static inline uint64_t slab_group_offset(uint64_t slab)
{
    return slab >> GROUP_BITS << (GROUP_BITS + SLAB_BITS);
}

static inline uint64_t owner_offset(uint64_t slab)
{
    return slab_group_offset(slab) + SLAB_TABLE_OFFSET
           + (slab % SLABS_PER_GROUP) * sizeof(uint64_t);
}

static inline uint64_t bitmap_offset(uint64_t slab)
{
    return slab_group_offset(slab) + BITMAP_OFFSET
           + (slab % SLABS_PER_GROUP) * sizeof(struct page_set);
}

/* Of the mirror of the metadata: of a page of it, or of its page of checksums. */
static inline uint64_t mirror_offset(uint64_t group, unsigned page)
{
    return group * GROUP_SIZE + PCOW_SLAB_SIZE + (uint64_t)page * PCOW_PAGE_SIZE;
}

/* ---- checksums of data: in the third slab of a group ----------------------------------------- */

/* Of a file slab, whose data is final; "Checksums of data" in format.rst. */
struct datasum {
    uint64_t word;                     /* checked word, the commit of the rest: see below */
    uint64_t crc;                      /* CRC-32C of the rest and the place, see datasum_crc() */
    uint64_t hash[2];
    uint64_t reserved[4];
};

static_assert(sizeof(struct datasum) == 64, "checksum of data");

#define DATASUM_XXH3 1u                /* how the hash was made; there is no other way */

static inline uint64_t datasum_word(uint32_t layer)
{
    return word_encode(layer | (uint64_t)DATASUM_XXH3 << LAYER_ID_BITS);
}

static inline uint64_t datasum_offset(uint64_t slab)
{
    return slab_group_offset(slab) + 2 * PCOW_SLAB_SIZE
           + (slab % SLABS_PER_GROUP) * sizeof(struct datasum);
}

/* heads: slabs at the begin of a group that hold no data, see header_heads(). */
static inline bool slab_is_group_head(uint64_t slab, unsigned heads)
{
    return slab % SLABS_PER_GROUP < heads;
}

#endif
