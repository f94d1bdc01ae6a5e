/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/tree.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chain/chain.h"
#include "chain/index.h"
#include "chain/reclaim.h"
#include "image/datasum.h"
#include "image/lock.h"
#include "image/remains.h"
#include "monitor/monitor.h"
#include "snapshot/summed.h"
#include "util/error.h"
#include "util/signals.h"

/*
 * Layers taken out at one open, or by one operation. Deleting a snapshot needs two at the most, and
 * so does finishing that; a file made to hold up who opens it may have tens of thousands, each of
 * which costs passes over all its slabs, of which it may have as many millions. The others wait:
 * reading needs none of it.
 */
#define LEAST_COLLAPSED 2u
#define MOST_COLLAPSED 64u
#define MOST_SLABS (UINT64_C(64) << 20)        /* looked at for all of them */

static int slab_error(const struct pcow_image *image, int code, uint64_t slab,
                      struct pcow_error *error)
{
    return error_set_errno(error, code, "%s: cannot change the owner of file slab %llu",
                           image->file.path, (unsigned long long)slab);
}

struct of_layer {
    uint32_t id;
    enum owner_kind kind;
};

static bool is_of_layer(const struct pcow_image *image, const struct slab *slab, const void *opaque)
{
    const struct of_layer *of = opaque;

    (void)image;
    return slab->layer == of->id && slab->kind == of->kind;
}

static int release_error(const struct pcow_image *image, int code, struct pcow_error *error)
{
    return code ? error_set_errno(error, code, "%s: cannot give slabs back", image->file.path) : 0;
}

int tree_release_layer(struct pcow_image *image, uint32_t id, enum owner_kind kind,
                       struct pcow_error *error)
{
    struct of_layer of = {id, kind};

    state_forget(image);
    return release_error(image, reclaim_release(image, is_of_layer, &of), error);
}

static bool is_of_the_dead(const struct pcow_image *image, const struct slab *slab,
                           const void *opaque)
{
    const struct layer *layer = layer_find(image, slab->layer);

    (void)opaque;
    return slab->kind != OWNER_TABLE
           && (!layer || (slab->kind == OWNER_STATE && layer->state == LAYER_HIDDEN));
}

/* Snapshot delete may have stopped before the VM state was gone. */
static int forget_states_of_hidden(struct pcow_image *image, struct pcow_error *error)
{
    int ret = 0;

    for (size_t i = 0; i < image->layer_count && !ret; i++) {
        struct layer *layer = &image->layers[i];

        if (layer->state == LAYER_HIDDEN && layer->state_size) {
            ret =
                layer_store_word(image, layer, offsetof(struct layer_record, state_size), 0, error);
            if (!ret)
                layer->state_size = 0;
        }
    }
    return ret;
}

int tree_free_stale_record(struct pcow_image *image, struct pcow_error *error)
{
    int ret;

    if (!image->stale_record)
        return 0;
    ret = file_store64(&image->file, layer_record_offset(image, image->stale_record - 1), 0,
                       false);
    if (ret)
        return error_set_errno(error, ret, "%s: cannot free layer record %u", image->file.path,
                               image->stale_record - 1);
    image->stale_record = 0;
    return 0;
}

int tree_reserve_layer(struct pcow_image *image, bool keep_spare, bool lazily, uint32_t *id,
                       uint32_t *slot, struct pcow_error *error)
{
    int ret = layer_reserve(image, keep_spare, lazily, id, slot, error);

    return ret == -ENOSPC && reclaim_for_space(image)
               ? layer_reserve(image, keep_spare, lazily, id, slot, error)
               : ret;
}

int tree_record_layer(struct pcow_image *image, struct layer *reserved, uint32_t parent,
                      uint64_t virtual_size, bool lazily, struct pcow_error *error)
{
    *reserved = (struct layer){
        .id = reserved->id, .slot = reserved->slot, .parent = parent, .state = LAYER_OPEN,
        .virtual_size = virtual_size, .parent_limit = virtual_size,
    };
    return layer_write_record(image, reserved, lazily, error);
}

int tree_put_active(struct pcow_image *image, const struct layer *recorded, bool lazily,
                    struct pcow_error *error)
{
    int ret;

    if (!layer_insert(image, recorded))
        return error_set(error, -ENOMEM, "out of memory");
    ret = (lazily ? header_store_word_lazily : header_store_word)(
        image, offsetof(struct header, active_layer), recorded->id, error);
    if (ret) {
        layer_remove(image, recorded->id);
        return ret;
    }
    image->view = recorded->id;
    image->size = recorded->virtual_size;
    __atomic_store_n(&image->merging, 0, __ATOMIC_RELEASE);
    return 0;
}

/*
 * The pages of one guest slab that a layer holds, over all its slabs. first_of: per guest slab, see
 * merge().
 */
static void layer_pages(const struct pcow_image *image, uint32_t id, uint64_t guest_slab,
                        const uint64_t *by_guest, size_t count, struct page_set *pages)
{
    size_t low = 0, high = count;

    memset(pages, 0, sizeof *pages);
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (image->slabs[by_guest[middle]].number < guest_slab)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < count && image->slabs[by_guest[low]].number == guest_slab; low++)
        if (image->slabs[by_guest[low]].layer == id)
            for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
                pages->word[w] |= page_set_word(&image->valid[by_guest[low]], w);
}

struct slab_order {
    const struct pcow_image *image;
    uint64_t *slab;
    size_t count;
};

static int by_guest_slab(const void *a, const void *b, void *opaque)
{
    const struct pcow_image *image = opaque;
    uint32_t left = image->slabs[*(const uint64_t *)a].number,
             right = image->slabs[*(const uint64_t *)b].number;

    return left < right ? -1 : left > right;
}

/*
 * The child's data slabs, sorted by guest slab. Traps may add some to the active layer meanwhile,
 * see find_shadow().
 */
static int collect(const struct pcow_image *image, uint32_t id, struct slab_order *order)
{
    size_t capacity;

    order->count = 0;
    for (uint64_t p = 1; p < image_slab_count(image); p++)
        order->count += slab_is_of(image, p, OWNER_DATA, id);
    capacity = order->count;
    order->slab = malloc((capacity + 1) * sizeof *order->slab);
    if (!order->slab)
        return -ENOMEM;
    order->count = 0;
    for (uint64_t p = 1; p < image_slab_count(image) && order->count < capacity; p++)
        if (slab_is_of(image, p, OWNER_DATA, id))
            order->slab[order->count++] = p;
    qsort_r(order->slab, order->count, sizeof *order->slab, by_guest_slab, (void *)image);
    return 0;
}

/*
 * Slab by slab the guest may go on making pages of the child own: claimed, both layers stand still
 * for one guest slab.
 */
struct slab_claim {
    bool held;
    uint64_t guest_slab;
    struct interrupts interrupts;
};

static struct slab_claim claim_slab(const struct pcow_image *image, uint64_t guest_slab)
{
    struct slab_claim claim = {.held = image->chain && guest_slab < image->chain->guest_slabs,
                               .guest_slab = guest_slab};

    if (claim.held) {
        claim.interrupts = interrupts_disable();
        chain_claim(image->chain, guest_slab);
    }
    return claim;
}

static void release_slab(const struct pcow_image *image, const struct slab_claim *claim)
{
    if (claim->held) {
        chain_release(image->chain, claim->guest_slab);
        interrupts_restore(claim->interrupts);
    }
}

struct merge {
    struct pcow_image *image;
    uint32_t hidden, child;
    /* above the child's parent_limit it never saw the hidden layer */
    uint64_t limit;
    struct slab_order childs;
    struct page_set *shadow;           /* of each slab of the hidden layer, in their order */
    size_t slabs, next;                /* on that list */
};

/*
 * Those pages of a hidden layer's slab that nobody can see, because its only child holds them too.
 * The claim is held.
 */
static void find_shadow(const struct merge *merge, uint64_t slab, struct page_set *shadow)
{
    const struct pcow_image *image = merge->image;
    uint64_t guest_slab = image->slabs[slab].number;

    /* The list knows slabs that the guest has taken since. */
    if (merge->child == image_active(image) && image->view == merge->child && image->chain
        && guest_slab < image->chain->guest_slabs)
        chain_own_pages(image, guest_slab, shadow);
    else
        layer_pages(image, merge->child, guest_slab, merge->childs.slab, merge->childs.count,
                    shadow);
    if (guest_slab << SLAB_BITS >= merge->limit)
        memset(shadow, 0xff, sizeof *shadow);
}

/* They stop to be valid. The claim is held. */
static int drop_shadowed(const struct merge *merge, uint64_t slab, const struct page_set *shadow,
                         bool lazily, bool claimed)
{
    struct pcow_image *image = merge->image;
    struct page_set valid;
    unsigned dropped;
    int ret;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        valid.word[w] = page_set_word(&image->valid[slab], w) & ~shadow->word[w];
    dropped = page_set_count(&image->valid[slab]) - page_set_count(&valid);
    if (dropped == 0)
        return 0;
    /* From here on the blocks may be given back at any time. */
    ret = claimed && image->map ? layout_catch_up(image->map, image->slabs[slab].number) : 0;
    if (!ret && !lazily)
        ret = image_sync(image);
    if (!ret)
        ret = slab_store_valid(image, slab, &valid, lazily);
    if (!ret && !page_set_empty(&valid)) {
        slab_forget_stored(image, slab);
        remains_leave(image, slab, dropped);
    } else if (!ret) {
        __atomic_fetch_add(&image->remains_size, dropped * PCOW_PAGE_SIZE, __ATOMIC_RELAXED);
    }
    return ret;
}

/*
 * The first pass over the hidden layer's slabs, before the flush that makes what it notes certain.
 */
static int note_shadow(struct merge *merge, uint64_t slab)
{
    uint64_t guest_slab = merge->image->slabs[slab].number;
    struct slab_claim claim = claim_slab(merge->image, guest_slab);

    find_shadow(merge, slab, &merge->shadow[merge->next++]);
    release_slab(merge->image, &claim);
    /* On the medium with all others, by the flush. */
    return datasum_may_be(&merge->image->file, slab)
               ? datasum_drop_lazily(&merge->image->file, slab)
               : 0;
}

/*
 * The second pass, only over what was noted: what the guest has copied since need not be on the
 * medium.
 */
static int drop_from_slab(struct merge *merge, uint64_t slab)
{
    uint64_t guest_slab = merge->image->slabs[slab].number;
    struct slab_claim claim = claim_slab(merge->image, guest_slab);
    int ret = drop_shadowed(merge, slab, &merge->shadow[merge->next++], true, claim.held);

    release_slab(merge->image, &claim);
    return ret;
}

/*
 * The third pass: what is left becomes the child's. A slab with nothing left goes with its layer,
 * so no list may lead to it any more.
 */
static int give_slab(struct merge *merge, uint64_t slab)
{
    struct pcow_image *image = merge->image;
    uint64_t guest_slab = image->slabs[slab].number;
    struct slab_claim claim = claim_slab(image, guest_slab);
    struct page_set shadow;
    int ret;

    /* Again: the guest may have made a page own meanwhile. */
    find_shadow(merge, slab, &shadow);
    if (claim.held)
        index_forget(image->chain, guest_slab);
    ret = drop_shadowed(merge, slab, &shadow, false, claim.held);
    if (!ret && !page_set_empty(&image->valid[slab]))
        ret = slab_publish(image, slab,
                           (struct owner){OWNER_DATA, merge->child, (uint32_t)guest_slab}, true);
    else if (!ret && claim.held)
        chain_unlink(image, guest_slab, slab);
    release_slab(image, &claim);
    return ret;
}

static int for_slabs_of_hidden(struct merge *merge, int (*work)(struct merge *merge, uint64_t slab),
                               struct pcow_error *error)
{
    struct pcow_image *image = merge->image;

    merge->next = 0;
    for (uint64_t p = 1; p < image_slab_count(image); p++) {
        int ret;

        if (!slab_is_of(image, p, OWNER_DATA, merge->hidden))
            continue;
        ret = work(merge, p);
        if (ret)
            return slab_error(image, ret, p, error);
    }
    return 0;
}

/*
 * What note_shadow() has dropped is on the medium. In class pmem a sync is no fence, and to drop it
 * once more is cheap.
 */
static int note_dropped(struct merge *merge, uint64_t slab)
{
    struct file *file = &merge->image->file;

    return file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
               ? datasum_note_dropped(file, slab)
               : 0;
}

static int count_slab(struct merge *merge, uint64_t slab)
{
    (void)slab;
    merge->slabs++;
    return 0;
}

static int flush(struct merge *merge, struct pcow_error *error)
{
    int ret = image_sync(merge->image);

    return ret ? error_set_errno(error, ret, "cannot flush %s", merge->image->file.path) : 0;
}

/* Those that others have made of snapshots, as this one was until now. */
static int look_for_checksums(struct pcow_image *image, struct pcow_error *error)
{
    uint64_t count = image_slab_count(image);
    int ret = 0;

    for (uint64_t group = 0; group < count && !ret; group += SLABS_PER_GROUP)
        ret = datasum_look(&image->file, group + image->file.heads,
                           group + SLABS_PER_GROUP < count ? group + SLABS_PER_GROUP : count);
    return ret ? error_set_errno(error, ret, "cannot read the checksums of %s", image->file.path)
               : 0;
}

/*
 * The slabs of a hidden layer become the child's. Each of the steps is durable as a whole before
 * the next: the words within it may be in any order, because a hidden layer reads the same with and
 * without a page that its child holds, and whoever of the two owns a slab. In class page-cache the
 * words that make the child's pages count may not be on the medium when this begins: they were left
 * to the next flush. So what the child holds is noted before that flush, and only what was noted is
 * dropped after it.
 */
static int merge_slabs(struct merge *merge, struct pcow_error *error)
{
    int ret = look_for_checksums(merge->image, error);

    if (!ret)
        ret = for_slabs_of_hidden(merge, note_shadow, error);
    if (!ret)
        ret = flush(merge, error);
    if (!ret)
        ret = for_slabs_of_hidden(merge, note_dropped, error);
    if (!ret)
        ret = for_slabs_of_hidden(merge, drop_from_slab, error);
    if (!ret)
        ret = flush(merge, error);
    if (!ret)
        ret = for_slabs_of_hidden(merge, give_slab, error);
    return ret ? ret : flush(merge, error);
}

/*
 * "Snapshot delete" in format.rst: a hidden layer with one child becomes part of it. No data is
 * copied.
 */
static int merge(struct pcow_image *image, uint32_t hidden_id, uint32_t child_id,
                 struct pcow_error *error)
{
    struct layer *hidden = layer_find(image, hidden_id), *child = layer_find(image, child_id);
    struct merge merge = {
        .image = image, .hidden = hidden_id, .child = child_id, .limit = child->parent_limit};
    /* Of the hidden one checksums are dropped, and the child gets slabs without. */
    int ret = summed_clear(image, hidden, error);

    if (!ret)
        ret = summed_clear(image, child, error);
    if (ret)
        return ret;
    ret = collect(image, child_id, &merge.childs);
    /*
     * From before the first slab is given. What an error leaves half way stays so until the next
     * merge, or until another layer is active.
     */
    if (child_id == image_active(image))
        __atomic_store_n(&image->merging, hidden_id, __ATOMIC_RELEASE);
    for_slabs_of_hidden(&merge, count_slab, NULL);
    merge.shadow = calloc(merge.slabs + 1, sizeof *merge.shadow);
    ret = ret || !merge.shadow ? error_set(error, -ENOMEM, "out of memory")
                               : merge_slabs(&merge, error);
    free(merge.shadow);
    free(merge.childs.slab);
    if (ret) {
        /* Before another layer becomes the active one, or is merged into it. */
        if (image->chain)
            chain_set_mixed(image->chain);
        return ret;
    }
    if (hidden->parent_limit < child->parent_limit) {
        ret = layer_store_word(image, child, offsetof(struct layer_record, parent_limit),
                               hidden->parent_limit, error);
        if (ret)
            return ret;
        child->parent_limit = hidden->parent_limit;
    }
    ret = layer_store_word(image, child, offsetof(struct layer_record, parent), hidden->parent,
                           error);
    if (ret)
        return ret;
    child->parent = hidden->parent;
    /* Nothing is of the hidden layer any more. */
    __atomic_store_n(&image->merging, 0, __ATOMIC_RELEASE);
    return 0;
}

static int remove_layer(struct pcow_image *image, uint32_t id, struct pcow_error *error)
{
    struct layer gone = *layer_find(image, id);
    int ret;

    gone.state = LAYER_FREE;
    ret = layer_store_state(image, &gone, error);
    if (ret)
        return ret;
    layer_remove(image, id);
    ret = tree_release_layer(image, id, OWNER_DATA, error);
    if (!ret)
        ret = tree_release_layer(image, id, OWNER_STATE, error);
    if (ret)
        layer_hold_slot(image, gone.slot);
    return ret;
}

static bool may_collapse(const struct pcow_image *image, unsigned collapsed)
{
    return collapsed < LEAST_COLLAPSED
           || (collapsed < MOST_COLLAPSED && collapsed * image_slab_count(image) < MOST_SLABS);
}

static int collapse(struct pcow_image *image, uint32_t id, unsigned *collapsed,
                    struct pcow_error *error)
{
    const struct layer *layer = layer_find(image, id);

    /* Upwards: when a layer is gone, its hidden parent may have one child too few. */
    while (layer && layer->state == LAYER_HIDDEN && may_collapse(image, *collapsed)) {
        uint32_t gone = layer->id, parent = layer->parent, child = 0;
        unsigned children = layer_children(image, gone, &child);
        int ret = 0;

        if (children > 1)
            return 0;
        if (children == 1)
            ret = merge(image, gone, child, error);
        if (!ret)
            ret = remove_layer(image, gone, error);
        if (ret)
            return ret;
        *collapsed += 1;
        layer = parent ? layer_find(image, parent) : NULL;
    }
    return 0;
}

int tree_collapse(struct pcow_image *image, uint32_t id, struct pcow_error *error)
{
    unsigned collapsed = 0;

    return collapse(image, id, &collapsed, error);
}

/*
 * Hidden layers with less than two children, by ascending id; NULL: no memory. Children are counted
 * once, as there may be as many of both.
 */
static uint32_t *find_collapsible(const struct pcow_image *image, size_t *count)
{
    uint32_t *ids = calloc(image->layer_count + 1, sizeof *ids);
    unsigned *children = calloc(image->layer_count + 1, sizeof *children);

    *count = 0;
    for (size_t i = 0; ids && children && i < image->layer_count; i++) {
        const struct layer *parent =
            image->layers[i].parent ? layer_find(image, image->layers[i].parent) : NULL;

        if (parent)
            children[parent - image->layers]++;
    }
    for (size_t i = 0; ids && children && i < image->layer_count; i++)
        if (image->layers[i].state == LAYER_HIDDEN && children[i] < 2)
            ids[(*count)++] = image->layers[i].id;
    if (!children) {
        free(ids);
        ids = NULL;
    }
    free(children);
    return ids;
}

/* From the newest down, so that what is freed may free its parent. */
static int collapse_all(struct pcow_image *image, struct pcow_error *error)
{
    unsigned collapsed = 0;
    size_t count;
    uint32_t *ids = find_collapsible(image, &count);
    int ret = ids ? 0 : error_set(error, -ENOMEM, "out of memory");

    for (size_t i = count; i > 0 && !ret && may_collapse(image, collapsed); i--)
        ret = collapse(image, ids[i - 1], &collapsed, error);
    free(ids);
    return ret;
}

static int finish_interrupted(struct pcow_image *image, struct pcow_error *error)
{
    const struct layer *active = layer_find(image, image_active(image));
    const struct layer *parent = active->parent ? layer_find(image, active->parent) : NULL;
    int ret = layers_check_owners(image, error);

    if (!ret)
        ret = layers_clear_outdated(image, error);
    if (ret)
        return ret;
    if (parent && parent->state == LAYER_HIDDEN) {
        uint64_t offset = layer_record_offset(image, parent->slot), word;

        /* Snapshot create may have stopped behind its commit, see making.h. */
        ret = file_read(&image->file, offset, &word, sizeof word);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot read layer record %u", image->file.path,
                                   parent->slot);
        if ((word_value(word) >> 28 & 0xf) == LAYER_OPEN)
            ret = layer_store_state(image, parent, error);
    }
    if (!ret)
        ret = tree_free_stale_record(image, error);
    if (!ret)
        ret = forget_states_of_hidden(image, error);
    if (!ret)
        ret = release_error(image, reclaim_release(image, is_of_the_dead, NULL), error);
    return ret ? ret : collapse_all(image, error);
}

int tree_finish_interrupted(struct pcow_image *image, struct pcow_error *error)
{
    int ret = lock_tree(&image->file, true, error);

    if (ret)
        return ret;
    ret = finish_interrupted(image, error);
    unlock_tree(&image->file);
    return ret;
}
