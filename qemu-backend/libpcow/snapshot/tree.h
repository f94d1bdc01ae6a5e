/* SPDX-License-Identifier: BSD-3-Clause */
/* The tree of layers inside one file: putting a new layer on another, and taking hidden ones out. */
#ifndef PCOW_SNAPSHOT_TREE_H
#define PCOW_SNAPSHOT_TREE_H

#include "image/image.h"

/* What a crash may have left: see "Which layers are alive" in format.rst. Reading needs none of it. */
int tree_finish_interrupted(struct pcow_image *image, struct pcow_error *error);

/* Make a new layer on parent (0: on nothing) and make it the active one: the commit point of create and revert. */
int tree_put_active(struct pcow_image *image, uint32_t parent, uint64_t virtual_size, bool keep_spare, struct pcow_error *error);

/* Free or merge hidden layers as far as possible; *freed grows by the bytes given back. */
int tree_collapse(struct pcow_image *image, uint64_t *freed, struct pcow_error *error);

/* Give every slab of a layer back. */
int tree_release_layer(struct pcow_image *image, uint32_t id, enum owner_kind kind, uint64_t *freed, struct pcow_error *error);

#endif
