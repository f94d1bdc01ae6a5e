/* SPDX-License-Identifier: BSD-3-Clause */
#include "format1_files.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put(const struct builder *b, uint64_t offset, const void *from, size_t length)
{
    assert_int_equal(pwrite(b->fd, from, length, (off_t)offset), length);
}

void put32(const struct builder *b, uint64_t offset, uint32_t value)
{
    const uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                              (uint8_t)(value >> 24)};

    put(b, offset, bytes, sizeof bytes);
}

static void put_meta(struct builder *b)
{
    b->meta = b->end;
    b->counter = 0;
    b->end += b->cluster_size;
    assert_int_equal(ftruncate(b->fd, (off_t)b->end), 0);
}

void put_super(struct builder *b, uint32_t size_field, uint32_t clusters, const char *base)
{
    b->super = b->end;
    b->segment = 0;
    put32(b, b->super, size_field);
    put32(b, b->super + 4, clusters);
    put(b, b->super + 12, "NBJL", 4);
    if (base)
        put(b, b->super + 16, base, strlen(base));
    b->end += b->cluster_size;
    put_meta(b);
}

struct builder build(const char *name, uint32_t cluster_size, uint32_t clusters, const char *base)
{
    struct builder b = {.cluster_size = cluster_size};

    unlink(scratch(name));
    b.fd = open(scratch(name), O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(b.fd >= 0);
    put_super(&b, cluster_size, clusters, base);
    return b;
}

void fill(uint8_t page[PAGE], uint32_t guest_page, uint8_t generation)
{
    for (unsigned i = 0; i < PAGE; i++)
        page[i] = (uint8_t)(guest_page * 31 + generation * 7 + i / 64);
}

void put_cluster(struct builder *b, uint32_t cluster, uint32_t bitmap, uint8_t generation)
{
    uint32_t entries = (b->cluster_size - 64) / 8, pages = b->cluster_size / PAGE;
    uint8_t page[PAGE];

    if (b->counter == entries) {
        put_meta(b);
        put32(b, b->super + 8, ++b->segment);
    }
    for (uint32_t i = 0; i < pages; i++) {
        if (bitmap == 0 || (uint64_t)bitmap >> i & 1)
            fill(page, cluster * pages + i, generation);
        else
            memset(page, 0xee, sizeof page);
        put(b, b->end + i * PAGE, page, sizeof page);
    }
    b->end += b->cluster_size;
    put32(b, b->meta + 64 + b->counter * 8, cluster);
    put32(b, b->meta + 64 + b->counter * 8 + 4, bitmap);
    put32(b, b->meta, ++b->counter);
}

pcow_image *open_1(const char *name)
{
    return must_open(scratch(name), PCOW_OPEN_FORMAT_1);
}

void expect_page(pcow_image *image, uint32_t guest_page, uint8_t generation)
{
    uint8_t expected[PAGE] = {0};

    if (generation)
        fill(expected, guest_page, generation);
    assert_reads(image, (uint64_t)guest_page * PAGE, expected, PAGE);
}

void expect_refused(const char *name, int code, const char *part)
{
    struct pcow_error error = {0};
    pcow_image *image = NULL;
    int ret = pcow_open(scratch(name), PCOW_OPEN_FORMAT_1, NULL, &image, &error);

    if (ret != code)
        fail_msg("%s: returned %d, not %d: %s", name, ret, code, error.message);
    assert_null(image);
    if (!strstr(error.message, part))
        fail_msg("'%s' does not say '%s'", error.message, part);
    assert_non_null(strstr(error.message, name));
}
