/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What files hold, as pages in memory, one content on top of another; and sets of hashes of
 * contents.
 */
#ifndef PCOW_TEST_CONTENT_H
#define PCOW_TEST_CONTENT_H

#include "recorder.h"

#define PAGE 4096u

#define CONTENT_SLOTS 8192u

struct content {
    /* key 0: none */
    struct content_page { uint64_t key, hash; uint8_t *bytes; } slot[CONTENT_SLOTS];
    uint32_t used[CONTENT_SLOTS];
    unsigned count;
    uint64_t size[RECORDED_FILES];
};

uint64_t content_key(unsigned file, uint64_t page);
/* Where the page is or would be; its key is 0 if it is not there. */
struct content_page *content_find(struct content *content, uint64_t key);
/* The page, made as a copy of the one in below (which may be NULL) or of zeros. */
uint8_t *content_page(struct content *content, struct content *below, unsigned file, uint64_t page);
void content_store(struct content *content, struct content *below, unsigned file, uint64_t offset,
                   const uint8_t *bytes, uint64_t length);
/* Zeros in place of the whole pages of a range. */
void content_wipe(struct content *content, struct content *below, unsigned file, uint64_t offset,
                  uint64_t length);
void content_clear(struct content *content);
void content_free(struct content *content);
uint64_t content_hash(struct content_page *slot);

uint64_t hash_mix(uint64_t hash, uint64_t value);

struct seen *seen_new(void);
void seen_free(struct seen *seen);
bool seen_has(const struct seen *seen, uint64_t hash);
void seen_add(struct seen *seen, uint64_t hash);

#endif
