/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An open image in memory: the header, the layers, and for every slab of the file who owns it and
 * which pages are valid. These copies in DRAM are what everything looks at; a change goes to the
 * file first, in the order that the format specification gives, and then here.
 */
#ifndef PCOW_IMAGE_IMAGE_H
#define PCOW_IMAGE_IMAGE_H

#include <sys/types.h>

#include "format/format2.h"
#include "image/file.h"
#include "image/store.h"

struct format1;
struct chain;
struct prepared_ring;
struct spare;
struct layer_names;
struct state_index;

struct layer {
    uint32_t id, parent;              /* parent 0: none */
    uint32_t slot;                    /* of its record */
    enum layer_state state;
    unsigned flags, sequence;
    uint64_t virtual_size, parent_limit, state_size;
    uint32_t frozen_for;              /* id: that was put on it then, by this writer */
    int64_t date_seconds;
    uint32_t date_nanoseconds;
    char name[PCOW_SNAPSHOT_NAME_SIZE];
};

/*
 * A file slab: its owner, and the next older file slab for the same guest slab in the chain (see
 * chain/chain.h).
 */
struct slab {
    uint64_t next;                    /* slab_ref, 0: none */
    uint32_t layer;                   /* 0 if free */
    uint32_t number : 30;             /* guest slab, piece or table */
    uint32_t kind : 2;                /* enum owner_kind */
};

/*
 * Layer, number and kind are next to each other and change with one store, so that who looks
 * without a claim sees one owner.
 */
typedef uint64_t __attribute__((may_alias)) owner_word;

_Static_assert(offsetof(struct slab, layer) % 8 == 0
                   && sizeof(struct slab) == offsetof(struct slab, layer) + 8,
               "one word");

/* See snapshot/making.h, whose this is. */
enum making_step {
    MAKING_NONE,
    MAKING_RESERVED,
    MAKING_RECORDED,
    MAKING_FROZEN,
    MAKING_MARKED,
    MAKING_ABANDONED,
};

struct making {
    enum making_step step;
    uint64_t stored;                  /* of image_note_stores(), what the step has stored */
    uint32_t layer;                   /* that becomes a snapshot */
    struct layer next;                /* on it: id, slot, parent and sizes */
    /* what it is made of: a name and a date */
    struct layer wanted;
    uint64_t prepared_ns;             /* when it was, by the monotonic clock */
};

struct pcow_image {
    struct file file;
    pid_t process;                    /* that opened it, see image_is_inherited() */
    int directory;                    /* where it lies, and its base */
    /* that is not certain: who stands on it may lie in another one */
    bool elsewhere;
    unsigned open_flags;
    struct header header;             /* as in the file, kept current */
    struct header header_copy;        /* the copy of it, if this writer has stored it */
    bool header_copied;
    struct layer *layers;             /* alive ones, by ascending id */
    size_t layer_count, layer_capacity;
    struct layer_names *names;        /* of snapshots; built on first use, see names.c */
    /* of the VM state that was asked for last; NULL: none, see snapshot/state.c */
    struct state_index *state;
    uint64_t slot_used[MAX_LAYERS / 64]; /* one bit a record slot: holds a layer of the list */
    /* slot + 1 of the old record that an interrupted or failed rename left; 0: none */
    uint32_t stale_record;
    struct making making;             /* of a snapshot */
    /*
     * id: hidden layer of which slabs became, or are becoming, the active layer's one by one; 0:
     * none. Atomic
     */
    uint32_t merging;
    bool freed_records;               /* there were records that are free and tell of a layer */
    uint32_t view;                    /* layer that is seen: the active one, or a snapshot */
    uint64_t size;                    /* virtual size of the view */
    bool changed;                     /* generation was raised by this writer */
    bool finished;                    /* all that pcow_close() does to the file */

    /*
     * Indexed by file slab. Writers reserve address space for the largest file, so that the fault
     * path never allocates.
     */
    /* entries that may be in use (end of file at open for readers) */
    uint64_t slab_count;
    struct slab *slabs;
    struct page_set *valid;
    uint64_t *used;                   /* one bit a slab: taken */
    /*
     * writers: pages whose blocks are known to be there, with zeros until they are valid; see
     * prepare.h
     */
    struct page_set *prepared;
    struct prepared_ring *ready;      /* prepared slabs; NULL: not mapped for writing */
    struct spare *spare;              /* for a last snapshot, see spare.h; NULL: none; atomic */
    /* writers: one bit a slab whose blocks are to be given back, see remains.h */
    uint64_t *remains;
    uint64_t remains_size;            /* bytes that were left so since it was opened; grows only */
    bool remains_found;               /* what a former writer may have left is marked; atomic */
    bool remains_due;                 /* a bit was set since a round through all began */
    /* where a round goes on that is made in steps, by one thread, */
    uint64_t remains_next;
    uint64_t remains_left;            /* and over how many slabs still */
    int remains_error;                /* why some could not be given back */
    /* failures after which the metadata was written once more; atomic, see store_again.c */
    uint64_t stored_again;
    uint64_t stores, synced;          /* see image_note_stores(); atomic */
    /* writers: every table was loaded, so a slab without an owner is free */
    bool complete;
    /* one bit for each 64 slabs: the pages of their owner words and bitmaps have blocks */
    uint64_t *tables_ready;
    /* writers: one bit a slab: every valid page is known to have a block, see slab_back() */
    uint64_t *backed;
    /*
     * writers, class page-cache: one bit a slab: a page of it may have been mapped for stores since
     * it became the active layer's, see remains.h
     */
    uint64_t *stored;
    uint64_t slab_capacity;
    /* entries of slabs, valid and prepared that may be accessed; grows only */
    uint64_t slabs_reached;
    /* a free slab below may hold blocks of an interrupted operation */
    uint64_t slabs_at_open;
    uint64_t free_hint;               /* no free slab below; a hint */
    uint64_t table[MAX_LAYER_TABLE + 1]; /* file slab of each further layer table, 0: none */

    struct format1 *format1;          /* not NULL: a format 1 file, read-only */
    struct pcow_image *base;
    struct chain *chain;              /* built on first use, see chain_get() */
    pcow_map *map;
};

/* The layer that takes stores. */
static inline uint32_t image_active(const struct pcow_image *image)
{
    return (uint32_t)word_value(image->header.active_layer);
}

/* image/layers.c: layers in memory and in the file; layers_load.c reads them */
/*
 * Before a writer frees the slabs of layers that are not alive: a deletion leaves a record that
 * tells of it, until the slabs are free. Slabs whose layer has no record at all are of a snapshot
 * whose record a media error took: -EBADMSG.
 */
int layers_check_owners(const struct pcow_image *image, struct pcow_error *error);
/*
 * Versions before this check left a record that tells of a deletion of each snapshot that they
 * renamed, and that lives.
 */
int layers_clear_outdated(struct pcow_image *image, struct pcow_error *error);
struct layer *layer_find(const struct pcow_image *image, uint32_t id);
unsigned layer_children(const struct pcow_image *image, uint32_t id, uint32_t *only_child);
bool layers_make_room(struct pcow_image *image);     /* for one more in the list */
struct layer *layer_insert(struct pcow_image *image, const struct layer *layer);
void layer_remove(struct pcow_image *image, uint32_t id);
/*
 * Keep the record of a removed layer until the next writer: it still owns slabs, and an owner
 * without any record counts as damage.
 */
void layer_hold_slot(struct pcow_image *image, uint32_t slot);
/* No layer was put there after all. */
void layer_let_slot_go(struct pcow_image *image, uint32_t slot);
/* A layer has another record now. */
void layer_move(struct pcow_image *image, struct layer *layer, uint32_t slot);
/* 0: no such slot */
uint64_t layer_record_offset(const struct pcow_image *image, uint32_t slot);
int layers_load(struct pcow_image *image, struct pcow_error *error);
/* What a record says; -EBADMSG if that cannot be. Of a free one only its words are looked at. */
int layer_decode(const struct pcow_image *image, const struct layer_record *record, uint32_t slot,
                 struct layer *layer, struct pcow_error *error);
/* Write the whole record of a layer (state word last, as its commit). */
int layer_write_record(struct pcow_image *image, const struct layer *layer, bool lazily,
                       struct pcow_error *error);
/* Lazily, as the next one. */
int layer_write_description(struct pcow_image *image, const struct layer *layer,
                            struct pcow_error *error);
int layer_store_state_lazily(struct pcow_image *image, const struct layer *layer,
                             struct pcow_error *error);
int layer_store_state(struct pcow_image *image, const struct layer *layer,
                      struct pcow_error *error);
int layer_store_word(struct pcow_image *image, const struct layer *layer, size_t field,
                     uint64_t value, struct pcow_error *error);
/*
 * A new id and a record slot whose blocks exist, both durable as used, if not lazily; the first
 * change of the image if there was none yet. keep_spare: make sure that one more slot has blocks,
 * so that a revert, which gives space back, still works when the pool is full.
 */
int layer_reserve(struct pcow_image *image, bool keep_spare, bool lazily, uint32_t *id,
                  uint32_t *slot, struct pcow_error *error);

/*
 * So many free slots have blocks, of those that need no further table: 0, -ENOSPC and others.
 * Nobody changes layers meanwhile.
 */
int layer_allocate_spare(struct pcow_image *image, unsigned count);

/*
 * image/names.c: a snapshot by its name; to be told when a layer becomes one, and before it is none
 * any more or is renamed
 */
struct layer *layer_find_name(struct pcow_image *image, const char *name);
/* Returns -ENOENT; *error has the nearest name that there is. */
int layer_name_unknown(const struct pcow_image *image, const char *name, struct pcow_error *error);
void layer_name_add(struct pcow_image *image, const struct layer *layer);
void layer_name_remove(struct pcow_image *image, const struct layer *layer);
void layer_names_free(struct pcow_image *image);

/* Of bitmaps; a page of owner words has more. */
#define SLABS_PER_TABLE_PAGE (PCOW_PAGE_SIZE / sizeof(struct page_set))

/* image/slabs.c: slabs in memory and in the file; slabs_load.c reads them */
static inline uint64_t slab_bit(uint64_t slab)      /* in its word of one bit a slab */
{
    return UINT64_C(1) << (slab % 64);
}

static inline uint64_t image_slab_count(const struct pcow_image *image)
{
    return __atomic_load_n(&image->slab_count, __ATOMIC_ACQUIRE);
}

/*
 * Reserve the tables, of which the first entries can be used; format 1 uses image->slabs with one
 * for each guest slab. Freed by slabs_unload().
 */
int slabs_reserve(struct pcow_image *image, uint64_t capacity, uint64_t reached);
/* Those of this slab can be used, too: 0 or -ENOMEM. Async-signal-safe. */
int slabs_reach(struct pcow_image *image, uint64_t slab);
int slabs_load(struct pcow_image *image, struct pcow_error *error);
void slabs_unload(struct pcow_image *image);
/*
 * Take a free slab with an empty bitmap and without blocks; it has no owner yet. Async-signal-safe.
 */
int slab_take(struct pcow_image *image, uint64_t *slab);
/*
 * The same, and the owner word relies on an end of file and a hole that are not on the medium yet:
 * file_settle() comes before slab_publish(). Who finds no space for the data has synced nothing.
 */
int slab_take_unsettled(struct pcow_image *image, uint64_t *slab);
/*
 * Its owner word and its bitmap are stored through a mapping, and their pages get blocks before,
 * once: 0 or -ENOSPC. Of a slab that was taken they have some; whoever is about to change another
 * one may ask for them while nothing has changed yet. Async-signal-safe.
 */
int slab_allocate_tables(struct pcow_image *image, uint64_t slab);
/* They have some, or nothing was stored there since the image was opened. */
static inline bool slab_has_tables(const struct pcow_image *image, uint64_t slab)
{
    uint64_t page = slab / SLABS_PER_TABLE_PAGE;

    return __atomic_load_n(&image->tables_ready[page / 64], __ATOMIC_ACQUIRE) >> page % 64 & 1;
}
/*
 * Publish the owner of a taken slab (the commit point of an allocation). Async-signal-safe. lazily,
 * here and below: in class page-cache do not sync. An allocation may: whichever of owner and bitmap
 * is lost in a host crash, the page reads as before the store, which was not flushed. Moving a slab
 * between layers may not.
 */
int slab_publish(struct pcow_image *image, uint64_t slab, struct owner owner, bool lazily);
/*
 * Slabs of the range [1, slab count) for which it is true become free: their owner words are
 * cleared, and durable together. Their blocks are left, see remains.h. On failure those of the
 * group that failed keep their owners; a crash before the next flush may still free them.
 */
typedef bool slab_condition(const struct pcow_image *image, const struct slab *slab,
                            const void *opaque);
/*
 * hold: called around the moment in which a slab with data of a guest slab becomes free, so that
 * nobody punches out its pages then who has seen whose it was: somebody may take it at once.
 */
typedef void slab_hold(struct pcow_image *image, uint64_t guest_slab, bool begin);
int slabs_release(struct pcow_image *image, slab_condition *condition, const void *opaque,
                  slab_hold *hold);
/* Replace the valid set (every word is a store of its own). Async-signal-safe. */
int slab_store_valid(struct pcow_image *image, uint64_t slab, const struct page_set *valid,
                     bool lazily);
void slab_untake(struct pcow_image *image, uint64_t slab);
/*
 * Layer, number and kind of a slab of which it is not certain that no trap changes its owner now;
 * next is not given. Async-signal-safe.
 */
static inline struct slab slab_peek(const struct pcow_image *image, uint64_t slab)
{
    struct slab peeked = {0};

    *(owner_word *)&peeked.layer =
        __atomic_load_n((const owner_word *)&image->slabs[slab].layer, __ATOMIC_ACQUIRE);
    return peeked;
}
/*
 * Whether it holds data of this guest slab. Under that one's claim the answer stays true.
 * Async-signal-safe.
 */
static inline bool slab_holds(const struct pcow_image *image, uint64_t slab, uint64_t guest_slab)
{
    struct slab owner = slab_peek(image, slab);

    return owner.kind == OWNER_DATA && owner.number == guest_slab;
}
/*
 * Whether it is of this kind and layer; of the active layer there may be more of them the next
 * moment.
 */
static inline bool slab_is_of(const struct pcow_image *image, uint64_t slab, enum owner_kind kind,
                              uint32_t layer)
{
    struct slab owner = slab_peek(image, slab);

    return owner.kind == kind && owner.layer == layer;
}
/* Its blocks may be gone, or hold something: nothing is known of them any more. */
void slab_forget_prepared(struct pcow_image *image, uint64_t slab);
/*
 * A valid page need not have a block: it was zeroed, or the file was copied by a tool that leaves
 * out zeros. A store to it through a mapping would take one, and a full pool then is SIGBUS, or,
 * under KVM, a vCPU that tries for ever. So nothing is mapped for stores before this has given the
 * valid pages [first, first + count) blocks. With all 512 of them, the slab is backed from then on.
 * -ENOSPC: not all have one. The claim of its guest slab is held. Async-signal-safe.
 */
int slab_back(struct pcow_image *image, uint64_t slab, unsigned first, unsigned count);
/* It is backed, as one that holds nothing is: no page becomes valid without a block. */
static inline void slab_begin_backed(struct pcow_image *image, uint64_t slab)
{
    __atomic_fetch_or(&image->backed[slab / 64], slab_bit(slab), __ATOMIC_RELEASE);
    __atomic_fetch_or(&image->stored[slab / 64], slab_bit(slab), __ATOMIC_RELEASE);
}
bool slab_is_backed(const struct pcow_image *image, uint64_t slab);
/* Blocks of valid pages were punched out. */
void slab_forget_backed(struct pcow_image *image, uint64_t slab);
/*
 * A slab that is about to become the active layer's, and of which nothing is mapped for stores, has
 * remains: in class page-cache they are given back before the first store to it, and it does not
 * count as backed until then.
 */
void slab_forget_stored(struct pcow_image *image, uint64_t slab);

/* image/header.c */
/* Before any store to the metadata: it gets blocks of its own. By image_begin_change() as well. */
int image_unshare(struct pcow_image *image, struct pcow_error *error);
int image_begin_change(struct pcow_image *image, struct pcow_error *error);
int header_store_word(struct pcow_image *image, size_t field, uint64_t value,
                      struct pcow_error *error);
/* In class page-cache it is left to the next flush, see image_note_stores(). */
int header_store_word_lazily(struct pcow_image *image, size_t field, uint64_t value,
                             struct pcow_error *error);
/* So that the next store to it need not wait for the file system, see file_touch(). */
int header_touch(struct pcow_image *image, struct pcow_error *error);
int header_write_copy(struct pcow_image *image, struct pcow_error *error);
int header_set_base(struct pcow_image *image, const struct base_record *record,
                    struct pcow_error *error);
const struct base_record *image_base_record(const struct pcow_image *image);   /* NULL: no base */
static inline bool image_copies_on_read(const struct pcow_image *image)
{
    return word_value(image->header.state) & HEADER_COPY_ON_READ;
}

/*
 * image/store_again.c: file_sync() of what was stored lazily as well, though an earlier sync may
 * have failed. For all who rely on more than they have just written. Async-signal-safe.
 */
int image_sync(struct pcow_image *image);
/* The same, with what a guest has stored through a map: in class pmem, too. Async-signal-safe. */
int image_sync_stores(struct pcow_image *image);
/* Something failed since: a sync of a part, or one by hand, is not enough. */
bool image_must_store_again(const struct pcow_image *image);
/*
 * Stores were made, or may have been, that nobody could find to flush them by themselves: the next
 * flush is one of all. Gives how many times that was so by now. Async-signal-safe.
 */
uint64_t image_note_stores(struct pcow_image *image);
uint64_t image_stores(const struct pcow_image *image);
/* Is what was noted up to there on the medium? */
bool image_is_synced(const struct pcow_image *image, uint64_t stores);

/*
 * In a child of the process that opened it: it shares the file and the lock, and knows nothing of
 * what its parent does to them.
 */
bool image_is_inherited(const struct pcow_image *image);
/* -EPERM */
int image_error_inherited(const struct pcow_image *image, struct pcow_error *error);
/*
 * A read-only image, or a format 1 one, may not be changed: -EROFS; nor one that was inherited:
 * -EPERM.
 */
int image_check_writable(const struct pcow_image *image, struct pcow_error *error);

#endif
