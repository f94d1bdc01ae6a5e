/* SPDX-License-Identifier: BSD-3-Clause */
#include "content.h"

#include <stdlib.h>
#include <string.h>

/* ---- sets of hashes -------------------------------------------------------------------------- */

struct seen {
    uint64_t *hash;
    size_t count, capacity;               /* capacity: a power of two */
};

struct seen *seen_new(void)
{
    struct seen *seen = calloc(1, sizeof *seen);

    assert_non_null(seen);
    seen->capacity = 1024;
    seen->hash = calloc(seen->capacity, sizeof *seen->hash);
    assert_non_null(seen->hash);
    return seen;
}

void seen_free(struct seen *seen)
{
    free(seen->hash);
    free(seen);
}

static size_t find_hash(const struct seen *seen, uint64_t hash)
{
    size_t at = hash >> 8 & (seen->capacity - 1);

    while (seen->hash[at] && seen->hash[at] != hash)
        at = (at + 1) & (seen->capacity - 1);
    return at;
}

bool seen_has(const struct seen *seen, uint64_t hash)
{
    return seen->hash[find_hash(seen, hash | 1)];
}

void seen_add(struct seen *seen, uint64_t hash)
{
    size_t at;

    hash |= 1;
    if (seen->count * 2 >= seen->capacity) {
        struct seen grown = {calloc(seen->capacity * 2, sizeof hash), 0, seen->capacity * 2};

        assert_non_null(grown.hash);
        for (size_t i = 0; i < seen->capacity; i++)
            if (seen->hash[i])
                seen_add(&grown, seen->hash[i]);
        free(seen->hash);
        *seen = grown;
    }
    at = find_hash(seen, hash);
    seen->count += !seen->hash[at];
    seen->hash[at] = hash;
}

uint64_t hash_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

/* ---- contents: pages by file and number ------------------------------------------------------ */

uint64_t content_key(unsigned file, uint64_t page)
{
    return (uint64_t)(file + 1) << 48 | page;
}

struct content_page *content_find(struct content *content, uint64_t key)
{
    uint64_t at = hash_mix(0, key) % CONTENT_SLOTS;

    while (content->slot[at].key && content->slot[at].key != key)
        at = (at + 1) % CONTENT_SLOTS;
    return &content->slot[at];
}

/* The page, made as a copy of the one in below (which may be NULL) or of zeros. */
uint8_t *content_page(struct content *content, struct content *below, unsigned file, uint64_t page)
{
    uint64_t key = content_key(file, page);
    struct content_page *slot = content_find(content, key),
                        *under = below ? content_find(below, key) : NULL;

    slot->hash = 0;
    if (slot->key)
        return slot->bytes;
    assert_true(content->count < CONTENT_SLOTS / 2);
    if (!slot->bytes)
        slot->bytes = malloc(PAGE);
    assert_non_null(slot->bytes);
    slot->key = key;
    content->used[content->count++] = (uint32_t)(slot - content->slot);
    if (under && under->key)
        memcpy(slot->bytes, under->bytes, PAGE);
    else
        memset(slot->bytes, 0, PAGE);
    return slot->bytes;
}

void content_store(struct content *content, struct content *below, unsigned file, uint64_t offset,
                   const uint8_t *bytes, uint64_t length)
{
    while (length > 0) {
        uint64_t piece = PAGE - offset % PAGE < length ? PAGE - offset % PAGE : length;

        memcpy(content_page(content, below, file, offset / PAGE) + offset % PAGE, bytes, piece);
        bytes += piece;
        offset += piece;
        length -= piece;
    }
}

void content_wipe(struct content *content, struct content *below, unsigned file, uint64_t offset,
                  uint64_t length)
{
    /* Whole pages, and of them only those that hold something. */
    for (unsigned pass = 0; pass < 2; pass++) {
        struct content *from = pass ? below : content;

        for (unsigned i = 0; from && i < from->count; i++) {
            uint64_t key = from->slot[from->used[i]].key, page = key & ((UINT64_C(1) << 48) - 1);

            if (key >> 48 == file + 1 && page >= offset / PAGE && page < (offset + length) / PAGE)
                memset(content_page(content, below, file, page), 0, PAGE);
        }
    }
}

void content_clear(struct content *content)
{
    /* The buffers stay with their slots. */
    for (unsigned i = 0; i < content->count; i++)
        content->slot[content->used[i]].key = 0;
    content->count = 0;
}

void content_free(struct content *content)
{
    for (unsigned i = 0; i < CONTENT_SLOTS; i++)
        free(content->slot[i].bytes);
    free(content);
}

uint64_t content_hash(struct content_page *slot)
{
    uint64_t hash = 0, any = 0;

    if (slot->hash)
        return slot->hash;
    for (unsigned i = 0; i < PAGE / 8; i++) {
        uint64_t word;

        memcpy(&word, slot->bytes + i * 8, 8);
        any |= word;
        hash = hash_mix(hash, word);
    }
    /* A page of zeros is a hole. */
    slot->hash = any ? hash_mix(hash, slot->key) | 1 : 1;
    return slot->hash;
}
