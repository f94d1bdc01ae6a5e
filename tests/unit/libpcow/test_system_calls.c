/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * System calls that load from the range just when it is mapped anew: they get no signal, so what is
 * mapped for a moment decides. The program is linked so that its calls of madvise(), which come
 * between the steps of uffd_map(), pass by here.
 */
#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLABS 4u
#define LOADED 64

static struct {
    volatile bool armed;               /* looked at in the handler of a trap */
    void (*volatile between)(const unsigned char *address, size_t length);
    volatile unsigned count;
} step;

int __real_madvise(void *address, size_t length, int advice);
int __wrap_madvise(void *address, size_t length, int advice);

int __wrap_madvise(void *address, size_t length, int advice)
{
    if (step.armed && advice == MADV_NOHUGEPAGE) {
        step.count++;
        step.between(address, length);
    }
    return __real_madvise(address, length, advice);
}

static int file;                       /* that is stored to */

static ssize_t kernel_load(const unsigned char *from)
{
    return pwrite(file, from, LOADED, 0);
}

static void open_file(void)
{
    step = (typeof(step)){0};
    file = memfd_create("loaded", MFD_CLOEXEC);
    assert_true(file >= 0);
}

/* ---- a watch begins -------------------------------------------------------------------------- */

struct reader {
    pcow_map *map;
    sem_t go, came_back;
    ssize_t first, second;
    int first_errno;
};

static struct reader *reader;

static void let_reader_load(const unsigned char *address, size_t length)
{
    (void)address;
    (void)length;
    if (step.count == 1) {
        sem_post(&reader->go);
        sem_wait(&reader->came_back);
    }
}

static void *load_twice(void *opaque)
{
    struct reader *self = opaque;
    const unsigned char *memory = pcow_map_address(self->map);

    sem_wait(&self->go);
    self->first = kernel_load(memory);
    self->first_errno = errno;
    sem_post(&self->came_back);
    pcow_map_settle(self->map, 0, LOADED);
    self->second = kernel_load(memory);
    return NULL;
}

static void test_a_watch_begins(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create_overlay(SLABS * PCOW_SLAB_SIZE, 0x5a);
        struct reader self = {.map = must_map_by(image, engine, 0)};
        unsigned char loaded;
        pthread_t thread;

        open_file();
        reader = &self;
        sem_init(&self.go, 0, 0);
        sem_init(&self.came_back, 0, 0);
        assert_int_equal(pthread_create(&thread, NULL, load_twice, &self), 0);
        step.between = let_reader_load;
        step.armed = true;
        MUST(pcow_map_watch(self.map, &error));
        step.armed = false;
        pthread_join(thread, NULL);
        assert_true(step.count >= 1);
        /* It must not see what the range does not hold. */
        assert_int_equal(self.first, -1);
        assert_int_equal(self.first_errno, EFAULT);
        assert_int_equal(self.second, LOADED);
        assert_int_equal(pread(file, &loaded, 1, 0), 1);
        assert_int_equal(loaded, 0x5a);
        /* Also beyond the end, or of nothing, there is nothing to wait for. */
        pcow_map_settle(self.map, SLABS * PCOW_SLAB_SIZE, 1);
        pcow_map_settle(self.map, 0, 0);
        pcow_map_settle(self.map, SLABS * PCOW_SLAB_SIZE - 1, UINT64_MAX / 2);
        sem_destroy(&self.go);
        sem_destroy(&self.came_back);
        close(file);
        pcow_map_destroy(self.map);
        pcow_close(image);
        unlink(scratch("top.pcow"));
        unlink(scratch("base.pcow"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_watch_begins, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
