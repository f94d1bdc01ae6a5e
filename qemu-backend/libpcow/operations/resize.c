/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>

#include "chain/chain.h"
#include "image/image.h"
#include "util/error.h"

static int grow(struct pcow_image *image, struct layer *layer, uint64_t virtual_size,
                struct pcow_error *error)
{
    int ret = 0;

    /* What a shrink has hidden must not come back: neither from below nor from the layer itself. */
    if (layer->parent_limit > layer->virtual_size) {
        ret = layer_store_word(image, layer, offsetof(struct layer_record, parent_limit),
                               layer->virtual_size, error);
        if (!ret)
            layer->parent_limit = layer->virtual_size;
    }
    if (!ret)
        ret = chain_drop_own_from(image, layer->virtual_size >> SLAB_BITS, error);
    return ret ? ret
               : layer_store_word(image, layer, offsetof(struct layer_record, virtual_size),
                                  virtual_size, error);
}

int pcow_resize(pcow_image *image, uint64_t virtual_size, bool allow_shrink,
                struct pcow_error *error)
{
    struct layer *layer;
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    if (image->map)
        return error_set(error, -EBUSY, "%s is mapped by a VM; stop it before resizing",
                         image->file.path);
    if (virtual_size == 0 || virtual_size % PCOW_SLAB_SIZE || virtual_size > PCOW_MAX_VIRTUAL_SIZE)
        return error_set(error, -EINVAL,
                         "%s: the new size %llu is not a multiple of 2 MiB up to 16 TiB",
                         image->file.path, (unsigned long long)virtual_size);
    if (virtual_size < image->size && !allow_shrink)
        return error_set(
            error, -EINVAL,
            "%s: shrinking gives up the data beyond the new end; say --shrink if that is meant",
            image->file.path);
    if (virtual_size == image->size)
        return 0;
    ret = image_begin_change(image, error);
    if (ret)
        return ret;
    layer = layer_find(image, image_active(image));
    if (virtual_size > layer->virtual_size)
        ret = grow(image, layer, virtual_size, error);
    else
        ret = layer_store_word(image, layer, offsetof(struct layer_record, virtual_size),
                               virtual_size, error);
    /* The lists are built for one size. */
    chain_free(image);
    if (ret)
        return ret;
    layer->virtual_size = virtual_size;
    image->size = virtual_size;
    return 0;
}
