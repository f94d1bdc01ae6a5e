/* SPDX-License-Identifier: BSD-3-Clause */
#include "support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char directory[256];

int scratch_setup(void **state)
{
    const char *top = getenv("TMPDIR");
    struct stat st;

    (void)state;
    if (!top)
        top = stat("/dev/shm", &st) == 0 ? "/dev/shm" : "/tmp";
    snprintf(directory, sizeof directory, "%s/pcow-test-XXXXXX", top);
    return mkdtemp(directory) ? 0 : -1;
}

int scratch_teardown(void **state)
{
    DIR *dir = opendir(directory);
    struct dirent *entry;

    (void)state;
    while (dir && (entry = readdir(dir)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    return rmdir(directory);
}

const char *scratch_directory(void)
{
    return directory;
}

const char *scratch(const char *name)
{
    static char path[8][512];
    static unsigned turn;

    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", directory, name);
    return path[turn];
}

const char *pool_directory(void)
{
    static char path[512];

    snprintf(path, sizeof path, "%s", scratch("pool"));
    return path;
}

const char *path_in_pool(const char *name)
{
    static char path[2][600];
    static unsigned turn;

    turn = (turn + 1) % 2;
    snprintf(path[turn], sizeof path[turn], "%s/%s", pool_directory(), name);
    return path[turn];
}

void pool_make_sparse(const char *name)
{
    const char *pool = pool_directory();
    char command[2400];

    snprintf(command, sizeof command, "cp --sparse=always %s/%s %s/copy && mv %s/copy %s/%s", pool,
             name, pool, pool, pool, name);
    assert_int_equal(system(command), 0);
}

int pool_mount(void **state, const char *size)
{
    char options[64];

    if (scratch_setup(state))
        return -1;
    snprintf(options, sizeof options, "size=%s", size);
    return mkdir(pool_directory(), 0700)
                   || mount("pcow-test", pool_directory(), "tmpfs", 0, options)
               ? -1
               : 0;
}

int pool_mount_disk(void **state, const char *make, const char *size)
{
    char command[2000];

    if (scratch_setup(state))
        return -1;
    snprintf(command, sizeof command,
             "truncate -s %s %s && %s %s > /dev/null && mkdir %s && mount -o loop %s %s", size,
             scratch("disk"), make, scratch("disk"), pool_directory(), scratch("disk"),
             pool_directory());
    return system(command) ? -1 : 0;
}

int pool_unmount(void **state)
{
    umount2(pool_directory(), MNT_DETACH);
    rmdir(pool_directory());
    return scratch_teardown(state);
}

void pool_resize(const char *size)
{
    char options[64];

    snprintf(options, sizeof options, "size=%s", size);
    assert_int_equal(mount("pcow-test", pool_directory(), "tmpfs", MS_REMOUNT, options), 0);
}

void pool_fill(void)
{
    static const char block[65536];
    char path[600];
    int fd;

    snprintf(path, sizeof path, "%s/filler", pool_directory());
    fd = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    while (write(fd, block, sizeof block) > 0)
        ;
    close(fd);
}

void pool_fill_disk(uint64_t left)
{
    char path[600];
    off_t end = 0;
    int fd;

    snprintf(path, sizeof path, "%s/filler", pool_directory());
    fd = open(path, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    for (off_t piece = (off_t)(256 * MIB); piece >= 1024;)
        if (posix_fallocate(fd, end, piece) == 0)
            end += piece;
        else
            piece /= 2;
    assert_int_equal(ftruncate(fd, end - (off_t)left), 0);
    assert_int_equal(fsync(fd), 0);
    close(fd);
}

pcow_image *must_open(const char *path, unsigned flags)
{
    pcow_image *image;

    MUST(pcow_open(path, flags, NULL, &image, &error));
    return image;
}

static pcow_image *create(const char *path, const struct pcow_create_options *options)
{
    MUST(pcow_create(path, options, &error));
    return must_open(path, PCOW_OPEN_WRITE);
}

pcow_image *must_create(const char *path, uint64_t size, uint64_t cluster_size, const char *base)
{
    return create(path, &(struct pcow_create_options){
                            .virtual_size = size, .cluster_size = cluster_size, .base = base});
}

pcow_image *must_create_without_mirror(const char *path, uint64_t size)
{
    return create(path, &(struct pcow_create_options){.virtual_size = size, .no_mirror = true});
}

pcow_image *must_create_overlay(uint64_t size, unsigned char fill)
{
    pcow_image *base = must_create(scratch("base.pcow"), size, 0, NULL);
    unsigned char *bytes = malloc(size);

    assert_non_null(bytes);
    memset(bytes, fill, size);
    MUST(pcow_write(base, 0, bytes, size, &error));
    MUST(pcow_seal(base, &error));
    pcow_close(base);
    free(bytes);
    return must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
}

unsigned count_mappings(const void *memory, uint64_t size)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    unsigned count = 0;

    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long from = 0;

        assert_int_equal(sscanf(line, "%lx-", &from), 1);
        count += from >= (uintptr_t)memory && from < (uintptr_t)memory + size;
    }
    fclose(maps);
    return count;
}

unsigned present_in(const void *memory)
{
    uint64_t entry[PCOW_SLAB_SIZE / 4096];
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    unsigned present = 0;

    assert_true(pagemap >= 0);
    assert_int_equal(
        pread(pagemap, entry, sizeof entry, (off_t)((uintptr_t)memory / 4096 * sizeof *entry)),
        sizeof entry);
    close(pagemap);
    for (unsigned i = 0; i < PCOW_SLAB_SIZE / 4096; i++)
        present += entry[i] >> 63 != 0;
    return present;
}

/* cmocka's, which ends a test. */
static struct sigaction bus_before;

static void handle_bus(int number, siginfo_t *info, void *context)
{
    /* As it happens again, he gets it. */
    if (!pcow_serve_sigbus(info, context))
        sigaction(number, &bus_before, NULL);
}

bool serve_bus(void)
{
    struct sigaction action = {.sa_sigaction = handle_bus, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     now;

    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &now) == 0
        && !((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle_bus))
        bus_before = now;
    return true;
}

pcow_map *must_map_by(pcow_image *image, enum pcow_engine engine, unsigned vma_budget)
{
    struct pcow_map_options options = {.engine = engine,
                                       .vma_budget = vma_budget,
                                       .serves_sigbus = engine == PCOW_ENGINE_MINOR && serve_bus()};
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    return map;
}

ssize_t kernel_store(void *to, unsigned char value)
{
    struct iovec target = {to, 1};
    int fds[2];
    ssize_t ret;

    assert_int_equal(pipe(fds), 0);
    assert_int_equal(write(fds[1], &value, 1), 1);
    ret = readv(fds[0], &target, 1);
    close(fds[0]);
    close(fds[1]);
    return ret;
}

void must_transfer(const char *path, void *buffer, size_t length, uint64_t offset, bool write)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(write ? pwrite(fd, buffer, length, (off_t)offset)
                           : pread(fd, buffer, length, (off_t)offset),
                     length);
    close(fd);
}

static void print_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    (void)opaque;
    print_error("finding %d: %s\n", (int)kind, message);
}

void must_be_clean(const char *path)
{
    struct pcow_check_result result;

    MUST(pcow_check(path, 0, print_finding, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
    assert_int_equal(result.leaks, 0);
}

void assert_reads(pcow_image *image, uint64_t offset, const void *expected, size_t length)
{
    unsigned char *buffer = malloc(length ? length : 1);

    assert_non_null(buffer);
    MUST(pcow_read(image, offset, buffer, length, &error));
    for (size_t i = memcmp(buffer, expected, length) ? 0 : length; i < length; i++)
        if (buffer[i] != ((const unsigned char *)expected)[i])
            fail_msg("byte %llu is %02x, not %02x", (unsigned long long)(offset + i), buffer[i],
                     ((const unsigned char *)expected)[i]);
    free(buffer);
}

/*
 * xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled".
 */
uint64_t random_next(uint64_t *seed)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return *seed * UINT64_C(2685821657736338717);
}

uint64_t random_seed(void)
{
    const char *text = getenv("PCOW_TEST_SEED");

    return text ? strtoull(text, NULL, 0) | 1 : UINT64_C(0x5eed0123456789);
}

unsigned test_steps(unsigned standard)
{
    const char *text = getenv("PCOW_TEST_STEPS");

    return text ? (unsigned)strtoul(text, NULL, 0) : standard;
}

void fill_pattern(void *buffer, size_t length, uint64_t *seed)
{
    unsigned char *bytes = buffer;

    for (size_t i = 0; i < length; i += 8) {
        uint64_t value = random_next(seed);

        memcpy(bytes + i, &value, length - i < 8 ? length - i : 8);
    }
}

void write_text(pcow_image *image, uint64_t offset, const char *text)
{
    MUST(pcow_write(image, offset, text, strlen(text) + 1, &error));
}

const struct pcow_snapshot *find_snapshot(const struct pcow_snapshot *list, size_t count,
                                          const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i].name, name) == 0)
            return &list[i];
    return NULL;
}
