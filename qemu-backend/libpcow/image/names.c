/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshots by name: a hash table with open addressing, so that the time of a snapshot does not
 * grow with their number. It is built when it is first asked, and holds ids, because layers move in
 * memory.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/image.h"
#include "util/error.h"
#include "util/nearest.h"

#define EMPTY 0u
#define REMOVED UINT32_MAX             /* ids have 28 bits */

struct layer_names {
    /* capacity: a power of two; filled: the removed ones included */
    size_t capacity, filled;
    uint32_t id[];
};

/* FNV-1a, 64 bits. */
static uint64_t hash(const char *name)
{
    uint64_t value = UINT64_C(0xcbf29ce484222325);

    for (; *name; name++)
        value = (value ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    return value ^ value >> 32;
}

static void put(struct layer_names *names, const struct layer *layer)
{
    size_t at = hash(layer->name) & (names->capacity - 1);

    while (names->id[at] != EMPTY)
        at = (at + 1) & (names->capacity - 1);
    names->id[at] = layer->id;
    names->filled++;
}

static struct layer_names *build(const struct pcow_image *image)
{
    size_t capacity = 64;
    struct layer_names *names;

    while (capacity < image->layer_count * 4)
        capacity *= 2;
    names = calloc(1, sizeof *names + capacity * sizeof names->id[0]);
    if (!names)
        return NULL;
    names->capacity = capacity;
    for (size_t i = 0; i < image->layer_count; i++)
        if (image->layers[i].state == LAYER_SNAPSHOT)
            put(names, &image->layers[i]);
    return names;
}

/* Where the name is; capacity if it is not there. */
static size_t find(const struct pcow_image *image, const struct layer_names *names,
                   const char *name)
{
    for (size_t at = hash(name) & (names->capacity - 1); names->id[at] != EMPTY;
         at = (at + 1) & (names->capacity - 1)) {
        const struct layer *layer =
            names->id[at] == REMOVED ? NULL : layer_find(image, names->id[at]);

        if (layer && layer->state == LAYER_SNAPSHOT && strcmp(layer->name, name) == 0)
            return at;
    }
    return names->capacity;
}

static struct layer *search(const struct pcow_image *image, const char *name)
{
    for (size_t i = 0; i < image->layer_count; i++)
        if (image->layers[i].state == LAYER_SNAPSHOT && strcmp(image->layers[i].name, name) == 0)
            return &image->layers[i];
    return NULL;
}

struct layer *layer_find_name(struct pcow_image *image, const char *name)
{
    size_t at;

    if (!image->names)
        image->names = build(image);
    if (!image->names)
        return search(image, name);
    at = find(image, image->names, name);
    return at < image->names->capacity ? layer_find(image, image->names->id[at]) : NULL;
}

void layer_name_add(struct pcow_image *image, const struct layer *layer)
{
    if (image->names && image->names->filled * 2 < image->names->capacity)
        put(image->names, layer);
    else
        layer_names_free(image);
}

void layer_name_remove(struct pcow_image *image, const struct layer *layer)
{
    size_t at = image->names ? find(image, image->names, layer->name) : 0;

    if (image->names && at < image->names->capacity)
        image->names->id[at] = REMOVED;
}

void layer_names_free(struct pcow_image *image)
{
    free(image->names);
    image->names = NULL;
}

int layer_name_unknown(const struct pcow_image *image, const char *name, struct pcow_error *error)
{
    struct nearest nearest;
    char hint[NEAREST_HINT_SIZE];

    nearest_begin(&nearest, name);
    for (size_t i = 0; i < image->layer_count; i++)
        if (image->layers[i].state == LAYER_SNAPSHOT && image->layers[i].name[0] != '.')
            nearest_look(&nearest, image->layers[i].name);
    nearest_hint(&nearest, hint);
    return error_set(error, -ENOENT, "%s has no snapshot '%s'%s pcow-img snapshot -l lists them",
                     image->file.path, name, *hint ? hint : ";");
}
