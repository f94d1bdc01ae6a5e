/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Sizes of snapshots, for all of them at once. The layers are numbered in the order of a walk
 * through their tree, so that "is an ancestor of" is a comparison of numbers. Then guest slab by
 * guest slab the layers that hold pages of it are gone through in that order, with a stack of the
 * ancestors of the present one: what a layer sees differs from what its parent sees only where it
 * holds pages itself, or where its parent_limit cuts something off. Time: sorting of the slabs; the
 * depth of the tree does not matter. A file made to hold up who lists it may have thousands of
 * layers that cut something off, in each of thousands of guest slabs: then nothing counts as cut.
 */
#include "snapshot/sizes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct node {
    const struct layer *layer;
    size_t parent;                     /* NONE: none */
    size_t first, end;                 /* numbers of the subtree in the walk, its own first */
    size_t next;                       /* number for the next child; while they are given out */
    size_t children, child[2];         /* the first two */
    /* guest slabs at or above it are empty in what the layer sees */
    uint64_t reach;
    uint64_t own, own_seen, state;     /* pages; pages below the layer's end; bytes of VM state */
    int64_t gained;                    /* pages seen more than by the parent */
    uint64_t seen;
    uint64_t shadowed[2];              /* own pages that the first and the second child hold too */
};

#define NONE SIZE_MAX
/* Guest slabs times layers that may cut something off there: some seconds. */
#define MOST_CUTS (UINT64_C(1) << 24)

/* A file slab, by guest slab and number of its layer in the walk. */
struct entry {
    uint64_t guest_slab, slab;
    size_t node, number;
};

/* All that one layer holds of one guest slab. */
struct piece {
    struct page_set own, seen;
    size_t node, number;
    bool cut;                          /* nothing shows through from the parent */
};

struct sizes {
    const struct pcow_image *image;
    struct node *node;                 /* as image->layers */
    uint64_t slab_count;               /* a guest that runs may raise the image's */
    struct entry *entry;
    size_t entries;
    struct piece *piece;               /* of the guest slab that is looked at */
    size_t pieces;
    size_t *stack;                     /* of pieces */
    size_t *cutting;                   /* nodes that may cut something off */
    size_t cuttings;
};

static uint64_t limit_of(const struct layer *layer)
{
    return (layer->parent_limit < layer->virtual_size ? layer->parent_limit : layer->virtual_size)
           >> SLAB_BITS;
}

/* Parents have lower ids than their children (checked at load), so one pass down and one up do. */
static void number_nodes(struct sizes *sizes)
{
    size_t count = sizes->image->layer_count, next_root = 0;

    for (size_t i = 0; i < count; i++) {
        const struct layer *layer = &sizes->image->layers[i];
        const struct layer *parent = layer->parent ? layer_find(sizes->image, layer->parent) : NULL;

        sizes->node[i] =
            (struct node){.layer = layer,
                          .parent = parent ? (size_t)(parent - sizes->image->layers) : NONE,
                          .end = 1};
        if (parent) {
            struct node *above = &sizes->node[sizes->node[i].parent];

            if (above->children < 2)
                above->child[above->children] = i;
            above->children++;
        }
    }
    /* end: the size of the subtree, for now */
    for (size_t i = count; i-- > 0;)
        if (sizes->node[i].parent != NONE)
            sizes->node[sizes->node[i].parent].end += sizes->node[i].end;
    for (size_t i = 0; i < count; i++) {
        struct node *node = &sizes->node[i];
        size_t *next = node->parent != NONE ? &sizes->node[node->parent].next : &next_root;

        node->first = *next;
        *next += node->end;
        node->end += node->first;
        node->next = node->first + 1;
    }
}

static int by_place(const void *left, const void *right)
{
    const struct entry *a = left, *b = right;

    if (a->guest_slab != b->guest_slab)
        return a->guest_slab < b->guest_slab ? -1 : 1;
    return a->number < b->number ? -1 : a->number > b->number;
}

static void collect(struct sizes *sizes)
{
    const struct pcow_image *image = sizes->image;

    for (uint64_t p = 1; p < sizes->slab_count; p++) {
        const struct slab slab = slab_peek(image, p);
        const struct layer *layer = slab.kind == OWNER_DATA ? layer_find(image, slab.layer) : NULL;
        struct node *node;

        if (!layer)
            continue;
        node = &sizes->node[layer - image->layers];
        node->own += page_set_count(&image->valid[p]);
        if (slab.number >= node->reach)
            node->reach = slab.number + UINT64_C(1);
        sizes->entry[sizes->entries++] =
            (struct entry){slab.number, p, (size_t)(layer - image->layers), node->first};
    }
    qsort(sizes->entry, sizes->entries, sizeof *sizes->entry, by_place);
}

/* Layers whose limit lies below what their parent sees. Few: a shrink makes one. */
static void find_cutting(struct sizes *sizes)
{
    for (size_t i = 0; i < sizes->image->layer_count; i++) {
        struct node *node = &sizes->node[i];
        uint64_t limit = limit_of(node->layer),
                 above = node->parent != NONE ? sizes->node[node->parent].reach : 0;

        if (limit < above) {
            sizes->cutting[sizes->cuttings++] = i;
            above = limit;
        }
        if (node->reach > node->layer->virtual_size >> SLAB_BITS)
            node->reach = node->layer->virtual_size >> SLAB_BITS;
        if (node->reach < above)
            node->reach = above;
    }
}

static int by_number(const void *left, const void *right)
{
    const struct piece *a = left, *b = right;

    return a->number < b->number ? -1 : a->number > b->number;
}

static struct piece *find_piece(struct sizes *sizes, size_t node)
{
    struct piece key = {.number = sizes->node[node].first};

    return sizes->pieces ? bsearch(&key, sizes->piece, sizes->pieces, sizeof key, by_number) : NULL;
}

static struct piece *add_piece(struct sizes *sizes, size_t node)
{
    struct piece *piece = &sizes->piece[sizes->pieces++];

    memset(piece, 0, sizeof *piece);
    piece->node = node;
    piece->number = sizes->node[node].first;
    return piece;
}

/* The pieces of one guest slab in order; returns the first entry of the next guest slab. */
static size_t take_slab(struct sizes *sizes, size_t from)
{
    uint64_t guest_slab = sizes->entry[from].guest_slab;
    size_t held;

    sizes->pieces = 0;
    for (; from < sizes->entries && sizes->entry[from].guest_slab == guest_slab; from++) {
        const struct entry *entry = &sizes->entry[from];
        struct piece *piece = sizes->pieces ? &sizes->piece[sizes->pieces - 1] : NULL;

        if (!piece || piece->node != entry->node)
            piece = add_piece(sizes, entry->node);
        for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
            piece->own.word[w] |= page_set_word(&sizes->image->valid[entry->slab], w);
    }
    held = sizes->pieces;
    for (size_t i = 0; i < sizes->cuttings; i++) {
        const struct piece *piece;
        size_t all = sizes->pieces;

        if (limit_of(sizes->node[sizes->cutting[i]].layer) > guest_slab)
            continue;
        sizes->pieces = held;              /* those are in order */
        piece = find_piece(sizes, sizes->cutting[i]);
        sizes->pieces = all;
        (piece ? &sizes->piece[piece - sizes->piece] : add_piece(sizes, sizes->cutting[i]))->cut =
            true;
    }
    if (sizes->pieces > held)
        qsort(sizes->piece, sizes->pieces, sizeof *sizes->piece, by_number);
    return from;
}

/* What each layer sees of the guest slab, against its parent. */
static void see_slab(struct sizes *sizes, uint64_t guest_slab)
{
    size_t depth = 0;

    for (size_t i = 0; i < sizes->pieces; i++) {
        struct piece *piece = &sizes->piece[i];
        struct node *node = &sizes->node[piece->node];
        const struct page_set *above = NULL;

        while (depth > 0
               && sizes->node[sizes->piece[sizes->stack[depth - 1]].node].end <= piece->number)
            depth--;
        if (depth > 0)
            above = &sizes->piece[sizes->stack[depth - 1]].seen;
        /* What a shrink has left above the end of its own layer is never seen again. */
        if (guest_slab < node->layer->virtual_size >> SLAB_BITS) {
            piece->seen = piece->own;
            node->own_seen += page_set_count(&piece->own);
        }
        if (above && !piece->cut)
            for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
                piece->seen.word[w] |= above->word[w];
        node->gained +=
            (int64_t)page_set_count(&piece->seen) - (above ? (int64_t)page_set_count(above) : 0);
        sizes->stack[depth++] = i;
    }
}

/* Pages of one that another holds too. */
static unsigned count_both(const struct page_set *one, const struct page_set *other)
{
    struct page_set both;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        both.word[w] = one->word[w] & other->word[w];
    return page_set_count(&both);
}

/* What a merge of a layer into a child would drop: as give_slab() in tree.c does. */
static void shadow_slab(struct sizes *sizes, uint64_t guest_slab)
{
    for (size_t i = 0; i < sizes->pieces; i++) {
        const struct piece *piece = &sizes->piece[i];
        struct node *node = &sizes->node[piece->node];
        bool hidden = node->layer->state == LAYER_HIDDEN;

        if (node->children != (hidden ? 2 : 1))
            continue;
        for (size_t c = 0; c < node->children; c++) {
            const struct piece *child = find_piece(sizes, node->child[c]);

            if (guest_slab << SLAB_BITS >= sizes->node[node->child[c]].layer->parent_limit)
                node->shadowed[c] += page_set_count(&piece->own);
            else if (child)
                node->shadowed[c] += count_both(&piece->own, &child->own);
        }
    }
}

static uint64_t pages_freed(const struct sizes *sizes, size_t index)
{
    const struct node *node = &sizes->node[index], *above;

    if (node->children > 1)
        return 0;                          /* hidden, it goes on to serve its children */
    if (node->children == 1)
        return node->shadowed[0];
    /* A hidden parent that is left with one child is merged into that. */
    above = node->parent != NONE ? &sizes->node[node->parent] : NULL;
    if (!above || above->layer->state != LAYER_HIDDEN || above->children != 2)
        return node->own;
    return node->own + above->shadowed[above->child[0] == index];
}

static void fill(struct sizes *sizes, struct pcow_snapshot *list, size_t count)
{
    size_t at = 0;

    for (size_t i = 0; i < sizes->image->layer_count; i++) {
        struct node *node = &sizes->node[i];

        node->seen = (uint64_t)((int64_t)(node->parent != NONE ? sizes->node[node->parent].seen : 0)
                                + node->gained);
        while (at < count && list[at].id < node->layer->id)
            at++;
        if (at == count || list[at].id != node->layer->id)
            continue;
        list[at].data_size = node->own * PCOW_PAGE_SIZE;
        list[at].shared_size = (node->seen - node->own_seen) * PCOW_PAGE_SIZE;
        list[at].delete_frees = pages_freed(sizes, i) * PCOW_PAGE_SIZE
            + (node->layer->state_size + PCOW_PAGE_SIZE - 1) / PCOW_PAGE_SIZE * PCOW_PAGE_SIZE;
    }
}

int sizes_fill(const struct pcow_image *image, struct pcow_snapshot *list, size_t count)
{
    struct sizes sizes = {.image = image,
                          .slab_count = __atomic_load_n(&image->slab_count, __ATOMIC_ACQUIRE)};
    size_t layers = image->layer_count;
    int ret = -ENOMEM;

    if (count == 0)
        return 0;
    sizes.node = calloc(layers + 1, sizeof *sizes.node);
    sizes.entry = malloc((sizes.slab_count + 1) * sizeof *sizes.entry);
    sizes.piece = aligned_alloc(64, (layers + 1) * sizeof *sizes.piece);
    sizes.stack = malloc((layers + 1) * sizeof *sizes.stack);
    sizes.cutting = malloc((layers + 1) * sizeof *sizes.cutting);
    if (sizes.node && sizes.entry && sizes.piece && sizes.stack && sizes.cutting) {
        number_nodes(&sizes);
        collect(&sizes);
        find_cutting(&sizes);
        if (sizes.cuttings * sizes.entries > MOST_CUTS)
            sizes.cuttings = 0;
        for (size_t from = 0; from < sizes.entries;) {
            uint64_t guest_slab = sizes.entry[from].guest_slab;

            from = take_slab(&sizes, from);
            see_slab(&sizes, guest_slab);
            shadow_slab(&sizes, guest_slab);
        }
        fill(&sizes, list, count);
        ret = 0;
    }
    free(sizes.node);
    free(sizes.entry);
    free(sizes.piece);
    free(sizes.stack);
    free(sizes.cutting);
    return ret;
}
