/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What an image says of itself without being opened, and how far it can grow: no store makes it
 * larger than that.
 */
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SIZE (12 * MIB)

static struct pcow_summary summarize(const char *path)
{
    int directory = open(scratch_directory(), O_RDONLY | O_DIRECTORY);
    struct pcow_summary summary;

    assert_true(directory >= 0);
    MUST(pcow_summarize(directory, strrchr(path, '/') + 1, false, &summary, &error));
    close(directory);
    return summary;
}

static void write_all(pcow_image *image, uint64_t size)
{
    static unsigned char bytes[MIB];

    memset(bytes, 0x5a, sizeof bytes);
    for (uint64_t offset = 0; offset < size; offset += sizeof bytes)
        MUST(pcow_write(image, offset, bytes, sizeof bytes, &error));
}

static void check_like_info(const char *path)
{
    struct pcow_summary summary = summarize(path);
    pcow_image *image = must_open(path, PCOW_OPEN_FORCE_SHARE);
    struct pcow_info info;

    pcow_get_info(image, &info);
    pcow_close(image);
    assert_memory_equal(info.uuid, summary.uuid, sizeof info.uuid);
    assert_int_equal(info.virtual_size, summary.virtual_size);
    assert_int_equal(info.allocated_size, summary.allocated_size);
    assert_int_equal(info.snapshots, summary.snapshots);
    assert_int_equal(info.sealed, summary.sealed);
    assert_int_equal(info.has_base, summary.has_base);
    assert_memory_equal(info.base_uuid, summary.base_uuid, sizeof info.base_uuid);
    assert_string_equal(info.base_name, summary.base_name);
    assert_true(summary.may_grow <= summary.may_grow_frozen);
}

static void test_like_info(void **state)
{
    const char *base = scratch("base.pcow"), *top = scratch("top.pcow");
    pcow_image *image;

    (void)state;
    image = must_create(base, SIZE, 64 * KIB, NULL);
    check_like_info(base);
    write_all(image, 3 * MIB);
    MUST(pcow_snapshot_create(image, "s", &error));
    write_all(image, MIB);
    check_like_info(base);
    MUST(pcow_seal(image, &error));
    pcow_close(image);
    check_like_info(base);
    assert_int_equal(0, summarize(base).may_grow);
    assert_int_equal(0, summarize(base).may_grow_frozen);
    pcow_close(must_create(top, SIZE, 64 * KIB, base));
    check_like_info(top);
    assert_int_equal(0, summarize(top).base_layer);
}

/*
 * Random work, then everything is written: the file has become no larger than was said before, at
 * each moment.
 */
static void test_growth(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        const char *path = scratch("grown.pcow");
        pcow_image *image = must_create(path, SIZE, seed % 2 ? 4 * KIB : 64 * KIB, NULL);
        uint64_t random = seed, most, left;
        static unsigned char bytes[MIB];
        struct pcow_snapshot *list;
        size_t count;
        char name[16];

        memset(bytes, 0xa5, sizeof bytes);
        for (unsigned i = 0; i < 40; i++) {
            uint64_t offset = random_next(&random) % (SIZE / 4096) * 4096, freed;

            MUST(pcow_snapshot_list(image, &list, &count, &error));
            switch (random_next(&random) % 6) {
            case 0:
                snprintf(name, sizeof name, "s%u", i);
                most = summarize(path).may_grow_frozen;
                MUST(pcow_snapshot_create(image, name, &error));
                assert_true(summarize(path).may_grow <= most);
                break;
            case 1:
                if (count)
                    MUST(pcow_snapshot_delete(image, list[random_next(&random) % count].name,
                                              &freed, &error));
                break;
            case 2:
                MUST(pcow_write_zeroes(image, offset, offset + MIB < SIZE ? MIB : SIZE - offset,
                                       &error));
                break;
            default:
                left = SIZE - offset < sizeof bytes ? SIZE - offset : sizeof bytes;
                MUST(pcow_write(image, offset, bytes,
                                (size_t)(random_next(&random) % 2 ? 4096 : left), &error));
            }
            free(list);
        }
        most = summarize(path).allocated_size + summarize(path).may_grow;
        write_all(image, SIZE);
        if (summarize(path).allocated_size > most)
            fail_msg("seed %llu: %llu bytes, and at most %llu were said", (unsigned long long)seed,
                     (unsigned long long)summarize(path).allocated_size, (unsigned long long)most);
        pcow_close(image);
        unlink(path);
    }
}

static void test_full(void **state)
{
    const char *path = scratch("full.pcow");
    pcow_image *image = must_create(path, SIZE, 64 * KIB, NULL);
    uint64_t whole = SIZE + 6 * MIB;

    (void)state;
    assert_int_equal(whole, summarize(path).may_grow + summarize(path).allocated_size);
    write_all(image, SIZE);
    assert_int_equal(whole, summarize(path).may_grow + summarize(path).allocated_size);
    assert_true(summarize(path).may_grow < 6 * MIB);
    MUST(pcow_snapshot_create(image, "s", &error));
    assert_int_equal(whole, summarize(path).may_grow_frozen);
    assert_true(summarize(path).may_grow >= SIZE);
    pcow_close(image);
}

/*
 * Who remembers what was said sees by the version that a writer has come, whatever he did: also if
 * he changed nothing, or by way of a mapping, which changes no time on tmpfs.
 */
static void test_steady(void **state)
{
    const char *path = scratch("steady.pcow");
    const struct timespec ticks = {0, 30000000};
    struct pcow_summary before, after;
    pcow_image *image = must_create(path, SIZE, 64 * KIB, NULL), *reader;

    (void)state;
    assert_false(summarize(path).steady);
    pcow_close(image);
    before = summarize(path);
    assert_true(before.steady);
    nanosleep(&ticks, NULL);
    reader = must_open(path, 0);
    after = summarize(path);
    assert_true(after.steady);
    assert_memory_equal(&before.version, &after.version, sizeof before.version);
    pcow_close(reader);
    image = must_open(path, PCOW_OPEN_WRITE);
    after = summarize(path);
    assert_false(after.steady);
    assert_true(after.version.changed > before.version.changed);
    write_all(image, MIB);
    MUST(pcow_snapshot_create(image, "s", &error));
    assert_false(summarize(path).steady);
    pcow_close(image);
    before = summarize(path);
    assert_true(before.steady);
    nanosleep(&ticks, NULL);
    pcow_close(must_open(path, PCOW_OPEN_WRITE));
    after = summarize(path);
    assert_true(after.steady);
    assert_true(after.version.changed > before.version.changed);
}

static void test_refused(void **state)
{
    int directory = open(scratch_directory(), O_RDONLY | O_DIRECTORY),
        file = open(scratch("short.pcow"), O_CREAT | O_WRONLY, 0600);
    struct pcow_summary summary;

    (void)state;
    assert_int_equal(0, symlink("short.pcow", scratch("link.pcow")));
    assert_int_equal(0, mkfifo(scratch("fifo.pcow"), 0600));
    MUST_FAIL(-ENOENT, pcow_summarize(directory, "none.pcow", false, &summary, &error));
    MUST_FAIL(-ELOOP, pcow_summarize(directory, "link.pcow", false, &summary, &error));
    MUST_FAIL(-EMEDIUMTYPE, pcow_summarize(directory, "fifo.pcow", false, &summary, &error));
    MUST_FAIL(-EMEDIUMTYPE, pcow_summarize(directory, "short.pcow", true, &summary, &error));
    pcow_close(must_create(scratch("cut.pcow"), SIZE, 64 * KIB, NULL));
    assert_int_equal(0, truncate(scratch("cut.pcow"), 65536));
    MUST_FAIL(-EBADMSG, pcow_summarize(directory, "cut.pcow", true, &summary, &error));
    close(file);
    close(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_like_info, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_growth, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_full, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_steady, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_refused, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
