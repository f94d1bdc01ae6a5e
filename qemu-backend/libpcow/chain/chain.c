/* SPDX-License-Identifier: BSD-3-Clause */
#include "chain/chain.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "chain/index.h"
#include "format1/format1.h"
#include "util/error.h"

static uint64_t slabs_of(uint64_t size)
{
    return (size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;
}

/* Nothing below shows through at or above this size. */
static void cut(struct chain *chain, uint64_t size)
{
    for (uint64_t v = slabs_of(size); v < chain->end; v++)
        chain->head[v] = 0;
    if (slabs_of(size) < chain->end)
        chain->end = slabs_of(size);
}

static void push(struct chain *chain, struct slab *slab, uint64_t guest_slab, slab_ref ref)
{
    sparse_set_add(&chain->used, guest_slab);
    slab->next = chain->head[guest_slab];
    chain->head[guest_slab] = ref;
    if (guest_slab >= chain->end)
        chain->end = guest_slab + 1;
}

static void push_layer(struct chain *chain, struct pcow_image *image, unsigned level,
                       const uint64_t *slabs, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct slab *slab = &image->slabs[slabs[i]];

        if (slab->number < chain->guest_slabs)
            push(chain, slab, slab->number, slab_ref_make(level, slabs[i]));
    }
}

/* Position of each layer on the way from the view to the root: 1 = the oldest. */
static size_t path_of(const struct pcow_image *image, const struct layer **path)
{
    size_t length = 0;

    for (const struct layer *layer = layer_find(image, image->view); layer;
         layer = layer->parent ? layer_find(image, layer->parent) : NULL)
        path[length++] = layer;
    /* Parents have lower ids (checked at load), so this ends. Turn it round: oldest first. */
    for (size_t i = 0; i < length / 2; i++) {
        const struct layer *swap = path[i];

        path[i] = path[length - 1 - i];
        path[length - 1 - i] = swap;
    }
    return length;
}

static size_t position(const struct layer *const *path, size_t length, uint32_t id)
{
    size_t low = 0, high = length;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (path[middle]->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < length && path[low]->id == id ? low : length;
}

static void give_up_memory(struct chain *chain)
{
    free(chain->memory.path);
    free(chain->memory.sorted);
    free(chain->memory.start);
    chain->memory = (struct chain_memory){0};
}

/* For push_file() of every file of the chain. */
static int reserve_memory(struct chain *chain)
{
    struct chain_memory *memory = &chain->memory;
    uint64_t layers = 0, slabs = 0;

    for (unsigned level = 1; level <= chain->levels; level++) {
        const struct pcow_image *file = chain->file[level];

        /* A change of the tree may add a layer, and a slab for its record. */
        layers = !file->format1 && file->layer_count + 4 > layers ? file->layer_count + 4 : layers;
        slabs = !file->format1 && image_slab_count(file) + 4 > slabs ? image_slab_count(file) + 4
                                                                     : slabs;
    }
    if (layers <= memory->layers && slabs <= memory->slabs)
        return 0;
    give_up_memory(chain);
    memory->path = malloc(layers * sizeof *memory->path);
    memory->sorted = malloc(slabs * sizeof *memory->sorted);
    memory->start = malloc((layers + 1) * sizeof *memory->start);
    if (!memory->path || !memory->sorted || !memory->start) {
        give_up_memory(chain);
        return -ENOMEM;
    }
    memory->layers = layers;
    memory->slabs = slabs;
    return 0;
}

/*
 * Put the file's slabs on the lists, oldest layer first (counting sort by position on the path).
 * The memory is reserved.
 */
static void push_file(struct chain *chain, struct pcow_image *image, unsigned level)
{
    const struct layer **path = chain->memory.path;
    uint64_t *sorted = chain->memory.sorted;
    size_t *start = chain->memory.start, length = path_of(image, path);

    memset(start, 0, (length + 1) * sizeof *start);
    for (int pass = 0; pass < 2; pass++) {
        for (uint64_t p = 1; p < image_slab_count(image); p++) {
            size_t at = image->slabs[p].kind == OWNER_DATA
                            ? position(path, length, image->slabs[p].layer)
                            : length;

            if (at == length)
                continue;
            if (pass == 0)
                start[at + 1]++;
            else
                sorted[start[at]++] = p;
        }
        for (size_t i = 0; pass == 0 && i < length; i++)
            start[i + 1] += start[i];
    }
    /* start[i] is now the end of position i. */
    for (size_t i = 0; i < length; i++) {
        cut(chain, path[i]->parent_limit);
        push_layer(chain, image, level, sorted + (i ? start[i - 1] : 0),
                   start[i] - (i ? start[i - 1] : 0));
    }
}

static void push_format1(struct chain *chain, struct pcow_image *image, unsigned level)
{
    for (uint64_t v = 0; v < chain->guest_slabs && v < slabs_of(image->size); v++)
        if (format1_has_slab(image, v))
            push(chain, &image->slabs[v], v, slab_ref_make(level, v));
}

static int no_memory(const struct pcow_image *image, struct pcow_error *error)
{
    return error_set(error, -ENOMEM, "out of memory for the index of %s", image->file.path);
}

/*
 * Slabs are cut off where a file ends, see cut(); this is about the rest of the slab that it ends
 * in, which a file of format 1 may share.
 */
static void note_reach(struct chain *chain)
{
    uint64_t reach = UINT64_MAX;

    chain->ragged = chain->format1 = false;
    for (unsigned level = chain->levels; level > 0; level--) {
        chain->reach[level] = reach;
        if (chain->file[level]->size / PCOW_PAGE_SIZE < reach)
            reach = chain->file[level]->size / PCOW_PAGE_SIZE;
        chain->ragged |= chain->file[level]->size % PCOW_SLAB_SIZE != 0;
        chain->format1 |= chain->file[level]->format1 != NULL;
    }
}

/* The heads are zero. What the image does not hold costs nothing, whatever its size. */
static int build(struct pcow_image *image, struct pcow_error *error)
{
    struct chain *chain = image->chain;

    if (reserve_memory(chain))
        return no_memory(image, error);
    note_reach(chain);
    __atomic_store_n(&chain->mixed, false, __ATOMIC_RELEASE);
    for (unsigned level = 1; level <= chain->levels; level++) {
        struct pcow_image *file = chain->file[level];

        if (file->format1)
            push_format1(chain, file, level);
        else
            push_file(chain, file, level);
        /* What a smaller file hides or never had does not come back in a larger one on it. */
        cut(chain, file->size);
    }
    give_up_memory(chain);
    return 0;
}

int chain_reserve(struct pcow_image *image, struct pcow_error *error)
{
    return image->chain && reserve_memory(image->chain) ? no_memory(image, error) : 0;
}

struct chain *chain_get(struct pcow_image *image, struct pcow_error *error)
{
    char base_name[PCOW_BASE_NAME_SIZE];
    struct chain *chain;
    unsigned level = 0;

    if (image->chain)
        return image->chain;
    chain = calloc(1, sizeof *chain);
    if (!chain)
        goto failed;
    for (struct pcow_image *file = image; file; file = file->base)
        chain->levels++;
    level = chain->levels;
    for (struct pcow_image *file = image; file; file = file->base)
        chain->file[level--] = file;
    chain->incomplete = image_base_record(chain->file[1]) != NULL
                        || format1_base_name(chain->file[1], base_name) != NULL;
    chain->guest_slabs = slabs_of(image->size);
    chain->head = calloc(chain->guest_slabs + 1, sizeof *chain->head);
    chain->claim = calloc(chain->guest_slabs + 1, sizeof *chain->claim);
    image->chain = chain;
    if (!chain->head || !chain->claim || !sparse_set_init(&chain->used, chain->guest_slabs)
        || !index_init(chain))
        goto failed;
    if (build(image, error) == 0)
        return chain;
    chain_free(image);
    return NULL;

failed:
    chain_free(image);
    no_memory(image, error);
    return NULL;
}

void chain_free(struct pcow_image *image)
{
    if (image->chain) {
        give_up_memory(image->chain);
        free(image->chain->head);
        free(image->chain->claim);
        index_free(image->chain);
        sparse_set_free(&image->chain->used);
        free(image->chain);
        image->chain = NULL;
    }
}

static void forget_list(struct chain *chain, uint64_t guest_slab)
{
    index_forget(chain, guest_slab);
    chain->head[guest_slab] = 0;
}

struct chain *chain_set_aside(struct pcow_image *image)
{
    struct chain *chain = image->chain;

    __atomic_store_n(&image->chain, NULL, __ATOMIC_RELEASE);
    if (!chain)
        return NULL;
    for (unsigned level = 1; level <= chain->levels; level++) {
        const struct pcow_image *file = chain->file[level];

        for (uint64_t v = 0; file->format1 && v < chain->guest_slabs && v < slabs_of(file->size);
             v++)
            forget_list(chain, v);
        for (uint64_t p = 1; !file->format1 && p < image_slab_count(file); p++)
            if (file->slabs[p].kind == OWNER_DATA && file->slabs[p].number < chain->guest_slabs)
                forget_list(chain, file->slabs[p].number);
    }
    chain->end = 0;
    return chain;
}

int chain_bring_back(struct pcow_image *image, struct chain *chain, struct pcow_error *error)
{
    int ret;

    if (!chain)
        return 0;
    __atomic_store_n(&image->chain, chain, __ATOMIC_RELEASE);
    if (chain->guest_slabs == slabs_of(image->size)) {
        ret = build(image, error);
        if (ret)
            chain_free(image);
        return ret;
    }
    chain_free(image);
    return chain_get(image, error) ? 0 : -ENOMEM;
}

void chain_unlink(struct pcow_image *image, uint64_t guest_slab, uint64_t slab)
{
    struct chain *chain = image->chain;

    index_forget(chain, guest_slab);
    for (slab_ref *at = &chain->head[guest_slab]; *at;
         at = &chain->file[slab_ref_level(*at)]->slabs[slab_ref_slab(*at)].next)
        if (slab_ref_level(*at) == chain->levels && slab_ref_slab(*at) == slab) {
            __atomic_store_n(at, image->slabs[slab].next, __ATOMIC_RELEASE);
            return;
        }
}

void chain_claim(struct chain *chain, uint64_t guest_slab)
{
    /*
     * Before it is claimed: who looks at the claims of all that is used, as a freeze does, misses
     * none.
     */
    sparse_set_add(&chain->used, guest_slab);
    for (unsigned spins = 0; __atomic_exchange_n(&chain->claim[guest_slab], 1, __ATOMIC_ACQUIRE);
         spins++) {
        static const struct timespec moment = {0, 20000};

        if (spins < 64)
            __builtin_ia32_pause();
        else if (spins < 256)
            sched_yield();
        else
            nanosleep(&moment, NULL);  /* who holds it may have a lower priority than who waits */
    }
}

void chain_release(struct chain *chain, uint64_t guest_slab)
{
    __atomic_store_n(&chain->claim[guest_slab], 0, __ATOMIC_RELEASE);
}
