/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "image/mirror.h"
#include "operations/operations.h"
#include "util/error.h"
#include "util/sized.h"

#define FIRST_LAYER 1u
/* Less the umask: what is in a guest's memory is nobody else's. */
#define IMAGE_MODE 0640

static int make_uuid(uint8_t uuid[PCOW_UUID_SIZE])
{
    if (getrandom(uuid, PCOW_UUID_SIZE, 0) != PCOW_UUID_SIZE)
        return -EIO;
    /* RFC 4122 section 4.4: version 4, variant 1. */
    uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40);
    uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
    return 0;
}

static int check_options(const char *path, const struct pcow_create_options *options,
                         uint64_t base_size, uint64_t *virtual_size, uint64_t *cluster_size,
                         struct pcow_error *error)
{
    *virtual_size = options->virtual_size
                        ? options->virtual_size
                        : (base_size + PCOW_SLAB_SIZE - 1) / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE;
    *cluster_size = options->cluster_size ? options->cluster_size : PCOW_DEFAULT_CLUSTER_SIZE;
    if (*virtual_size == 0)
        return error_set(error, -EINVAL, "%s: a size is needed", path);
    if (*virtual_size > PCOW_MAX_VIRTUAL_SIZE)
        return error_set(error, -EFBIG, "%s: %llu bytes is more than the largest image (16 TiB)",
                         path, (unsigned long long)*virtual_size);
    if (*virtual_size % PCOW_SLAB_SIZE)
        return error_set(
            error, -EINVAL, "%s: the size %llu is not a multiple of 2 MiB; the next one is %llu",
            path, (unsigned long long)*virtual_size,
            (unsigned long long)((*virtual_size / PCOW_SLAB_SIZE + 1) * PCOW_SLAB_SIZE));
    if (*cluster_size < PCOW_MIN_CLUSTER_SIZE || *cluster_size > PCOW_MAX_CLUSTER_SIZE
        || *cluster_size & (*cluster_size - 1))
        return error_set(error, -EINVAL,
                         "%s: the cluster size %llu is not a power of two from 4k to 2M", path,
                         (unsigned long long)*cluster_size);
    return 0;
}

/* A page of metadata, its copy, and its checksum. */
static int write_page(const struct file *file, uint64_t offset, const void *content,
                      uint64_t checksums[METADATA_PAGES])
{
    unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE);
    int ret = file_write(file, offset, content, PCOW_PAGE_SIZE);

    if (!ret && file->heads > 1)
        ret = file_write(file, mirror_offset(0, page), content, PCOW_PAGE_SIZE);
    checksums[page] = checksum_encode(CHECKSUM_VALID, mirror_checksum(file, 0, page, content));
    return ret;
}

/* Everything but the magic number, which makes the file an image. */
static int write_image(struct file *file, struct header *header, uint64_t virtual_size)
{
    /* The page, as it is stored to through a mapping from then on. */
    struct layer_record records[PCOW_PAGE_SIZE / LAYER_RECORD_SIZE] = {{
        .state = layer_state_word(FIRST_LAYER, LAYER_OPEN, 0, 0),
        .virtual_size = word_encode(virtual_size),
        .parent_limit = word_encode(virtual_size),
    }};
    uint64_t checksums[METADATA_PAGES] = {0};
    int ret = file_set_size(file, (uint64_t)header_heads(header) << SLAB_BITS);

    if (!ret)
        ret = write_page(file, LAYER_TABLE_OFFSET, records, checksums);
    if (!ret)
        ret = write_page(file, HEADER_COPY_OFFSET, header, checksums);
    if (!ret)
        ret = write_page(file, 0, header, checksums);
    if (!ret && file->heads > 1)
        ret = file_write(file, mirror_offset(0, CHECKSUMS_PAGE), checksums, sizeof checksums);
    return ret ? ret : file_commit(file);
}

/* The new name itself must survive a crash. */
static int sync_directory(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1,
        ret = fd < 0 ? -errno : 0;

    free(copy);
    if (ret == 0 && fsync(fd) && errno != EINVAL)
        ret = -errno;
    if (fd >= 0)
        close(fd);
    return ret;
}

static int exists(const char *path, struct pcow_error *error)
{
    return error_set(error, -EEXIST, "%s exists; remove it first or choose another name", path);
}

/*
 * The file gets its name when it is complete, so that nobody sees half an image, not even after a
 * crash. A file system without nameless files gets it at once.
 */
static int open_new(const char *path, bool *nameless)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_TMPFILE | O_RDWR | O_CLOEXEC, IMAGE_MODE) : -1;

    free(copy);
    *nameless = fd >= 0;
    return fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)
               ? fd
               : open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, IMAGE_MODE);
}

static int give_name(int fd, const char *path)
{
    char link[64];

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, link, AT_FDCWD, path, AT_SYMLINK_FOLLOW) ? -errno : 0;
}

/*
 * A store to memory has its block before, and what is not used is given back: a file system without
 * the two calls (ext2, ramfs, NFS 3) would let the guest's first store fail.
 */
static int check_file_system(int fd, const char *path, struct pcow_error *error)
{
    if ((fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, PCOW_PAGE_SIZE)
         || fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PCOW_PAGE_SIZE))
        && errno == EOPNOTSUPP)
        return error_set(error, -EOPNOTSUPP,
                         "%s: its file system cannot reserve and give back single pages; put the "
                         "image on tmpfs, ext4 or XFS",
                         path);
    return 0;
}

static int make_file(const char *path, struct header *header, uint64_t virtual_size,
                     struct observer *observer, struct pcow_error *error)
{
    struct file file;
    bool nameless, named;
    int fd, ret;

    if (access(path, F_OK) == 0)
        return exists(path, error);
    fd = open_new(path, &nameless);
    if (fd < 0)
        return errno == EEXIST ? exists(path, error)
                               : error_set_errno(error, -errno, "cannot create %s", path);
    named = !nameless;
    ret = check_file_system(fd, path, error);
    if (ret)
        close(fd);
    else
        ret = file_adopt(&file, fd, path, observer, error);
    if (!ret) {
        memcpy(file.uuid, header->uuid, sizeof file.uuid);
        file.heads = header_heads(header);
        ret = write_image(&file, header, virtual_size);
        if (!ret && nameless) {
            ret = give_name(fd, path);
            named = !ret;
        }
        if (!ret)
            ret = sync_directory(path);
        if (ret == -EEXIST)
            exists(path, error);
        else if (ret)
            error_set_errno(error, ret, "cannot write %s", path);
        /* While our lock is held, so that the name is still that of this file. */
        if (ret && named)
            unlink(path);
        file_close(&file);
    } else if (named) {
        unlink(path);
    }
    return ret;
}

int pcow_create_sized(const char *path, const struct pcow_create_options *given, size_t size,
                      struct pcow_error *error)
{
    struct pcow_create_options options;
    int ret = sized_take(&options, sizeof options, given, size, error);

    return ret ? ret : image_create(path, &options, NULL, error);
}

int image_create(const char *path, const struct pcow_create_options *options,
                 struct observer *observer, struct pcow_error *error)
{
    struct header header = {
        .version = FORMAT2_VERSION,
        .header_size = HEADER_SIZE,
        .page_bits = 12,
        .slab_bits = SLAB_BITS,
        .group_bits = GROUP_BITS,
        .created = (uint64_t)time(NULL),
        .active_layer = word_encode(FIRST_LAYER),
        .next_layer_id = word_encode(FIRST_LAYER + 1),
        .layer_slots = word_encode(1),
        .generation = word_encode(1),
    };
    uint64_t virtual_size, cluster_size;
    pcow_image *base = NULL;
    int ret = 0;

    memcpy(header.magic, FORMAT2_MAGIC, sizeof header.magic);
    if (options->copy_on_read)
        header.state = word_encode(HEADER_COPY_ON_READ);
    if (options->base) {
        ret = base_record_make(&header.base[0], path, options->base, options->base_snapshot,
                               options->base_unchecked, &base, error);
        if (ret)
            return ret;
        header.base_slot = word_encode(1);
    }
    ret = check_options(path, options, base ? pcow_size(base) : 0, &virtual_size, &cluster_size,
                        error);
    if (!ret && make_uuid(header.uuid))
        ret = error_set(error, -EIO, "cannot make a uuid for %s", path);
    if (!ret) {
        header.read_only_compatible_features = options->no_mirror ? 0 : FEATURE_MIRROR;
        header.cluster_bits = (uint32_t)__builtin_ctzll(cluster_size);
        header.crc = header_crc(&header);
        ret = make_file(path, &header, virtual_size, observer, error);
    }
    /* Until the file has its name nothing but our lock keeps the snapshot that it stands on. */
    pcow_close(base);
    return ret;
}
