/* SPDX-License-Identifier: BSD-3-Clause */
#include "rich.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define IMAGE scratch("image.pcow")

void rich_page(uint32_t layer, uint64_t page, uint8_t bytes[PCOW_PAGE_SIZE])
{
    uint64_t seed = (uint64_t)layer << 32 | (page + 1);

    fill_pattern(bytes, PCOW_PAGE_SIZE, &seed);
}

void rich_state(uint32_t layer, uint64_t size, uint8_t *bytes)
{
    uint64_t seed = (uint64_t)layer << 48 | 1;

    fill_pattern(bytes, size, &seed);
}

static void write_pages(struct rich *rich, pcow_image *image, uint32_t layer, uint64_t first,
                        uint64_t count)
{
    uint8_t bytes[PCOW_PAGE_SIZE];

    for (uint64_t page = first; page < first + count; page++) {
        rich_page(layer, page, bytes);
        MUST(pcow_write(image, page * PCOW_PAGE_SIZE, bytes, sizeof bytes, &error));
        rich->layer[layer].page[page] = true;
    }
}

static void take(struct rich *rich, pcow_image *image, uint32_t layer, const char *name,
                 uint64_t state_size)
{
    uint8_t *bytes = malloc(state_size + 1);

    assert_non_null(bytes);
    MUST(pcow_snapshot_create(image, name, &error));
    rich->layer[layer].name = name;
    rich->layer[layer + 1].parent = layer;
    rich->layer[layer].state_size = state_size;
    rich_state(layer, state_size, bytes);
    if (state_size) {
        MUST(pcow_snapshot_write_state(image, name, 0, bytes, state_size, &error));
        MUST(pcow_snapshot_set_state_size(image, name, state_size, &error));
    }
    free(bytes);
}

static pcow_image *keep_older(struct rich *rich, pcow_image *image)
{
    int fd;

    pcow_close(image);
    fd = open(IMAGE, O_RDONLY);
    assert_int_equal(pread(fd, rich->older, sizeof rich->older, 0), sizeof rich->older);
    close(fd);
    return must_open(IMAGE, PCOW_OPEN_WRITE);
}

/* Layers 1 to 3 in a row, the 4th beside the 3rd and left, the active one on the 2nd. */
static void fill(struct rich *rich, pcow_image *image)
{
    write_pages(rich, image, 1, 3, 20);
    write_pages(rich, image, 1, 512, 300);
    write_pages(rich, image, 1, 2000, 40);
    take(rich, image, 1, "first", 3 * MIB + 5000);
    write_pages(rich, image, 2, 600, 8);
    write_pages(rich, image, 2, 1100, 100);
    take(rich, image, 2, "second \"quoted\"", 0);
    image = keep_older(rich, image);
    write_pages(rich, image, 3, 0, 17);
    write_pages(rich, image, 3, 1530, 12);
    take(rich, image, 3, "third", 70000);
    write_pages(rich, image, 4, 5, 5);
    write_pages(rich, image, 4, 1000, 200);
    MUST(pcow_snapshot_revert(image, "second \"quoted\"", &error));
    rich->layer[4].dead = true;
    rich->layer[5].parent = 2;
    write_pages(rich, image, 5, 10, 4);
    write_pages(rich, image, 5, 1024, 64);
    write_pages(rich, image, 5, 2040, 8);
    pcow_close(image);
}

static void load(struct rich *rich)
{
    int fd = open(IMAGE, O_RDONLY);
    struct stat st;

    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    rich->size = (uint64_t)st.st_size;
    rich->bytes = malloc(rich->size);
    assert_non_null(rich->bytes);
    assert_int_equal(pread(fd, rich->bytes, rich->size, 0), rich->size);
    close(fd);
    for (uint64_t slab = 1; slab < rich->size >> SLAB_BITS && slab < 64; slab++) {
        uint64_t word;

        memcpy(&word, rich->bytes + owner_offset(slab), sizeof word);
        memcpy(&rich->valid[slab], rich->bytes + bitmap_offset(slab), sizeof rich->valid[slab]);
        rich->owner[slab] = owner_decode(word);
        rich->slabs = word ? slab + 1 : rich->slabs;
    }
    /* Behind the last one that is used there is nothing: a shorter file is quicker to try. */
    rich->size = rich->slabs << SLAB_BITS;
}

struct rich *rich_make(bool mirror)
{
    struct rich *rich = calloc(1, sizeof *rich);
    struct pcow_create_options options = {.virtual_size = RICH_SIZE,
                                          .cluster_size = 4096,
                                          .no_mirror = !mirror},
                               fork = {.base_snapshot = "first"};
    char base[512], image_path[512];
    uint8_t bytes[PCOW_PAGE_SIZE];
    pcow_image *image;

    assert_non_null(rich);
    snprintf(base, sizeof base, "%s", scratch("base.pcow"));
    snprintf(image_path, sizeof image_path, "%s", IMAGE);
    image = must_create(base, RICH_SIZE, 4096, NULL);
    memset(bytes, 0xba, sizeof bytes);
    for (uint64_t page = 0; page < RICH_PAGES; page++)
        MUST(pcow_write(image, page * PCOW_PAGE_SIZE, bytes, sizeof bytes, &error));
    pcow_close(image);
    options.base = base;
    MUST(pcow_create(image_path, &options, &error));
    image = must_open(image_path, PCOW_OPEN_WRITE);
    fill(rich, image);
    fork.base = image_path;
    MUST(pcow_create(scratch("fork.pcow"), &fork, &error));
    /* That has marked the snapshot, and left it to the next writer to copy the page. */
    if (mirror)
        pcow_close(must_open(image_path, PCOW_OPEN_WRITE));
    load(rich);
    return rich;
}

void rich_free(struct rich *rich)
{
    free(rich->bytes);
    free(rich);
}

void rich_put_back(const struct rich *rich)
{
    int fd = open(IMAGE, O_RDWR | O_TRUNC);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)rich->size), 0);
    for (uint64_t at = 0; at < rich->size; at += PCOW_PAGE_SIZE) {
        const uint8_t *page = rich->bytes + at;

        if (page[0] || memcmp(page, page + 1, PCOW_PAGE_SIZE - 1))
            assert_int_equal(pwrite(fd, page, PCOW_PAGE_SIZE, (off_t)at), PCOW_PAGE_SIZE);
    }
    close(fd);
    unlink(scratch("image.pcow.rescue"));
    unlink(scratch("image.pcow.rescue-2"));
}

uint64_t rich_data(const struct rich *rich)
{
    uint64_t bytes = 0;

    for (uint32_t id = 1; id <= RICH_LAYERS; id++)
        for (uint64_t page = 0; page < RICH_PAGES && !rich->layer[id].dead; page++)
            bytes += rich->layer[id].page[page] * PCOW_PAGE_SIZE;
    return bytes;
}

uint64_t rich_states(const struct rich *rich)
{
    uint64_t bytes = 0;

    for (uint32_t id = 1; id <= RICH_LAYERS; id++)
        bytes += rich->layer[id].state_size;
    return bytes;
}

uint64_t rich_behind(const struct rich *rich, uint64_t length)
{
    bool state_lost[RICH_LAYERS + 1] = {false};
    uint64_t bytes = 0;

    for (uint64_t slab = 1; slab < rich->slabs; slab++) {
        const struct owner *owner = &rich->owner[slab];
        const struct rich_layer *layer = &rich->layer[owner->kind ? owner->layer : 0];
        uint64_t start = slab << SLAB_BITS, first = (uint64_t)owner->number << SLAB_BITS;

        for (uint64_t at = 0; at < PCOW_SLAB_SIZE; at += PCOW_PAGE_SIZE)
            if (owner->kind == OWNER_DATA && layer->page[(first + at) / PCOW_PAGE_SIZE]
                && start + at + PCOW_PAGE_SIZE > length)
                bytes += PCOW_PAGE_SIZE;
        if (owner->kind == OWNER_STATE && first < layer->state_size) {
            uint64_t rest = layer->state_size - first;

            if (start + (rest < PCOW_SLAB_SIZE ? rest : PCOW_SLAB_SIZE) > length)
                state_lost[owner->layer] = true;
        }
    }
    for (uint32_t id = 1; id <= RICH_LAYERS; id++)
        bytes += state_lost[id] ? rich->layer[id].state_size : 0;
    return bytes;
}

void rich_expect_rest(const struct rich *rich, uint64_t length)
{
    for (uint64_t slab = 1; slab < rich->slabs; slab++) {
        const struct owner *owner = &rich->owner[slab];
        const struct rich_layer *layer = &rich->layer[owner->kind ? owner->layer : 0];
        pcow_image *image;

        if (owner->kind != OWNER_DATA)
            continue;
        MUST(pcow_open(scratch("image.pcow"), 0, layer->name, &image, &error));
        for (unsigned i = 0; i < PAGES_PER_SLAB; i++) {
            uint64_t page = (uint64_t)owner->number * PAGES_PER_SLAB + i;
            uint8_t expected[PCOW_PAGE_SIZE];

            if (!layer->page[page] || (slab << SLAB_BITS) + (i + 1) * PCOW_PAGE_SIZE > length)
                continue;
            rich_page(owner->layer, page, expected);
            assert_reads(image, page * PCOW_PAGE_SIZE, expected, sizeof expected);
        }
        pcow_close(image);
    }
}

/* ---- what each view should read -------------------------------------------------------------- */

static void expected_page(const struct rich *rich, uint32_t view, uint64_t page,
                          uint8_t content[PCOW_PAGE_SIZE])
{
    for (uint32_t id = view; id; id = rich->layer[id].parent)
        if (rich->layer[id].page[page]) {
            rich_page(id, page, content);
            return;
        }
    memset(content, 0xba, PCOW_PAGE_SIZE);
}

static bool reads_right(const struct rich *rich, pcow_image *image, uint32_t view)
{
    uint8_t content[PCOW_PAGE_SIZE], expected[PCOW_PAGE_SIZE];

    for (uint64_t page = 0; page < RICH_PAGES; page++) {
        expected_page(rich, view, page, expected);
        if (pcow_read(image, page * PCOW_PAGE_SIZE, content, sizeof content, NULL)
            || memcmp(content, expected, sizeof expected))
            return false;
    }
    return true;
}

static bool state_is_right(const struct rich *rich, pcow_image *image, uint32_t id)
{
    uint64_t size = rich->layer[id].state_size;
    uint8_t *found = malloc(size + 1), *expected = malloc(size + 1);
    bool right;

    assert_true(found && expected);
    rich_state(id, size, expected);
    right = !size
            || (pcow_snapshot_read_state(image, rich->layer[id].name, 0, found, size, NULL) == 0
                && memcmp(found, expected, size) == 0);
    free(found);
    free(expected);
    return right;
}

static bool view_is_right(const struct rich *rich, const char *path, const char *name,
                          uint32_t id)
{
    pcow_image *image;
    bool right;

    if (pcow_open(path, 0, name, &image, NULL))
        return false;
    right = reads_right(rich, image, id)
            && (!name || state_is_right(rich, image, id));
    pcow_close(image);
    return right;
}

bool rich_is_right(const struct rich *rich)
{
    char image[512];
    bool right = true;

    snprintf(image, sizeof image, "%s", IMAGE);
    for (uint32_t id = 1; id <= RICH_LAYERS && right; id++)
        if (!rich->layer[id].dead)
            right = view_is_right(rich, image, rich->layer[id].name, id);
    return right && view_is_right(rich, scratch("fork.pcow"), NULL, 1);
}
