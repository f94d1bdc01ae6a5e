/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/qcow2_header.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"

#define QCOW2_MAGIC 0x514649fbu                /* "QFI\xfb" */
#define INCOMPATIBLE_EXTERNAL_DATA (UINT64_C(1) << 2)

/* Big-endian; QEMU's docs/interop/qcow2.txt. */
struct qcow2_header {
    uint32_t magic, version;
    uint64_t backing_file_offset;
    uint32_t backing_file_size, cluster_bits;
    uint64_t size;
    uint32_t crypt_method, l1_size;
    uint64_t l1_table_offset, refcount_table_offset;
    uint32_t refcount_table_clusters, nb_snapshots;
    uint64_t snapshots_offset;
    uint64_t incompatible_features;            /* from here on only in version 3 */
};

static int read_header(const char *path, const char *shown_path, struct qcow2_header *header,
                       struct pcow_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    ssize_t n;

    if (fd < 0 || fstat(fd, &status)) {
        int r = fail(error, -errno, "%s: cannot open it: %s", shown_path, strerror(errno));

        if (fd >= 0) {
            close(fd);
        }
        return r;
    }
    memset(header, 0, sizeof(*header));
    n = S_ISREG(status.st_mode) || S_ISBLK(status.st_mode) ? pread(fd, header, sizeof(*header), 0)
                                                           : 0;
    close(fd);
    if (n < 72 || be32toh(header->magic) != QCOW2_MAGIC) {
        return fail(error, -EMEDIUMTYPE, "%s is not a qcow2 image; give its true format",
                    shown_path);
    }
    return 0;
}

int qcow2_check_header(const char *path, const char *shown_path, struct pcow_error *error)
{
    struct qcow2_header header;
    int r = read_header(path, shown_path, &header, error);

    if (r) {
        return r;
    }
    if (be32toh(header.version) != 2 && be32toh(header.version) != 3) {
        return fail(error, -ENOTSUP, "%s: qcow2 version %u is not supported", shown_path,
                    be32toh(header.version));
    }
    if (header.backing_file_offset || header.backing_file_size) {
        return fail(error, -EPERM,
                    "%s has a backing file, and paths from an image are not followed; flatten it "
                    "first with "
                    "'qemu-img convert -O qcow2'",
                    shown_path);
    }
    if (be32toh(header.version) == 3
        && (be64toh(header.incompatible_features) & INCOMPATIBLE_EXTERNAL_DATA)) {
        return fail(error, -EPERM,
                    "%s keeps its data in an external file, and paths from an image are not "
                    "followed; copy it "
                    "first with 'qemu-img convert -O qcow2'",
                    shown_path);
    }
    if (header.crypt_method) {
        return fail(error, -ENOTSUP, "%s is encrypted; decrypt it first with 'qemu-img convert'",
                    shown_path);
    }
    return 0;
}
