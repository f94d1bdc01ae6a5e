/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/format2.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "util/error.h"

uint32_t header_crc(const struct header *header)
{
    return crc32c(header, offsetof(struct header, crc));
}

uint32_t base_record_crc(const struct base_record *record)
{
    return crc32c(record, offsetof(struct base_record, crc));
}

uint32_t layer_record_crc(const struct layer_record *record)
{
    size_t from = offsetof(struct layer_record, date_seconds);

    return crc32c((const char *)record + from, offsetof(struct layer_record, crc) - from);
}

bool base_name_is_safe(const char *name, size_t size)
{
    size_t length = strnlen(name, size);

    return length > 0 && length < size && !memchr(name, '/', length) && strcmp(name, ".")
           && strcmp(name, "..");
}

bool snapshot_name_is_valid(const char *name, size_t size)
{
    size_t length = strnlen(name, size);

    if (length == 0 || length == size || length >= PCOW_SNAPSHOT_NAME_SIZE)
        return false;
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return false;
    return true;
}

int header_validate(const struct header *header, const char *path, struct pcow_error *error)
{
    const uint64_t *words = &header->active_layer;

    if (memcmp(header->magic, FORMAT2_MAGIC, sizeof header->magic))
        return error_set(error, -EMEDIUMTYPE,
                         "%s is not a pcow image (no magic number); "
                         "convert it with pcow-img convert -O pcow, or name its format with -f",
                         path);
    if (header->version != FORMAT2_VERSION)
        return error_set(
            error, -ENOTSUP,
            "%s has format version %u, this program knows version %u; use a newer pcow", path,
            header->version, FORMAT2_VERSION);
    if (header->crc != header_crc(header))
        return error_set(error, -EBADMSG,
                         "%s: the header is damaged (checksum); see pcow-img check", path);
    if (header->incompatible_features)
        return error_set(
            error, -ENOTSUP,
            "%s uses features (0x%llx) that this program does not know; use a newer pcow", path,
            (unsigned long long)header->incompatible_features);
    if (header->header_size != HEADER_SIZE || header->page_bits != 12
        || header->slab_bits != SLAB_BITS || header->group_bits != GROUP_BITS
        || header->cluster_bits < 12 || header->cluster_bits > SLAB_BITS)
        return error_set(
            error, -EBADMSG,
            "%s: the header has impossible sizes (cluster_bits %u, slab_bits %u, group_bits %u); "
            "the image is damaged or hostile",
            path, header->cluster_bits, header->slab_bits, header->group_bits);
    for (unsigned i = 0; i < 6; i++)
        if (!word_is_valid(words[i]))
            return error_set(error, -EBADMSG,
                             "%s: word %u of the header is damaged; see pcow-img check", path, i);
    if (word_value(header->base_slot) > 2)
        return error_set(error, -EBADMSG, "%s: impossible base slot %llu; see pcow-img check", path,
                         (unsigned long long)word_value(header->base_slot));
    return 0;
}

int base_record_validate(const struct base_record *record, const char *path,
                         struct pcow_error *error)
{
    if (record->crc != base_record_crc(record))
        return error_set(error, -EBADMSG, "%s: the name of its base is damaged (checksum); "
                         "set it with pcow-img rebase -u -b BASE", path);
    if (!base_name_is_safe(record->name, sizeof record->name))
        return error_set(
            error, -EBADMSG,
            "%s: the name of its base is not a plain file name; refused. "
            "A base lies in the same directory; set it with pcow-img rebase -u -b BASE",
            path);
    if (record->format != 1 && record->format != 2)
        return error_set(error, -EBADMSG, "%s: its base has unknown format %u", path,
                         record->format);
    return 0;
}
