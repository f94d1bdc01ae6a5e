/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The tree of layers inside one file: putting a new layer on another, and taking hidden ones out.
 */
#ifndef PCOW_SNAPSHOT_TREE_H
#define PCOW_SNAPSHOT_TREE_H

#include "image/image.h"

/* The snapshot of this name, or NULL with *error set to -ENOENT. */
struct layer *snapshot_find(struct pcow_image *image, const char *name, struct pcow_error *error);

/*
 * What a crash may have left: see "Which layers are alive" in format.rst. Reading needs none of it.
 */
int tree_finish_interrupted(struct pcow_image *image, struct pcow_error *error);
/* Of it, the old record of a rename, which must be gone before its layer can be deleted. */
int tree_free_stale_record(struct pcow_image *image, struct pcow_error *error);

/*
 * Of these three, lazily: in class page-cache what they store is left to the next flush.
 *
 * layer_reserve(), and on a full pool what earlier operations have left is given back first.
 */
int tree_reserve_layer(struct pcow_image *image, bool keep_spare, bool lazily, uint32_t *id,
                       uint32_t *slot, struct pcow_error *error);
/*
 * Write the record of a layer on parent, whose id and slot were reserved; the other fields are
 * filled in.
 */
int tree_record_layer(struct pcow_image *image, struct layer *reserved, uint32_t parent,
                      uint64_t virtual_size, bool lazily, struct pcow_error *error);
/* Make a layer with a record the active one: the commit of create and revert. */
int tree_put_active(struct pcow_image *image, const struct layer *recorded, bool lazily,
                    struct pcow_error *error);

/*
 * If this layer is hidden, free or merge it if that is possible, and then its parent. Of very many
 * only some: the others wait for the next open.
 */
int tree_collapse(struct pcow_image *image, uint32_t id, struct pcow_error *error);

/*
 * What is known of VM state is to be looked for anew: slabs of it have gone, or the image is
 * closed.
 */
void state_forget(struct pcow_image *image);

/* Give every slab of a layer back. */
int tree_release_layer(struct pcow_image *image, uint32_t id, enum owner_kind kind,
                       struct pcow_error *error);

#endif
