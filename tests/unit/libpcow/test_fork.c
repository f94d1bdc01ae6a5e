/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Images on snapshots of an image that somebody writes to: who keeps what from whom, and that
 * readers never see a change.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/format2.h"

static int fork_image(const char *name, const char *base, const char *snapshot,
                      struct pcow_error *error)
{
    struct pcow_create_options options = {.base = scratch(base), .base_snapshot = snapshot};

    return pcow_create(scratch(name), &options, error);
}

/* Fails with -EBUSY and says this. */
static void delete_is_refused(pcow_image *image, const char *name, const char *words)
{
    struct pcow_error error = {0};
    struct pcow_info before, after;

    pcow_get_info(image, &before);
    assert_int_equal(pcow_snapshot_delete(image, name, NULL, &error), -EBUSY);
    if (!strstr(error.message, words) || !strstr(error.message, name))
        fail_msg("'%s' is not in: %s", words, error.message);
    pcow_get_info(image, &after);
    assert_int_equal(after.generation, before.generation);
    assert_int_equal(after.snapshots, before.snapshots);
}

/* Read the text at an offset of an image or of a snapshot of it. */
static void reads(const char *path, const char *snapshot, uint64_t offset, const char *text)
{
    pcow_image *image;

    MUST(pcow_open(path, 0, snapshot, &image, &error));
    assert_reads(image, offset, text, strlen(text) + 1);
    pcow_close(image);
}

static unsigned flags_in_file(const char *name, const char *snapshot)
{
    struct layer_record record;
    unsigned flags = 0;
    int fd = open(scratch(name), O_RDONLY | O_CLOEXEC);

    for (unsigned slot = 0; slot < 32; slot++) {
        assert_int_equal(pread(fd, &record, sizeof record,
                               (off_t)(LAYER_TABLE_OFFSET + slot * LAYER_RECORD_SIZE)),
                         sizeof record);
        if ((word_value(record.state) >> 28 & 0xf) == LAYER_SNAPSHOT
            && strcmp(record.name, snapshot) == 0)
            flags = (unsigned)(word_value(record.state) >> 32 & 0xff);
    }
    close(fd);
    return flags;
}

static void test_children_keep_their_snapshot(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL);

    (void)state;
    write_text(base, 0, "old");
    MUST(pcow_snapshot_create(base, "s", &error));
    write_text(base, 0, "new");
    pcow_close(base);
    assert_int_equal(flags_in_file("base", "s"), 0);
    MUST(fork_image("one", "base", "s", &error));
    assert_int_equal(flags_in_file("base", "s"), LAYER_PINNED);
    MUST(fork_image("two", "base", "s", &error));
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    delete_is_refused(base, "s", "2 images stand on snapshot 's'");
    unlink(scratch("two"));
    delete_is_refused(base, "s", "1 image stands on snapshot 's': 'one'");
    /*
     * Its name does not matter, nor does a mark that was lost with a copy of the record: the
     * snapshot is found by its id.
     */
    MUST(pcow_snapshot_rename(base, "s", "renamed", &error));
    assert_int_equal(flags_in_file("base", "renamed"), LAYER_PINNED);
    delete_is_refused(base, "renamed", "'one'");
    pcow_close(base);
    must_be_clean(scratch("base"));
    reads(scratch("one"), NULL, 0, "old");
    unlink(scratch("one"));
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(base, "renamed", NULL, &error));
    pcow_close(base);
    must_be_clean(scratch("base"));
}

static void test_a_rebased_child_lets_go(void **state)
{
    pcow_image *image = must_create(scratch("base"), 4 * MIB, 0, NULL);

    (void)state;
    write_text(image, 0, "a");
    MUST(pcow_snapshot_create(image, "a", &error));
    write_text(image, 0, "b");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(fork_image("top", "base", "a", &error));
    pcow_close(image);
    image = must_open(scratch("top"), PCOW_OPEN_WRITE);
    MUST(pcow_rebase(image, scratch("base"), "b", false, NULL, NULL, &error));
    pcow_close(image);
    assert_int_equal(flags_in_file("base", "b"), LAYER_PINNED);
    reads(scratch("top"), NULL, 0, "a");
    image = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "a", NULL, &error));
    delete_is_refused(image, "b", "'top'");
    pcow_close(image);
    reads(scratch("top"), NULL, 0, "a");
}

static void test_fork_of_an_image_in_use(void **state)
{
    pcow_image *base = must_create(scratch("base"), 8 * MIB, 0, NULL), *top;

    (void)state;
    write_text(base, 0, "old");
    MUST(pcow_snapshot_create(base, "s", &error));
    write_text(base, 0, "new");
    /* Its present state is what the writer changes. */
    MUST_FAIL(-EBUSY, fork_image("top", "base", NULL, &error));
    MUST(fork_image("top", "base", "s", &error));
    top = must_open(scratch("top"), PCOW_OPEN_WRITE);
    assert_reads(top, 0, "old", 4);
    write_text(top, 4096, "child");
    write_text(base, 4096, "parent");
    MUST(pcow_snapshot_create(base, "t", &error));
    write_text(base, 0, "newer");
    assert_reads(top, 0, "old", 4);
    assert_reads(top, 4096, "child", 6);
    delete_is_refused(base, "s", "'top'");
    MUST(pcow_snapshot_delete(base, "t", NULL, &error));
    MUST(pcow_snapshot_revert(base, "s", &error));
    assert_reads(base, 0, "old", 4);
    pcow_close(top);
    reads(scratch("top"), NULL, 4096, "child");
    /* What its writer knows of the mark it reads again before it acts. */
    unlink(scratch("top"));
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
    must_be_clean(scratch("base"));
}

static void test_a_snapshot_that_is_read_stays(void **state)
{
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 0, NULL), *view;
    struct pcow_check_result result;

    (void)state;
    write_text(image, 0, "a");
    MUST(pcow_snapshot_create(image, "a", &error));
    write_text(image, 0, "b");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(pcow_open(scratch("t"), 0, "a", &view, &error));
    delete_is_refused(image, "a", "is in use");
    MUST(pcow_snapshot_delete(image, "b", NULL, &error));
    assert_reads(view, 0, "a", 2);
    pcow_close(image);
    /* Repair may move what a reader looks at; looking for damage may not. */
    MUST_FAIL(-EBUSY, pcow_check(scratch("t"), PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
    must_be_clean(scratch("t"));
    pcow_close(view);
    MUST(pcow_check(scratch("t"), PCOW_CHECK_REPAIR, NULL, NULL, &result, &error));
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "a", NULL, &error));
    pcow_close(image);
}

static void test_ancestors_may_be_deleted(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 4096, NULL), *top;
    char text[2] = "a";

    (void)state;
    for (unsigned i = 0; i < 5; i++, text[0]++) {
        write_text(base, i * 4096, text);
        write_text(base, MIB, text);
        MUST(pcow_snapshot_create(base, text, &error));
    }
    MUST(fork_image("top", "base", "d", &error));
    top = must_open(scratch("top"), 0);
    for (const char *gone = "ceab"; *gone; gone++) {
        memcpy(text, (char[2]){*gone}, 2);
        MUST(pcow_snapshot_delete(base, text, NULL, &error));
        for (unsigned i = 0; i < 4; i++)
            assert_reads(top, i * 4096, (char[2]){(char)('a' + i)}, 2);
        assert_reads(top, 4 * 4096, "", 1);
        assert_reads(top, MIB, "d", 2);
    }
    pcow_close(top);
    pcow_close(base);
    must_be_clean(scratch("base"));
    reads(scratch("top"), NULL, MIB, "d");
}

/* As QEMU in a pool: it may open the files, but not list them. */
static void test_a_directory_that_cannot_be_listed(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL);
    int status;
    pid_t child;

    (void)state;
    MUST(pcow_snapshot_create(base, "s", &error));
    pcow_close(base);
    MUST(fork_image("top", "base", "s", &error));
    assert_int_equal(chmod(scratch("base"), 0666), 0);
    unlink(scratch("top"));
    assert_int_equal(chmod(scratch_directory(), 0311), 0);
    child = fork();
    if (child == 0) {
        struct pcow_error error = {0};
        int ret;

        if (getuid() == 0 && setuid(65534))
            _exit(9);
        ret = pcow_open(scratch("base"), PCOW_OPEN_WRITE, NULL, &base, &error);
        if (ret)
            _exit(8);
        ret = pcow_snapshot_delete(base, "s", NULL, &error);
        if (ret != -EBUSY || !strstr(error.message, "--unpin"))
            _exit(7);
        pcow_close(base);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(chmod(scratch_directory(), 0700), 0);
    assert_int_equal(status, 0);
    MUST_FAIL(-ENOENT, pcow_snapshot_unpin(scratch("base"), "none", &error));
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_unpin(scratch("base"), "s", &error));
    assert_int_equal(flags_in_file("base", "s"), 0);
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
}

static void test_unpin_looks(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL), *top;

    (void)state;
    MUST(pcow_snapshot_create(base, "s", &error));
    MUST(pcow_snapshot_unpin(scratch("base"), "s", &error));
    MUST(fork_image("top", "base", "s", &error));
    MUST_FAIL(-EBUSY, pcow_snapshot_unpin(scratch("base"), "s", &error));
    assert_int_equal(flags_in_file("base", "s"), LAYER_PINNED);
    top = must_open(scratch("top"), 0);
    unlink(scratch("top"));
    MUST_FAIL(-EBUSY, pcow_snapshot_unpin(scratch("base"), "s", &error));
    pcow_close(top);
    MUST(pcow_snapshot_unpin(scratch("base"), "s", &error));
    pcow_close(base);
}

struct renamer {
    char name[2][600];
    _Atomic bool stop;
    unsigned count;
};

static void *rename_all_the_time(void *opaque)
{
    struct renamer *renamer = opaque;

    for (; !renamer->stop || renamer->count % 2; renamer->count++)
        if (rename(renamer->name[renamer->count % 2], renamer->name[(renamer->count + 1) % 2]))
            return renamer;
    return NULL;
}

/* Who lists a directory may miss a file that gets another name meanwhile. */
static void test_child_that_is_renamed(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL);
    struct renamer renamer = {0};
    pthread_t thread;
    void *failed;

    (void)state;
    for (unsigned i = 0; i < 300; i++) {
        char name[32];

        snprintf(name, sizeof name, "other-%u", i);
        close(open(scratch(name), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    }
    MUST(pcow_snapshot_create(base, "s", &error));
    pcow_close(base);
    MUST(fork_image("one", "base", "s", &error));
    snprintf(renamer.name[0], sizeof renamer.name[0], "%s", scratch("one"));
    snprintf(renamer.name[1], sizeof renamer.name[1], "%s", scratch("two"));
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    assert_int_equal(pthread_create(&thread, NULL, rename_all_the_time, &renamer), 0);
    for (unsigned i = 0; i < 200; i++)
        MUST_FAIL(-EBUSY, pcow_snapshot_delete(base, "s", NULL, &error));
    renamer.stop = true;
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_true(renamer.count > 200);
    unlink(scratch("one"));
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
}

/* A file that may be a child and cannot be judged keeps the snapshot; one that is none does not. */
static void test_strange_files_in_the_directory(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL);
    struct header header;
    int fd;

    (void)state;
    MUST(pcow_snapshot_create(base, "s", &error));
    MUST(fork_image("top", "base", "s", &error));
    fd = open(scratch("top"), O_RDWR | O_CLOEXEC);
    assert_int_equal(pread(fd, &header, sizeof header, 0), sizeof header);
    header.base[0].layer ^= 1;                  /* and its checksum is wrong now */
    assert_int_equal(pwrite(fd, &header, sizeof header, 0), sizeof header);
    assert_int_equal(mkfifo(scratch("fifo"), 0600), 0);
    assert_int_equal(symlink("nowhere", scratch("link")), 0);
    close(open(scratch("short"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    delete_is_refused(base, "s", "'top' in its directory may stand on snapshot 's'");
    memset(&header, 0x5a, sizeof header);
    assert_int_equal(pwrite(fd, &header, sizeof header, 0), sizeof header);
    close(fd);
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
}

/*
 * By a link, a hard link or a bind mount in another directory: who stands on the image lies where
 * it lies.
 */
static void test_another_name_of_the_base(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL);
    char far[512], name[520], link_name[520], top_name[520];

    (void)state;
    snprintf(far, sizeof far, "%s", scratch("far"));
    snprintf(name, sizeof name, "%s/name", far);
    snprintf(link_name, sizeof link_name, "%s/base", far);
    snprintf(top_name, sizeof top_name, "%s/top", far);
    assert_int_equal(mkdir(far, 0700), 0);
    assert_int_equal(symlink("../base", link_name), 0);
    assert_int_equal(symlink(scratch("top"), top_name), 0);
    write_text(base, 0, "old");
    MUST(pcow_snapshot_create(base, "s", &error));
    write_text(base, 0, "new");
    pcow_close(base);
    MUST(fork_image("top", "base", "s", &error));

    base = must_open(link_name, PCOW_OPEN_WRITE);
    delete_is_refused(base, "s", "'top'");
    pcow_close(base);
    MUST_FAIL(-EBUSY, pcow_snapshot_unpin(link_name, "s", &error));
    unlink(link_name);
    assert_int_equal(flags_in_file("base", "s"), LAYER_PINNED);
    /* Its base lies beside it, not beside the link. */
    reads(top_name, NULL, 0, "old");
    unlink(top_name);

    /* Links in its own directory are harmless, but nothing tells where others are. */
    unlink(scratch("top"));
    assert_int_equal(link(scratch("base"), name), 0);
    base = must_open(name, PCOW_OPEN_WRITE);
    delete_is_refused(base, "s", "another name");
    pcow_close(base);
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    delete_is_refused(base, "s", "another name");
    MUST_FAIL(-EBUSY, pcow_snapshot_unpin(scratch("base"), "s", &error));
    pcow_close(base);
    unlink(name);

    if (getuid() == 0) {
        close(open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        assert_int_equal(mount(scratch("base"), name, NULL, MS_BIND, NULL), 0);
        base = must_open(name, PCOW_OPEN_WRITE);
        delete_is_refused(base, "s", "another name");
        pcow_close(base);
        assert_int_equal(umount2(name, MNT_DETACH), 0);
        unlink(name);
    }
    assert_int_equal(link(scratch("base"), scratch("second")), 0);
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
    assert_int_equal(rmdir(far), 0);
}

/* Without permission to mark the snapshot there is no fork, and no file. */
static void test_a_base_that_cannot_be_marked(void **state)
{
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL);
    struct stat st;
    int status;
    pid_t child;

    (void)state;
    MUST(pcow_snapshot_create(base, "s", &error));
    pcow_close(base);
    assert_int_equal(chmod(scratch("base"), 0444), 0);
    assert_int_equal(chmod(scratch_directory(), 0777), 0);
    child = fork();
    if (child == 0) {
        struct pcow_error error = {0};

        if (getuid() == 0 && setuid(65534))
            _exit(9);
        if (fork_image("top", "base", "s", &error) != -EACCES
            || !strstr(error.message, "write permission"))
            _exit(8);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(stat(scratch("top"), &st), -1);
    /* One that is marked already can be forked by anybody who may read it. */
    if (getuid() == 0) {
        MUST(fork_image("one", "base", "s", &error));
        child = fork();
        if (child == 0)
            _exit(setuid(65534) ? 9 : -fork_image("two", "base", "s", NULL));
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
}

/*
 * Its name cannot be made durable where the directory may be written to but not read: then there is
 * no file, and the next try is like the first.
 */
static void test_a_new_file_in_a_directory_that_cannot_be_synced(void **state)
{
    struct pcow_create_options options = {.virtual_size = 4 * MIB};
    struct stat st;
    int status;
    pid_t child;

    (void)state;
    assert_int_equal(chmod(scratch_directory(), 0333), 0);
    child = fork();
    if (child == 0) {
        if (getuid() == 0 && setuid(65534))
            _exit(9);
        for (unsigned i = 0; i < 2; i++)
            if (pcow_create(scratch("new"), &options, NULL) != -EACCES)
                _exit(8);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(chmod(scratch_directory(), 0700), 0);
    assert_int_equal(status, 0);
    assert_int_equal(stat(scratch("new"), &st), -1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_children_keep_their_snapshot),
        TEST(test_a_rebased_child_lets_go),
        TEST(test_fork_of_an_image_in_use),
        TEST(test_a_snapshot_that_is_read_stays),
        TEST(test_ancestors_may_be_deleted),
        TEST(test_a_directory_that_cannot_be_listed),
        TEST(test_unpin_looks),
        TEST(test_child_that_is_renamed),
        TEST(test_strange_files_in_the_directory),
        TEST(test_another_name_of_the_base),
        TEST(test_a_base_that_cannot_be_marked),
        TEST(test_a_new_file_in_a_directory_that_cannot_be_synced),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
