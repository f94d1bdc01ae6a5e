/* SPDX-License-Identifier: BSD-3-Clause */
/* Creating and opening: options, locks, chains, and files that are not what they should be. */
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/format2.h"
#include "image/image.h"

static int create(const char *name, struct pcow_create_options options, struct pcow_error *error)
{
    return pcow_create(scratch(name), &options, error);
}

static void test_create_refuses_bad_options(void **state)
{
    struct stat st;

    (void)state;
    MUST_FAIL(-EINVAL, create("a", (struct pcow_create_options){0}, &error));
    MUST_FAIL(-EINVAL, create("a", (struct pcow_create_options){.virtual_size = MIB}, &error));
    MUST_FAIL(-EFBIG,
              create("a", (struct pcow_create_options){.virtual_size = PCOW_MAX_VIRTUAL_SIZE * 2},
                     &error));
    MUST_FAIL(-EINVAL,
              create("a",
                     (struct pcow_create_options){.virtual_size = 2 * MIB, .cluster_size = 5000},
                     &error));
    MUST_FAIL(-EINVAL,
              create("a",
                     (struct pcow_create_options){.virtual_size = 2 * MIB, .cluster_size = 4 * MIB},
                     &error));
    MUST_FAIL(-ENOENT,
              create("a", (struct pcow_create_options){.base = scratch("missing")}, &error));
    MUST_FAIL(-EXDEV, create("a", (struct pcow_create_options){.base = "/etc/passwd"}, &error));
    assert_int_equal(stat(scratch("a"), &st), -1);
    MUST(create("a", (struct pcow_create_options){.virtual_size = 2 * MIB}, &error));
    MUST_FAIL(-EEXIST, create("a", (struct pcow_create_options){.virtual_size = 2 * MIB}, &error));
}

static void test_thin_overlay_is_small(void **state)
{
    pcow_image *image = must_create(scratch("base"), 1024 * MIB, 0, NULL);
    struct pcow_info info;

    (void)state;
    pcow_close(image);
    image = must_create(scratch("top"), 0, 0, scratch("base"));
    pcow_get_info(image, &info);
    assert_int_equal(info.virtual_size, 1024 * MIB);
    assert_true(info.allocated_size <= 64 * KIB);
    assert_int_equal(info.chain_depth, 2);
    assert_string_equal(info.base_name, "base");
    pcow_close(image);
}

/*
 * In another process: open file description locks of one process do not meet its own other
 * descriptors' in surprising ways.
 */
static int open_in_child(const char *path, unsigned flags)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        pcow_image *image;
        int ret = pcow_open(path, flags, NULL, &image, NULL);

        pcow_close(image);
        _exit(-ret);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return -WEXITSTATUS(status);
}

static void test_locks(void **state)
{
    pcow_image *image = must_create(scratch("base"), 4 * MIB, 0, NULL), *second;

    (void)state;
    MUST_FAIL(-EBUSY, pcow_open(scratch("base"), PCOW_OPEN_WRITE, NULL, &second, &error));
    assert_int_equal(open_in_child(scratch("base"), PCOW_OPEN_WRITE), -EBUSY);
    assert_int_equal(open_in_child(scratch("base"), 0), -EBUSY);
    assert_int_equal(open_in_child(scratch("base"), PCOW_OPEN_FORCE_SHARE), 0);
    pcow_close(image);
    image = must_create(scratch("top"), 0, 0, scratch("base"));
    /* Whoever has an overlay open holds its base: readable, not writable. */
    assert_int_equal(open_in_child(scratch("base"), PCOW_OPEN_WRITE), -EBUSY);
    assert_int_equal(open_in_child(scratch("base"), 0), 0);
    pcow_close(image);
    assert_int_equal(open_in_child(scratch("base"), PCOW_OPEN_WRITE), 0);
}

static void test_sealed_image_has_no_writer(void **state)
{
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 0, NULL);

    (void)state;
    MUST(pcow_seal(image, &error));
    pcow_close(image);
    MUST_FAIL(-EROFS, pcow_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &image, &error));
    pcow_close(must_open(scratch("t"), 0));
    MUST(pcow_unseal(scratch("t"), &error));
    pcow_close(must_open(scratch("t"), PCOW_OPEN_WRITE));
}

static void test_base_changed_missing_or_replaced(void **state)
{
    pcow_image *image;

    (void)state;
    pcow_close(must_create(scratch("base"), 4 * MIB, 0, NULL));
    pcow_close(must_create(scratch("top"), 0, 0, scratch("base")));
    image = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_write(image, 0, "x", 1, &error));
    pcow_close(image);
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), 0, NULL, &image, &error));
    image = must_open(scratch("top"), PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    MUST(pcow_rebase(image, scratch("base"), NULL, true, NULL, NULL, &error));
    pcow_close(image);
    pcow_close(must_open(scratch("top"), 0));

    assert_int_equal(rename(scratch("base"), scratch("elsewhere")), 0);
    MUST_FAIL(-ENOENT, pcow_open(scratch("top"), 0, NULL, &image, &error));
    assert_int_equal(symlink("elsewhere", scratch("base")), 0);
    MUST_FAIL(-ELOOP, pcow_open(scratch("top"), 0, NULL, &image, &error));
    unlink(scratch("base"));
    assert_int_equal(mkfifo(scratch("base"), 0600), 0);
    MUST_FAIL(-EMEDIUMTYPE, pcow_open(scratch("top"), 0, NULL, &image, &error));
    unlink(scratch("base"));
    pcow_close(must_create(scratch("base"), 4 * MIB, 0, NULL));
    image = must_open(scratch("top"), PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    MUST_FAIL(-ENOLINK, pcow_read(image, 0, (char[1]){0}, 1, &error));
    pcow_close(image);
}

static void test_another_image_in_place_of_the_base(void **state)
{
    pcow_image *image;

    (void)state;
    pcow_close(must_create(scratch("base"), 4 * MIB, 0, NULL));
    pcow_close(must_create(scratch("top"), 0, 0, scratch("base")));
    unlink(scratch("base"));
    pcow_close(must_create(scratch("base"), 4 * MIB, 0, NULL));
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), 0, NULL, &image, &error));
}

/* What a guest's QEMU can do to the header of its image, with right checksums. */
static void forge_base(const char *name, const char *base, const uint8_t uuid[PCOW_UUID_SIZE],
                       uint32_t flags)
{
    pcow_image *image = must_open(scratch(name), PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    struct base_record record = {.format = 2, .flags = flags};

    strcpy(record.name, base);
    memcpy(record.uuid, uuid, sizeof record.uuid);
    record.crc = base_record_crc(&record);
    MUST(header_set_base(image, &record, &error));
    pcow_close(image);
}

static int rebase_unsafe(const char *base)
{
    pcow_image *image = must_open(scratch("top"), PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    struct pcow_error why;
    int ret = pcow_rebase(image, scratch(base), NULL, true, NULL, NULL, &why);

    pcow_close(image);
    return ret;
}

/* What is known of the base stays known: an image that could be opened still can. */
static void test_unsafe_rebase_without_a_look(void **state)
{
    pcow_image *image, *writer;

    (void)state;
    pcow_close(must_create(scratch("lowest"), 4 * MIB, 0, NULL));
    pcow_close(must_create(scratch("base"), 0, 0, scratch("lowest")));
    pcow_close(must_create(scratch("top"), 0, 0, scratch("base")));
    writer = must_open(scratch("base"), PCOW_OPEN_WRITE);
    assert_int_equal(rebase_unsafe("base"), -EBUSY);
    pcow_close(writer);
    pcow_close(must_open(scratch("top"), 0));

    assert_int_equal(rename(scratch("lowest"), scratch("away")), 0);
    assert_int_equal(rebase_unsafe("base"), -ENOENT);
    assert_int_equal(rename(scratch("away"), scratch("lowest")), 0);
    pcow_close(must_open(scratch("top"), 0));

    assert_int_equal(rebase_unsafe("renamed"), 0);
    assert_int_equal(rename(scratch("base"), scratch("renamed")), 0);
    pcow_close(must_open(scratch("top"), 0));
    writer = must_open(scratch("renamed"), PCOW_OPEN_WRITE);
    MUST(pcow_write(writer, 0, "x", 1, &error));
    pcow_close(writer);
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), 0, NULL, &image, &error));
    assert_int_equal(rebase_unsafe("other"), 0);
    pcow_close(must_create(scratch("other"), 4 * MIB, 0, NULL));
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), 0, NULL, &image, &error));
}

/* It stays on the snapshot that it stood on. */
static void test_unsafe_rebase_of_one_on_a_snapshot(void **state)
{
    struct pcow_create_options options = {.base = scratch("base"), .base_snapshot = "s"};
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL), *image;

    (void)state;
    MUST(pcow_write(base, 0, "then", 4, &error));
    MUST(pcow_snapshot_create(base, "s", &error));
    MUST(pcow_write(base, 0, "now.", 4, &error));
    pcow_close(base);
    MUST(create("top", options, &error));
    assert_int_equal(rebase_unsafe("renamed"), 0);
    assert_int_equal(rename(scratch("base"), scratch("renamed")), 0);
    image = must_open(scratch("top"), 0);
    assert_reads(image, 0, "then", 4);
    pcow_close(image);
}

static void test_base_that_nobody_has_looked_at(void **state)
{
    static const uint8_t unknown[PCOW_UUID_SIZE], guessed[PCOW_UUID_SIZE] = {1};
    struct pcow_create_options options = {
        .base = scratch("victim"), .base_unchecked = true, .virtual_size = 4 * MIB};
    pcow_image *image;

    (void)state;
    MUST(create("top", options, &error));
    image = must_create(scratch("victim"), 4 * MIB, 0, NULL);
    MUST(pcow_write(image, 0, "secret", 6, &error));
    pcow_close(image);
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), 0, NULL, &image, &error));
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), PCOW_OPEN_WRITE, NULL, &image, &error));
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), PCOW_OPEN_FORCE_SHARE, NULL, &image, &error));
    image = must_open(scratch("top"), PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    MUST(pcow_rebase(image, scratch("victim"), NULL, true, NULL, NULL, &error));
    pcow_close(image);
    image = must_open(scratch("top"), PCOW_OPEN_WRITE);
    assert_reads(image, 0, "secret", 6);
    pcow_close(image);

    pcow_close(must_create(scratch("hostile"), 4 * MIB, 0, NULL));
    for (uint32_t flags = 0; flags <= BASE_UNCHECKED; flags++) {
        forge_base("hostile", "victim", unknown, flags);
        MUST_FAIL(-ESTALE, pcow_open(scratch("hostile"), 0, NULL, &image, &error));
        forge_base("hostile", "victim", guessed, flags);
        MUST_FAIL(-ESTALE, pcow_open(scratch("hostile"), 0, NULL, &image, &error));
    }
}

/* As one that a service has put there, for root to work on another file than it named. */
static void test_link_of_another_user(void **state)
{
    pcow_image *image;

    (void)state;
    if (geteuid())
        skip();
    pcow_close(must_create(scratch("image"), 4 * MIB, 0, NULL));
    assert_int_equal(mkdir(scratch("beside"), 0700), 0);
    assert_int_equal(symlink("../image", scratch("beside/own")), 0);
    assert_int_equal(symlink("beside/own", scratch("twice")), 0);
    pcow_close(must_open(scratch("twice"), PCOW_OPEN_WRITE));
    assert_int_equal(lchown(scratch("beside/own"), 65534, 65534), 0);
    MUST_FAIL(-ELOOP, pcow_open(scratch("beside/own"), 0, NULL, &image, &error));
    MUST_FAIL(-ELOOP, pcow_open(scratch("twice"), PCOW_OPEN_WRITE, NULL, &image, &error));
    MUST_FAIL(-ELOOP, pcow_check(scratch("twice"), 0, NULL, NULL, &(struct pcow_check_result){0},
                                 &error));
    assert_int_equal(symlink("round", scratch("round")), 0);
    MUST_FAIL(-ELOOP, pcow_open(scratch("round"), 0, NULL, &image, &error));
    unlink(scratch("beside/own"));
    rmdir(scratch("beside"));
}

static void uuid_of(const char *name, uint8_t uuid[PCOW_UUID_SIZE])
{
    pcow_image *image = must_open(scratch(name), PCOW_OPEN_NO_BASE);
    struct pcow_info info;

    pcow_get_info(image, &info);
    memcpy(uuid, info.uuid, PCOW_UUID_SIZE);
    pcow_close(image);
}

static void test_chain_that_leads_back_to_itself(void **state)
{
    uint8_t uuid[PCOW_UUID_SIZE];
    pcow_image *image;

    (void)state;
    pcow_close(must_create(scratch("a"), 4 * MIB, 0, NULL));
    pcow_close(must_create(scratch("b"), 0, 0, scratch("a")));
    image = must_open(scratch("a"), PCOW_OPEN_WRITE);
    MUST_FAIL(-EBUSY, pcow_rebase(image, scratch("b"), NULL, true, NULL, NULL, &error));
    pcow_close(image);
    pcow_close(must_open(scratch("b"), 0));
    uuid_of("a", uuid);
    forge_base("b", "a", uuid, BASE_UNCHECKED);
    uuid_of("b", uuid);
    forge_base("a", "b", uuid, BASE_UNCHECKED);
    MUST_FAIL(-ELOOP, pcow_open(scratch("b"), 0, NULL, &image, &error));
}

static void test_deep_chain(void **state)
{
    unsigned char bytes[PCOW_MAX_CHAIN_DEPTH];
    pcow_image *image = must_create(scratch("f0"), 4 * MIB, 0, NULL);
    uint8_t uuid[PCOW_UUID_SIZE];
    char path[600], base[600];

    (void)state;
    for (unsigned i = 0; i < PCOW_MAX_CHAIN_DEPTH; i++) {
        bytes[i] = (unsigned char)(i + 1);
        MUST(pcow_write(image, i * 4096, &bytes[i], 1, &error));
        pcow_close(image);
        if (i + 1 == PCOW_MAX_CHAIN_DEPTH)
            break;
        snprintf(base, sizeof base, "%s/f%u", scratch_directory(), i);
        snprintf(path, sizeof path, "%s/f%u", scratch_directory(), i + 1);
        image = must_create(path, 0, 0, base);
    }
    image = must_open(path, 0);
    for (unsigned i = 0; i < PCOW_MAX_CHAIN_DEPTH; i++)
        assert_reads(image, i * 4096, &bytes[i], 1);
    pcow_close(image);
    /* Nothing is made that cannot be opened; unless nobody looks. */
    MUST_FAIL(-ELOOP, create("last", (struct pcow_create_options){.base = path}, &error));
    MUST_FAIL(-ENOENT, pcow_open(scratch("last"), 0, NULL, &image, &error));
    image = must_create(scratch("other"), 4 * MIB, 0, NULL);
    MUST_FAIL(-ELOOP, pcow_rebase(image, path, NULL, false, NULL, NULL, &error));
    pcow_close(image);
    MUST(create(
        "last",
        (struct pcow_create_options){.base = path, .base_unchecked = true, .virtual_size = 4 * MIB},
        &error));
    snprintf(base, sizeof base, "f%u", PCOW_MAX_CHAIN_DEPTH - 1);
    uuid_of(base, uuid);
    forge_base("last", base, uuid, BASE_UNCHECKED);
    MUST_FAIL(-ELOOP, pcow_open(scratch("last"), 0, NULL, &image, &error));
}

/* ---- damaged and hostile files --------------------------------------------------------------- */

static void patch(const char *name, uint64_t offset, const void *bytes, size_t length)
{
    int fd = open(scratch(name), O_WRONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, length, (off_t)offset), (ssize_t)length);
    close(fd);
}

static void make_victim(void)
{
    unlink(scratch("v"));
    pcow_image *image = must_create(scratch("v"), 8 * MIB, 0, NULL);

    MUST(pcow_write(image, MIB, "data", 4, &error));
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST(pcow_write(image, 3 * MIB, "more", 4, &error));
    pcow_close(image);
}

static void test_every_flipped_bit_of_the_metadata_is_noticed_or_harmless(void **state)
{
    const struct {
        uint64_t from, to;
    } covered[] = {{0, 512},
                   {512, 560},
                   {SLAB_TABLE_OFFSET, SLAB_TABLE_OFFSET + 24},
                   {LAYER_TABLE_OFFSET, LAYER_TABLE_OFFSET + 40},
                   {LAYER_TABLE_OFFSET + 40, LAYER_TABLE_OFFSET + 256}};

    (void)state;
    make_victim();
    for (size_t i = 0; i < sizeof covered / sizeof covered[0]; i++)
        for (uint64_t offset = covered[i].from; offset < covered[i].to; offset++) {
            unsigned char byte, flipped;
            int fd = open(scratch("v"), O_RDWR | O_CLOEXEC);
            struct pcow_error error = {0};
            pcow_image *image;
            int ret;

            assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
            flipped = byte ^ (unsigned char)(1u << offset % 8);
            assert_int_equal(pwrite(fd, &flipped, 1, (off_t)offset), 1);
            ret = pcow_open(scratch("v"), 0, NULL, &image, &error);
            if (ret == 0)
                fail_msg("a flipped bit at byte %llu was not noticed", (unsigned long long)offset);
            assert_non_null(strstr(error.message, scratch("v")));
            assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
            close(fd);
        }
    pcow_close(must_open(scratch("v"), 0));
}

static void test_files_cut_short(void **state)
{
    pcow_image *image;

    (void)state;
    for (uint64_t length = 0; length < 4 * MIB;
         length = length < 8192 ? length + 1000 : length + 300 * KIB + 1) {
        make_victim();
        assert_int_equal(truncate(scratch("v"), (off_t)length), 0);
        assert_true(pcow_open(scratch("v"), 0, NULL, &image, NULL) < 0);
    }
    /*
     * Cut at a slab border: the slabs behind the end are simply not there, so this one must be seen
     * by check.
     */
    make_victim();
    assert_int_equal(truncate(scratch("v"), 2 * MIB), 0);
    if (pcow_open(scratch("v"), 0, NULL, &image, NULL) == 0)
        pcow_close(image);
}

static void test_unknown_features(void **state)
{
    struct header header;
    pcow_image *image;
    int fd;

    (void)state;
    make_victim();
    fd = open(scratch("v"), O_RDWR | O_CLOEXEC);
    assert_int_equal(pread(fd, &header, sizeof header, 0), sizeof header);
    header.read_only_compatible_features |= 1 << 7;
    header.crc = header_crc(&header);
    patch("v", 0, &header, sizeof header);
    MUST_FAIL(-ENOTSUP, pcow_open(scratch("v"), PCOW_OPEN_WRITE, NULL, &image, &error));
    pcow_close(must_open(scratch("v"), 0));
    header.incompatible_features = 4;
    header.crc = header_crc(&header);
    patch("v", 0, &header, sizeof header);
    MUST_FAIL(-ENOTSUP, pcow_open(scratch("v"), 0, NULL, &image, &error));
    header.incompatible_features = 0;
    header.compatible_features = UINT64_MAX;
    header.read_only_compatible_features = 0;
    header.crc = header_crc(&header);
    patch("v", 0, &header, sizeof header);
    pcow_close(must_open(scratch("v"), PCOW_OPEN_WRITE));
    header.version = 3;
    header.crc = header_crc(&header);
    patch("v", 0, &header, sizeof header);
    MUST_FAIL(-ENOTSUP, pcow_open(scratch("v"), 0, NULL, &image, &error));
    close(fd);
}

static void test_paths_in_a_header_are_refused(void **state)
{
    static const char *const hostile[] = {"/etc/passwd", "../f", ".", "..", "", "a/b"};
    struct header header;
    pcow_image *image;
    int fd;

    (void)state;
    pcow_close(must_create(scratch("base"), 4 * MIB, 0, NULL));
    pcow_close(must_create(scratch("v"), 0, 0, scratch("base")));
    fd = open(scratch("v"), O_RDWR | O_CLOEXEC);
    for (size_t i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
        assert_int_equal(pread(fd, &header, sizeof header, 0), sizeof header);
        memset(header.base[0].name, 0, sizeof header.base[0].name);
        strcpy(header.base[0].name, hostile[i]);
        header.base[0].crc = base_record_crc(&header.base[0]);
        patch("v", 0, &header, sizeof header);
        MUST_FAIL(-EBADMSG, pcow_open(scratch("v"), 0, NULL, &image, &error));
    }
    memset(header.base[0].name, 'x', sizeof header.base[0].name);
    header.base[0].crc = base_record_crc(&header.base[0]);
    patch("v", 0, &header, sizeof header);
    MUST_FAIL(-EBADMSG, pcow_open(scratch("v"), 0, NULL, &image, &error));
    close(fd);
}

static void test_foreign_files(void **state)
{
    pcow_image *image;
    int fd = open(scratch("v"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

    (void)state;
    assert_int_equal(ftruncate(fd, 4 * MIB), 0);
    MUST_FAIL(-EMEDIUMTYPE, pcow_open(scratch("v"), 0, NULL, &image, &error));
    assert_int_equal(pwrite(fd, "QFI\xfb", 4, 0), 4);
    MUST_FAIL(-EMEDIUMTYPE, pcow_open(scratch("v"), PCOW_OPEN_WRITE, NULL, &image, &error));
    close(fd);
    MUST_FAIL(-EMEDIUMTYPE, pcow_open("/dev/null", 0, NULL, &image, &error));
    assert_true(pcow_open(scratch_directory(), 0, NULL, &image, NULL) < 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_create_refuses_bad_options),
        TEST(test_thin_overlay_is_small),
        TEST(test_locks),
        TEST(test_sealed_image_has_no_writer),
        TEST(test_base_changed_missing_or_replaced),
        TEST(test_another_image_in_place_of_the_base),
        TEST(test_base_that_nobody_has_looked_at),
        TEST(test_unsafe_rebase_without_a_look),
        TEST(test_unsafe_rebase_of_one_on_a_snapshot),
        TEST(test_link_of_another_user),
        TEST(test_chain_that_leads_back_to_itself),
        TEST(test_deep_chain),
        TEST(test_every_flipped_bit_of_the_metadata_is_noticed_or_harmless),
        TEST(test_files_cut_short),
        TEST(test_unknown_features),
        TEST(test_paths_in_a_header_are_refused),
        TEST(test_foreign_files),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
