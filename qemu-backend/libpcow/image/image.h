/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An open image in memory: the header, the layers, and for every slab of the file who owns it and which pages are valid.
 * These copies in DRAM are what everything looks at; a change goes to the file first, in the order that the format
 * specification gives, and then here.
 */
#ifndef PCOW_IMAGE_IMAGE_H
#define PCOW_IMAGE_IMAGE_H

#include "format/format2.h"
#include "image/file.h"

struct format1;
struct chain;

struct layer {
    uint32_t id, parent;              /* parent 0: none */
    uint32_t slot;                    /* of its record */
    enum layer_state state;
    unsigned flags, sequence;
    uint64_t virtual_size, parent_limit, state_size;
    int64_t date_seconds;
    uint32_t date_nanoseconds;
    char name[PCOW_SNAPSHOT_NAME_SIZE];
};

/* A file slab: its owner, and the next older file slab for the same guest slab in the chain (see chain/chain.h). */
struct slab {
    uint64_t next;                    /* slab_ref, 0: none */
    uint32_t layer;                   /* 0 if free */
    uint32_t number : 30;             /* guest slab, piece or table */
    uint32_t kind : 2;                /* enum owner_kind */
};

struct pcow_image {
    struct file file;
    int directory;                    /* where a base is looked up */
    unsigned open_flags;
    struct header header;             /* as in the file, kept current */
    struct layer *layers;             /* alive ones, by ascending id */
    size_t layer_count, layer_capacity;
    uint32_t stale_record;            /* slot + 1 of the old record that an interrupted rename left; 0: none */
    uint32_t view;                    /* layer that is seen: the active one, or a snapshot */
    uint64_t size;                    /* virtual size of the view */
    bool changed;                     /* generation was raised by this writer */

    /* Indexed by file slab. Writers reserve address space for the largest file, so that the fault path never allocates. */
    uint64_t slab_count;              /* entries that may be in use (end of file at open for readers) */
    struct slab *slabs;
    struct page_set *valid;
    uint64_t *used;                   /* one bit a slab: taken */
    uint64_t slab_capacity;
    uint64_t slabs_at_open;           /* a free slab below may hold blocks of an interrupted operation */
    uint64_t free_hint;               /* no free slab below; a hint */
    uint64_t table[MAX_LAYER_TABLE + 1]; /* file slab of each further layer table, 0: none */

    struct format1 *format1;          /* not NULL: a format 1 file, read-only */
    struct pcow_image *base;
    struct chain *chain;              /* built on first use, see chain_get() */
    pcow_map *map;
};

/* image/open.c */
int image_load(struct pcow_image *image, const char *snapshot, struct pcow_error *error);
int image_open_base(struct pcow_image *image, struct pcow_error *error);

/* image/layers.c: layers in memory and in the file */
struct layer *layer_find(const struct pcow_image *image, uint32_t id);
struct layer *layer_find_name(const struct pcow_image *image, const char *name);
uint32_t image_active(const struct pcow_image *image);
unsigned layer_children(const struct pcow_image *image, uint32_t id, uint32_t *only_child);
struct layer *layer_insert(struct pcow_image *image, const struct layer *layer);
void layer_remove(struct pcow_image *image, uint32_t id);
uint64_t layer_record_offset(const struct pcow_image *image, uint32_t slot);     /* 0: no such slot */
int layers_load(struct pcow_image *image, struct pcow_error *error);
/* Write the whole record of a layer (state word last, as its commit). */
int layer_write_record(struct pcow_image *image, const struct layer *layer, struct pcow_error *error);
int layer_write_description(struct pcow_image *image, const struct layer *layer, struct pcow_error *error);
int layer_store_state(struct pcow_image *image, const struct layer *layer, struct pcow_error *error);
int layer_store_word(struct pcow_image *image, const struct layer *layer, size_t field, uint64_t value, struct pcow_error *error);
/*
 * A new id and a record slot whose blocks exist, both durable as used. keep_spare: make sure that one more slot has blocks, so
 * that a revert, which gives space back, still works when the pool is full.
 */
int layer_reserve(struct pcow_image *image, bool keep_spare, uint32_t *id, uint32_t *slot, struct pcow_error *error);

/* image/slabs.c: slabs in memory and in the file */
/* Reserve the tables; format 1 uses image->slabs with one entry for each guest slab. Freed by slabs_unload(). */
int slabs_reserve(struct pcow_image *image, uint64_t capacity);
int slabs_load(struct pcow_image *image, struct pcow_error *error);
void slabs_unload(struct pcow_image *image);
/* Take a free slab with an empty bitmap; it has no owner yet. Async-signal-safe. */
int slab_take(struct pcow_image *image, uint64_t *slab);
/*
 * Publish the owner of a taken slab (the commit point of an allocation). Async-signal-safe. lazily, here and below: in class
 * page-cache do not sync. An allocation may: whichever of owner and bitmap is lost in a host crash, the page reads as before
 * the store, which was not flushed. Moving a slab between layers may not.
 */
int slab_publish(struct pcow_image *image, uint64_t slab, struct owner owner, bool lazily);
/* Give a slab back: owner word cleared, blocks punched out; *freed grows by the blocks it had (estimated by valid pages). */
int slab_release(struct pcow_image *image, uint64_t slab, uint64_t *freed);
/* Replace the valid set (every word is a store of its own). Async-signal-safe. */
int slab_store_valid(struct pcow_image *image, uint64_t slab, const struct page_set *valid, bool lazily);
void slab_untake(struct pcow_image *image, uint64_t slab);

/* image/header.c */
int image_begin_change(struct pcow_image *image, struct pcow_error *error);
int header_store_word(struct pcow_image *image, size_t field, uint64_t value, struct pcow_error *error);
int header_write_copy(struct pcow_image *image, struct pcow_error *error);
int header_set_base(struct pcow_image *image, const struct base_record *record, struct pcow_error *error);
const struct base_record *image_base_record(const struct pcow_image *image);   /* NULL: no base */
/* Fill *record so that an image in the directory of base_path may stand on it; opens the base to look. */
int base_record_make(struct base_record *record, const char *image_path, const char *base_path, const char *base_snapshot,
                     bool unchecked, uint64_t *base_size, struct pcow_error *error);

/* A read-only image, or a format 1 one, may not be changed: -EROFS. */
int image_check_writable(const struct pcow_image *image, struct pcow_error *error);

#endif
