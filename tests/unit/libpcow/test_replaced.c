/* SPDX-License-Identifier: BSD-3-Clause */
/* A file that is replaced while it is opened: who has the lock has the file that bears the name. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "image/image.h"

#define PATH scratch("image.pcow")
#define OTHER scratch("other.pcow")
#define SECONDS 1.0

struct replacer {
    char path[600], other[600];
    _Atomic bool stop;
    _Atomic unsigned done;
};

static bool names(const char *path, int fd)
{
    struct stat named, open_file;

    return stat(path, &named) == 0 && fstat(fd, &open_file) == 0
           && named.st_ino == open_file.st_ino;
}

/*
 * As pcow-img convert does: lock all of the file, see that it still is the one, rename. Here the
 * two change places for ever.
 */
static void *replace(void *opaque)
{
    struct replacer *replacer = opaque;

    while (!atomic_load(&replacer->stop)) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        int fd = open(replacer->path, O_RDWR | O_CLOEXEC);

        if (fd >= 0 && fcntl(fd, F_OFD_SETLK, &lock) == 0 && names(replacer->path, fd)
            && renameat2(AT_FDCWD, replacer->path, AT_FDCWD, replacer->other, RENAME_EXCHANGE) == 0)
            replacer->done++;
        close(fd);
    }
    return NULL;
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void open_while_it_is_replaced(unsigned flags, const char *snapshot)
{
    struct replacer replacer = {.stop = false};
    unsigned opened = 0;
    pthread_t thread;
    double end, limit;

    for (unsigned i = 0; i < 2; i++) {
        pcow_image *image = must_create(i ? OTHER : PATH, 4 * MIB, 0, NULL);

        MUST(pcow_snapshot_create(image, "s", &error));
        pcow_close(image);
    }
    snprintf(replacer.path, sizeof replacer.path, "%s", PATH);
    snprintf(replacer.other, sizeof replacer.other, "%s", OTHER);
    assert_int_equal(pthread_create(&thread, NULL, replace, &replacer), 0);
    end = now() + SECONDS;
    limit = end + 60;
    while (now() < end || ((opened <= 10 || atomic_load(&replacer.done) <= 10) && now() < limit)) {
        struct pcow_error error;
        pcow_image *image;
        int ret = pcow_open(PATH, flags, snapshot, &image, &error);
        bool same;

        if (ret == -EBUSY)
            continue;
        if (ret)
            fail_msg("%s", error.message);
        same = names(PATH, image->file.fd);
        pcow_close(image);
        assert_true(same);
        opened++;
    }
    atomic_store(&replacer.stop, true);
    pthread_join(thread, NULL);
    assert_true(opened > 10 && replacer.done > 10);
}

static void test_a_writer(void **state)
{
    (void)state;
    open_while_it_is_replaced(PCOW_OPEN_WRITE, NULL);
}

static void test_a_reader(void **state)
{
    (void)state;
    open_while_it_is_replaced(0, NULL);
}

/* It does not hold the image, only the snapshot. */
static void test_a_reader_of_a_snapshot(void **state)
{
    (void)state;
    open_while_it_is_replaced(0, "s");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_writer, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_a_reader, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_a_reader_of_a_snapshot, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
