/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Checking and repairing one file, from its bytes and not through pcow_open(), which refuses what
 * is damaged. Each step finds what is wrong with one structure, says so, and puts it right in
 * memory, so that the next step does not stumble over it; with PCOW_CHECK_REPAIR it also puts it
 * right in the file, by the same kind of stores as every other update: a repair that is interrupted
 * is simply done again. What is dropped is noted before, alike with and without repair (lost.c): so
 * a pass without repair tells what one with repair will lose.
 */
#ifndef PCOW_CHECK_CHECK_H
#define PCOW_CHECK_CHECK_H

#include <stdio.h>

#include "image/image.h"

#define CHECK_MAX_TABLE (MAX_LAYERS / LAYER_TABLE_SLOTS + 1)

/*
 * A file slab that has an owner word; OWNER_NONE: it could not be used, or it was freed by this
 * check.
 */
struct check_slab {
    uint64_t slab;
    struct owner owner;
    bool summed;                          /* it had a checksum of data when it was found */
};

/* What of a layer record cannot be used. */
enum check_damage {
    DAMAGED_PARENT = 1 << 0,
    DAMAGED_SIZE = 1 << 1,
    DAMAGED_LIMIT = 1 << 2,
    DAMAGED_STATE_SIZE = 1 << 3,
    DAMAGED_NAME = 1 << 4,
    DAMAGED_ALL = (1 << 5) - 1,
};

/* A layer record whose id can be read; alive: see "Which layers are alive" in format.rst. */
struct check_layer {
    struct layer layer;
    unsigned damage;
    bool alive;
    /* not alive, if a damaged word said what it is taken for: that may be wrong */
    bool doubtful;
    bool rewrite;                         /* the record is to be written anew */
    uint64_t data_end, state_end;         /* by the slabs that it owns */
};

/*
 * Something that is lost, see lost.c. Pages of a file slab are one, however many ranges they are:
 * so the list is not longer than what the metadata names.
 */
struct check_loss {
    struct pcow_loss is;                  /* data: of the whole slab */
    enum pcow_certainty certainty;
    struct page_set pages;                /* data: which ones */
};

struct check {
    bool parents_lost;                    /* damaged words said what stands on what */
    struct file file;
    bool repair;
    bool intended;                        /* a repair is to follow */
    bool unlocked;                        /* somebody may be using the image */
    bool only_gone;                       /* nothing counts but that; no content is read for more */
    pcow_finding_fn finding;              /* NULL: nobody wants to know */
    pcow_loss_fn loss;                    /* the same */
    void *opaque;
    struct pcow_check_result *result;
    struct pcow_error *error;
    unsigned shown, hidden;               /* findings told, and those that were too many */

    struct header header;                 /* as it should be */
    bool ids_uncertain;                   /* next_layer_id was lost and comes from the copy */
    bool slots_uncertain;                 /* the same of layer_slots */
    bool generation_raised;
    bool drops_sums;                      /* words that checksums of data hang on are stored to */
    bool dropped_before;                  /* so has the pass before the repair, or would have */
    /* the image was sealed with checksums of all data; until the end, its header says so no more */
    bool all_summed;
    bool layers_unsummed;                 /* records said so of layers, and do no more */

    uint64_t slab_count;
    uint64_t length;                      /* of the file as it was found */
    struct check_slab *slabs;             /* by ascending slab */
    size_t count, capacity;
    uint64_t table[CHECK_MAX_TABLE + 1];  /* file slab of each layer table, 0: none */

    struct check_layer *layers;           /* by ascending id, one for each id */
    size_t layer_count, layer_capacity;
    /* records that hold something but whose id cannot be read */
    uint32_t *lost_slots;
    size_t lost_count;
    bool *slot_taken;
    uint32_t slot_limit;                  /* slots that have a place */

    struct check_loss *losses;
    size_t loss_count, loss_capacity;
    FILE *rescue;                         /* that keeps them; NULL: none */

    /* pages that are damaged in the file and known from the mirror: those are read instead */
    uint64_t *overlay;                    /* their offsets, ascending */
    size_t overlays, overlay_capacity;
    unsigned checksums_damaged;           /* words of the page of checksums that is looked at */
    /* slabs of which the mirror still tells what they held, and the metadata does not */
    uint64_t gone;
    /* pages of metadata, by mirror_bit(), that no checksum speaks for; NULL: none does for any */
    uint64_t *unproven;
    bool mirror_is_gone;                  /* of one group or more, with its checksums */
    bool has_no_tables;                   /* from the slab table on there is only a hole */
    bool is_cut;                          /* from within the mirror on there is only a hole */
};


/* Slabs are being moved: some have two places, which hold the same, until that is finished. */
static inline bool check_is_amending(const struct check *check)
{
    return word_value(check->header.state) & HEADER_AMENDING;
}

struct check_request {
    const char *path;
    unsigned flags;
    pcow_finding_fn finding;
    pcow_loss_fn loss;
    void *opaque;
    struct pcow_check_result *result;
    struct pcow_error *error;
    struct observer *observer;            /* of the repair, if it is one; NULL but in tests */
    /* another name of the file, for who holds it already: no lock on the image is taken; or NULL */
    const char *held;
    uint64_t *gone;                       /* see struct check; or NULL */
};

/* check.c: pcow_check_losses() */
int check_file(const struct check_request *request);

/* ---- lost.c: what is lost; to be noted before it is dropped ---------------------------------- */

int check_bitmap(struct check *check, uint64_t slab, struct page_set *valid);
/* Pages of a file slab. owner.kind other than data: nobody knows whose. */
int check_lose_pages(struct check *check, uint64_t slab, struct owner owner,
                     const struct page_set *pages, enum pcow_certainty certainty);
/* All that is valid of a file slab. */
int check_lose_slab(struct check *check, uint64_t slab, struct owner owner);
/* Pieces of VM state, from first to end - 1. slab: that the only one is in, 0: they are gone. */
int check_lose_state(struct check *check, const struct check_layer *found, uint64_t first,
                     uint64_t end, uint64_t slab);
/* What a layer record said. layer, offset: 0 if not known. */
int check_lose_record(struct check *check, uint32_t layer, uint64_t record_offset);
/* Something, and nothing tells how much. */
int check_lose_unknown(struct check *check);
/* The pages of a file slab that hold anything but zeros. */
void check_content(const struct check *check, uint64_t slab, struct page_set *pages);
/* Where the content lies from offset on, as far as it is there. */
void check_find_content(const struct check *check, struct pcow_loss *loss, uint64_t offset,
                        uint64_t length);

/* ---- lost_told.c: at the end, when it is known which layers are alive ------------------------ */

/* Leave out what nobody could read; count and tell the rest, range by range. */
void check_tell_losses(struct check *check);
/* The range of a loss from this page on, and the page behind it. False: there are no more. */
bool check_next_range(const struct check *check, const struct check_loss *loss, unsigned *page,
                      struct pcow_loss *range);
/* The name of the snapshot that a layer is; NULL: it is none, or not known. */
const char *check_snapshot_name(const struct check *check, uint32_t layer);

/* ---- rescue.c: keeping what is dropped ------------------------------------------------------- */

/*
 * Write all losses to a file beside the image, and have it on the medium. Its suffix goes to the
 * result. / When the repair is done: say so in it.
 */
int check_keep_losses(struct check *check);
int check_end_rescue(struct check *check);

/* ---- report.c: findings, reading, writing ---------------------------------------------------- */

/*
 * Damage. repairable: it is (being) put right; the message says so, and it counts as fixed in
 * repair mode.
 */
void check_corruption(struct check *check, bool repairable, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void check_leak(struct check *check, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A leak, or data that nothing refers to any more. */
enum check_doubt {
    DOUBT_NONE,                           /* a killed writer leaves that */
    DOUBT_UNFLUSHED,                      /* where the file lies, each host crash does */
    DOUBT_LOST,
};
void check_doubtful(struct check *check, enum check_doubt doubt, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void check_note(struct check *check, const char *format, ...) __attribute__((format(printf, 2, 3)));
void check_end_of_findings(struct check *check);

/* Read metadata; what lies behind the end of file reads as zeros. */
int check_read(struct check *check, uint64_t offset, void *buffer, size_t length);
/*
 * From now on check_read() gives what the mirror has for a page of metadata (4 KiB), which lies
 * behind the one before. 0 or -ENOMEM.
 */
int check_overlay(struct check *check, uint64_t offset);
/* Without repair, these change nothing and return 0. Blocks are allocated first. */
int check_store64(struct check *check, uint64_t offset, uint64_t word);
int check_store(struct check *check, uint64_t offset, const void *from, size_t length);
int check_punch(struct check *check, uint64_t offset, uint64_t length);
/* To be called before the first change after which the guest could read something else. */
int check_raise_generation(struct check *check);
/* Store a word of the header. */
int check_set_header_word(struct check *check, size_t field, uint64_t value);

/* ---- mirror.c -------------------------------------------------------------------------------- */

int check_mirror(struct check *check);
/* After check_length(). */
int check_cut_mirror(struct check *check);

/* ---- proven.c -------------------------------------------------------------------------------- */

/*
 * Is what the metadata at an offset says what its last writer knew of it? Not of a page that a
 * writer which was killed had changed, of one of which no two copies agree, or without a mirror.
 */
bool check_is_proven(const struct check *check, uint64_t offset);
/*
 * What the mirror has of before, where the metadata is not proven: does it name pages of a slab,
 * whose owner is still the same? / an owner of data?
 */
bool check_had_pages(struct check *check, uint64_t slab);
bool check_had_owner(const struct check *check, uint64_t slab, struct owner *owner);
/* A page of metadata of a group is not. */
void check_set_unproven(struct check *check, uint64_t group, unsigned page);

/* ---- data.c ---------------------------------------------------------------------------------- */

/* What is repaired from now on loses its checksum of data. */
int check_datasums(struct check *check);
int check_datasums_of_nobody(struct check *check);
/* At the end: if one is gone of what is still owned, nobody shall miss it for ever. */
int check_all_summed(struct check *check);

/* ---- header.c -------------------------------------------------------------------------------- */

int check_header(struct check *check);
/* Its magic number, version, sizes and checksum; the words are not looked at. */
bool header_fixed_is_good(const struct header *header);
/* At the end, when the words are settled. */
int check_header_copy(struct check *check);

/* ---- owners.c -------------------------------------------------------------------------------- */

int check_length(struct check *check);
int check_owners(struct check *check);
int check_add_slab(struct check *check, uint64_t slab, struct owner owner);
/*
 * Free a file slab: store an owner word of 0, then punch. lost: whose its valid pages are, which are
 * given up; NULL: nobody's.
 */
int check_free_slab(struct check *check, uint64_t slab, const struct owner *lost);
/* The same for one of the list, which is marked OWNER_NONE. */
int check_drop_slab(struct check *check, struct check_slab *slab, const struct owner *lost);

/* ---- records.c: layer records as they are read and written ----------------------------------- */

int check_records(struct check *check);
struct check_layer *check_find_layer(const struct check *check, uint32_t id);
/* At the end of the list; call check_sort_layers() before the next search. -ENOMEM. */
int check_add_layer(struct check *check, const struct check_layer *layer);
void check_sort_layers(struct check *check);
/* Decode what is usable of a record; returns what is not. */
unsigned check_decode(const struct layer_record *record, uint32_t slot, struct layer *layer);
uint64_t check_record_offset(const struct check *check, uint32_t slot);
int check_write_record(struct check *check, const struct layer *layer);
/* The first slot that nothing uses, marked as used; -ENOSPC. */
int check_take_slot(struct check *check, uint32_t *slot);

/* ---- rebuild.c: layers that must exist but have no record; the active layer ------------------ */

int check_rebuild(struct check *check);

/* ---- tree.c: which layers are alive, and the fields of their records ------------------------- */

int check_tree(struct check *check);

/* ---- slabs.c --------------------------------------------------------------------------------- */

int check_dead_slabs(struct check *check);
int check_empty_slabs(struct check *check);
int check_overlaps(struct check *check);
/* Slabs of one kind, by owner; the caller frees the list. */
int check_sort_by_owner(struct check *check, enum owner_kind kind, struct check_slab ***sorted,
                        size_t *count);

/* ---- state.c, free.c ------------------------------------------------------------------------- */

int check_state(struct check *check);
int check_free_blocks(struct check *check);

#endif
