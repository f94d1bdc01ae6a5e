/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Pages that have become own and are still mapped to where an older layer holds them: what a full
 * pool leaves half done must be mapped anew before a merge gives the older pages back, or the guest
 * loads what is in their place then.
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "chain/chain.h"
#include "chain/reclaim.h"
#include "monitor/engine_minor.h"
#include "monitor/monitor.h"

#define SLABS 8u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define BLOCK (64 * 4096u)
#define FREE_PAGES 170u                /* less than a slab, more than a block */

static int pool_setup(void **state)
{
    return pool_mount(state, "32m");
}

/* Nearly full: some pages are left. */
static void fill_but(unsigned pages)
{
    struct statvfs fs;

    pool_fill();
    assert_int_equal(statvfs(pool_directory(), &fs), 0);
    assert_int_equal(truncate(path_in_pool("filler"), 0), 0);
    pool_fill();
    for (;;) {
        struct statvfs now;
        char filler[600];
        FILE *file;
        long size;

        assert_int_equal(statvfs(pool_directory(), &now), 0);
        if (now.f_bavail >= pages)
            break;
        snprintf(filler, sizeof filler, "%s", path_in_pool("filler"));
        file = fopen(filler, "re");
        assert_non_null(file);
        fseek(file, 0, SEEK_END);
        size = ftell(file);
        fclose(file);
        assert_int_equal(truncate(filler, size - 4096), 0);
    }
}

/* Blocks of each slab by turns of two snapshots. */
static pcow_image *make_image(void)
{
    pcow_image *image = must_create(path_in_pool("top.pcow"), SIZE, 0, NULL);
    unsigned char *bytes = malloc(SIZE);

    assert_non_null(bytes);
    for (unsigned layer = 1; layer <= 2; layer++) {
        char name[8];

        memset(bytes, (int)layer * 0x11, BLOCK);
        for (uint64_t at = layer == 1 ? 0 : BLOCK; at < 2 * PCOW_SLAB_SIZE;
             at += layer == 1 ? BLOCK : 2 * BLOCK)
            MUST(pcow_write(image, at, bytes, BLOCK, &error));
        snprintf(name, sizeof name, "s%u", layer);
        MUST(pcow_snapshot_create(image, name, &error));
    }
    free(bytes);
    return image;
}

static unsigned stale_pages(const pcow_map *map, uint64_t guest_slab)
{
    unsigned stale = 0;
    struct page_set own;

    chain_own_pages(map->image, guest_slab, &own);
    for (unsigned page = 0; page < PAGES_PER_SLAB; page++)
        stale += page_set_has(&own, page) && !page_set_has(&map->slabs[guest_slab].writable, page);
    return stale;
}

/* The ways in which a slab is made own as a whole. */
enum way {
    /* mappings are short, and the slab cannot be in minor mode */
    SCATTERED,
    BY_THE_THREAD,                     /* a hot slab */
    ON_A_TRAP,                         /* the rest of it, or mappings are short */
    WAYS
};

static void make_half_own(pcow_map *map, enum way way)
{
    unsigned char *memory = pcow_map_address(map);
    struct minor *minor = map->of_engine;
    int fd = minor ? minor->fd : -1;

    switch (way) {
    case SCATTERED:
        /* Engine minor would take it, and the kernel refuses. */
        map->vma_budget = map->vmas + 1;
        if (minor)
            __atomic_store_n(&minor->fd, -1, __ATOMIC_SEQ_CST);
        memory[7 * 4096] = 0x33;
        if (minor)
            __atomic_store_n(&minor->fd, fd, __ATOMIC_SEQ_CST);
        break;
    case BY_THE_THREAD:
        memory[7 * 4096] = 0x33;
        chain_claim(map->image->chain, 0);
        assert_int_not_equal(layout_own(map, 0, 0, PAGES_PER_SLAB, NULL), 0);
        chain_release(map->image->chain, 0);
        break;
    default:
        map->vma_budget = map->vmas + 1;
        memory[7 * 4096] = 0x33;
        break;
    }
}

static void test_half_own(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (enum way way = 0; way < WAYS; way++) {
            unsigned char *bytes = malloc(SIZE), *memory;
            pcow_image *image = make_image();
            pcow_map *map = must_map_by(image, engine, 0);

            assert_non_null(bytes);
            memory = pcow_map_address(map);
            fill_but(FREE_PAGES);
            make_half_own(map, way);
            if (map->engine->number == engine
                && (way == BY_THE_THREAD || engine == PCOW_ENGINE_MINOR))
                assert_true(stale_pages(map, 0) > 0 || way == ON_A_TRAP);
            assert_true(stale_pages(map, 0) == 0 || slab_is_stale(&map->slabs[0].status));
            assert_int_equal(truncate(path_in_pool("filler"), 0), 0);
            /* Merged into the active layer: what that holds as well is given back. */
            MUST(pcow_snapshot_delete(image, "s2", NULL, &error));
            MUST(pcow_reclaim(image, NULL, &error));
            MUST(pcow_read(image, 0, bytes, SIZE, &error));
            for (uint64_t i = 0; i < SIZE; i += 512)
                if (memory[i] != bytes[i])
                    fail_msg("engine %d, way %d: byte %llu is %02x in the image, and the guest "
                             "loads %02x",
                             (int)engine, (int)way, (unsigned long long)i, bytes[i], memory[i]);
            /* And what is made own next to it takes nothing back that is stale still. */
            memory[PCOW_SLAB_SIZE / 2] = 0x44;
            assert_int_equal(memory[PCOW_SLAB_SIZE / 2], 0x44);
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(path_in_pool("top.pcow"));
            unlink(path_in_pool("top.pcow"));
            unlink(path_in_pool("filler"));
            free(bytes);
        }
}

/*
 * A page that is mapped later does not take back that others are stale; when all are mapped,
 * nothing is.
 */
static void test_stale_ends(void **state)
{
    (void)state;
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    unsigned char *memory = pcow_map_address(map);

    memory[0] = 0x33;
    assert_false(slab_is_stale(&map->slabs[0].status));
    chain_claim(map->image->chain, 0);
    assert_int_equal(layout_own(map, 0, 100, 20, NULL), 0);
    chain_release(map->image->chain, 0);
    assert_true(slab_is_stale(&map->slabs[0].status));
    memory[300 * 4096] = 0x33;
    assert_true(slab_is_stale(&map->slabs[0].status));
    for (unsigned page = 100; page < 120; page++)
        memory[page * 4096] = 0x33;
    assert_false(slab_is_stale(&map->slabs[0].status));
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path_in_pool("top.pcow"));
}

/*
 * Nor does one of the layer above take it back once they are frozen, although it has none of these.
 */
static void test_stale_and_frozen(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        unsigned char *bytes = malloc(SIZE), *memory;
        pcow_image *image = make_image();
        pcow_map *map = must_map_by(image, engine, 0);

        assert_non_null(bytes);
        memory = pcow_map_address(map);
        memory[0] = 0x33;
        assert_int_equal(memory[100 * 4096], 0x22);
        chain_claim(map->image->chain, 0);
        assert_int_equal(layout_own(map, 0, 100, 20, NULL), 0);
        chain_release(map->image->chain, 0);
        MUST(pcow_snapshot_create(image, "s3", &error));
        memory[300 * 4096] = 0x44;
        MUST(pcow_snapshot_delete(image, "s2", NULL, &error));
        MUST(pcow_reclaim(image, NULL, &error));
        MUST(pcow_read(image, 0, bytes, SIZE, &error));
        for (uint64_t i = 0; i < SIZE; i += 512)
            if (memory[i] != bytes[i])
                fail_msg("engine %d: byte %llu is %02x in the image, and the guest loads %02x",
                         (int)engine, (unsigned long long)i, bytes[i], memory[i]);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(path_in_pool("top.pcow"));
        unlink(path_in_pool("top.pcow"));
        free(bytes);
    }
}

#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_half_own),
        POOL_TEST(test_stale_ends),
        POOL_TEST(test_stale_and_frozen),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
