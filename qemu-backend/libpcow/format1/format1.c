/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The file is scanned once; what remains is a table of pieces, sorted by guest cluster and, within
 * one, newest first. A piece that newer ones hide completely is dropped, so the table is never
 * longer than what can be read through it.
 */
#include "format1/format1.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/error.h"

#define MAGIC "NBJL"
#define NAME_SIZE 48u
#define TOP_SIZE 64u                      /* of a super or meta cluster, before the entries */
#define COPY_UNIT PCOW_PAGE_SIZE
#define BITMAP_PAGES 32u
#define LOST_CLUSTER UINT32_MAX

struct super {
    uint32_t cluster_size;                /* bytes; below 4096: KiB */
    uint32_t max_cluster_n;
    uint32_t cur_segment_num;
    char magic[4];
    char base_image_name[NAME_SIZE];
};

static_assert(sizeof(struct super) == TOP_SIZE, "super cluster");

/* One data cluster of the file. */
struct piece {
    uint64_t offset;
    uint32_t cluster;                     /* of the guest */
    uint32_t bitmap;                      /* pages it holds; 0: all */
};

struct format1 {
    uint64_t cluster_size;
    uint64_t entries;                     /* of a meta cluster: n */
    uint32_t clusters;                    /* of the guest */
    unsigned supers;
    struct piece *piece;
    size_t count, capacity;
    char base[NAME_SIZE + 1];
};

/* ---- the table ------------------------------------------------------------------------------- */

static int compare_pieces(const void *left, const void *right)
{
    const struct piece *a = left, *b = right;

    if (a->cluster != b->cluster)
        return a->cluster < b->cluster ? -1 : 1;
    /* What was written later lies further behind. */
    return a->offset > b->offset ? -1 : a->offset < b->offset;
}

static void compact(struct format1 *format1)
{
    uint64_t pages = format1->cluster_size / COPY_UNIT, previous = UINT64_MAX;
    uint32_t seen = 0, all = pages >= BITMAP_PAGES ? UINT32_MAX : (UINT32_C(1) << pages) - 1;
    size_t kept = 0;

    if (format1->count)
        qsort(format1->piece, format1->count, sizeof *format1->piece, compare_pieces);
    for (size_t i = 0; i < format1->count; i++) {
        struct piece piece = format1->piece[i];
        uint32_t holds = piece.bitmap ? piece.bitmap : all;

        if (piece.cluster != previous)
            seen = 0;
        previous = piece.cluster;
        if (!(holds & ~seen))
            continue;
        seen |= holds;
        format1->piece[kept++] = piece;
    }
    format1->count = kept;
}

static int add_piece(struct format1 *format1, struct piece piece)
{
    if (format1->count == format1->capacity) {
        /*
         * A hostile file can name one cluster millions of times with few blocks; memory follows
         * what is kept.
         */
        compact(format1);
        if (format1->count >= format1->capacity / 2) {
            size_t capacity = format1->capacity ? format1->capacity * 2 : 1024;
            struct piece *grown = realloc(format1->piece, capacity * sizeof *grown);

            if (!grown)
                return -ENOMEM;
            format1->piece = grown;
            format1->capacity = capacity;
        }
    }
    format1->piece[format1->count++] = piece;
    return 0;
}

/* The first piece of this cluster, or of the next one that has any. */
static size_t find_cluster(const struct format1 *format1, uint64_t cluster)
{
    size_t low = 0, high = format1->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (format1->piece[middle].cluster < cluster)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- scanning -------------------------------------------------------------------------------- */

static int check_super(const struct pcow_image *image, struct format1 *format1,
                       const struct super *super, struct pcow_error *error)
{
    const char *path = image->file.path;
    uint64_t cluster_size = super->cluster_size < COPY_UNIT ? (uint64_t)super->cluster_size * 1024
                                                            : super->cluster_size;

    if (cluster_size == 0 || cluster_size % COPY_UNIT)
        return error_set(error, -EBADMSG,
                         "%s: impossible cluster size %u; the image (format 1) is damaged", path,
                         super->cluster_size);
    if (super->max_cluster_n == 0)
        return error_set(
            error, -EBADMSG,
            "%s: has no clusters at all (max_cluster_n is 0); the image (format 1) is damaged",
            path);
    if (super->max_cluster_n > PCOW_MAX_VIRTUAL_SIZE / cluster_size)
        return error_set(error, -EBADMSG,
                         "%s: %u clusters of %llu bytes are more than the largest image (16 TiB); "
                         "the image (format 1) is damaged",
                         path, super->max_cluster_n, (unsigned long long)cluster_size);
    if (format1->supers
        && (cluster_size != format1->cluster_size || super->max_cluster_n != format1->clusters))
        return error_set(error, -EBADMSG,
                         "%s: snapshot %u has another cluster size or virtual size than the image; "
                         "the image (format 1) is damaged",
                         path, format1->supers);
    format1->cluster_size = cluster_size;
    format1->clusters = super->max_cluster_n;
    format1->entries = (cluster_size - TOP_SIZE) / sizeof(uint64_t);
    return 0;
}

static int check_entry(const struct pcow_image *image, const struct format1 *format1,
                       struct piece piece, uint64_t segment, uint64_t number,
                       struct pcow_error *error)
{
    const char *path = image->file.path;
    uint64_t pages = format1->cluster_size / COPY_UNIT;

    if (piece.cluster == LOST_CLUSTER)
        /*
         * The prototype's final_cow() sets the low 32 bits of the entry instead of clearing the
         * high ones.
         */
        return error_set(error, -EBADMSG,
                         "%s: entry %llu of segment %llu has lost its guest address (all ones: a "
                         "known defect of the "
                         "prototype when it closes an image); use a copy made before that",
                         path, (unsigned long long)number, (unsigned long long)segment);
    if (piece.cluster >= format1->clusters)
        return error_set(error, -EBADMSG,
                         "%s: entry %llu of segment %llu names cluster %u of a guest that has %u; "
                         "the image (format 1) is damaged",
                         path, (unsigned long long)number, (unsigned long long)segment,
                         piece.cluster, format1->clusters);
    if (piece.bitmap && (pages > BITMAP_PAGES || (uint64_t)piece.bitmap >> pages))
        return error_set(error, -EBADMSG,
                         "%s: entry %llu of segment %llu says that pages 0x%x were copied, but a "
                         "cluster has %llu; "
                         "the image (format 1) is damaged",
                         path, (unsigned long long)number, (unsigned long long)segment,
                         piece.bitmap, (unsigned long long)pages);
    if (piece.offset + format1->cluster_size > image->file.size)
        return error_set(error, -EBADMSG,
                         "%s: the data of guest cluster %u lies beyond the end of file (%llu "
                         "bytes); the file was cut "
                         "short, put a whole copy back",
                         path, piece.cluster, (unsigned long long)image->file.size);
    return 0;
}

/* One meta cluster and the places of its data. */
static int scan_segment(const struct pcow_image *image, struct format1 *format1, uint64_t meta,
                        uint64_t segment, bool last, uint32_t *counter, struct pcow_error *error)
{
    const char *path = image->file.path;
    uint64_t entry[512];
    int ret = file_read(&image->file, meta, counter, sizeof *counter);

    for (uint64_t j = 0; ret == 0 && j < *counter;) {
        uint64_t batch = *counter - j < 512 ? *counter - j : 512;

        if (*counter > format1->entries)
            return error_set(error, -EBADMSG,
                             "%s: segment %llu says that it has %u clusters, but %llu is the most; "
                             "the image (format 1) is damaged",
                             path, (unsigned long long)segment, *counter,
                             (unsigned long long)format1->entries);
        ret = file_read(&image->file, meta + TOP_SIZE + j * sizeof entry[0], entry,
                        batch * sizeof entry[0]);
        for (uint64_t i = 0; ret == 0 && i < batch; i++, j++) {
            struct piece piece = {
                .offset = meta + format1->cluster_size * (1 + j),
                .cluster = (uint32_t)entry[i],
                .bitmap = (uint32_t)(entry[i] >> 32),
            };

            ret = check_entry(image, format1, piece, segment, j, error);
            if (ret)
                return ret;
            ret = add_piece(format1, piece);
            if (ret)
                return error_set(error, ret, "out of memory for the table of %s", path);
        }
    }
    if (ret)
        return ret == -ENODATA ? error_set(
                   error, -EBADMSG,
                   "%s: meta cluster %llu lies beyond the end of file (%llu bytes); the file was "
                   "cut short, put a whole copy back",
                   path, (unsigned long long)segment, (unsigned long long)image->file.size)
                               : error_set_errno(error, ret, "cannot read meta cluster %llu of %s",
                                                 (unsigned long long)segment, path);
    if (!last && *counter != format1->entries)
        return error_set(
            error, -EBADMSG,
            "%s: segment %llu has %u clusters, but only the last one may have fewer than %llu; "
            "the image (format 1) is damaged",
            path, (unsigned long long)segment, *counter, (unsigned long long)format1->entries);
    return 0;
}

/* The segments of one super cluster; *end is where the next super cluster would begin. */
static int scan_super(const struct pcow_image *image, struct format1 *format1, uint64_t offset,
                      const struct super *super, uint64_t *end, struct pcow_error *error)
{
    uint64_t c = format1->cluster_size, segment_size = c * (1 + format1->entries);
    uint32_t counter = 0;

    /* Also keeps every product below from overflowing: nothing is larger than the file. */
    if (super->cur_segment_num > (image->file.size - offset) / segment_size)
        return error_set(
            error, -EBADMSG,
            "%s: segment %u lies beyond the end of file (%llu bytes); the file was cut short, "
            "put a whole copy back",
            image->file.path, super->cur_segment_num, (unsigned long long)image->file.size);
    for (uint64_t i = 0; i <= super->cur_segment_num; i++) {
        uint64_t meta = offset + c + segment_size * i;
        int ret =
            scan_segment(image, format1, meta, i, i == super->cur_segment_num, &counter, error);

        if (ret)
            return ret;
        *end = meta + c * (1 + (uint64_t)counter);
    }
    return 0;
}

static int scan(struct pcow_image *image, struct format1 *format1, struct pcow_error *error)
{
    const char *path = image->file.path;
    uint64_t offset = 0;

    while (image->file.size >= offset && image->file.size - offset >= sizeof(struct super)) {
        struct super super;
        int ret = file_read(&image->file, offset, &super, sizeof super);

        if (ret)
            return error_set_errno(error, ret, "cannot read the super cluster of %s", path);
        if (memcmp(super.magic, MAGIC, sizeof super.magic))
            break;
        ret = check_super(image, format1, &super, error);
        if (ret)
            return ret;
        if (offset == 0)
            memcpy(format1->base, super.base_image_name, NAME_SIZE);
        ret = scan_super(image, format1, offset, &super, &offset, error);
        if (ret)
            return ret;
        format1->supers++;
    }
    if (format1->supers == 0)
        return error_set(
            error, -EMEDIUMTYPE,
            "%s is not a pcow image of format 1 (no magic number); name its format with -f", path);
    compact(format1);
    return 0;
}

static int check_base(const struct pcow_image *image, const struct format1 *format1,
                      struct pcow_error *error)
{
    const char *path = image->file.path;

    if (image->open_flags & PCOW_OPEN_NO_BASE || !format1->base[0])
        return 0;
    if (strlen(format1->base) == NAME_SIZE)
        return error_set(
            error, -EBADMSG,
            "%s: the name of its base fills all 48 bytes, so it may have been cut off; "
            "record a shorter one with the tool that made the image",
            path);
    if (!base_name_is_safe(format1->base, NAME_SIZE))
        return error_set(error, -EBADMSG,
                         "%s: format 1 recorded a path as the name of its base; refused. Put the "
                         "base in the same "
                         "directory and record its plain file name with the tool that made the "
                         "image (pcow-img rebase IMAGE NAME)",
                         path);
    return 0;
}

/* ---- interface ------------------------------------------------------------------------------- */

int format1_load(struct pcow_image *image, struct pcow_error *error)
{
    struct format1 *format1 = calloc(1, sizeof *format1);
    uint64_t slabs;
    int ret;

    if (!format1)
        return error_set(error, -ENOMEM, "out of memory");
    image->format1 = format1;
    ret = scan(image, format1, error);
    if (!ret)
        ret = check_base(image, format1, error);
    if (ret) {
        format1_unload(image);
        return ret;
    }
    image->size = (uint64_t)format1->clusters * format1->cluster_size;
    /* The chain links guest slabs through this table; slabs_unload() gives it back. */
    slabs = (image->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;
    if (slabs_reserve(image, slabs, slabs)) {
        format1_unload(image);
        return error_set(error, -ENOMEM, "out of memory for the table of %s", image->file.path);
    }
    return 0;
}

void format1_unload(struct pcow_image *image)
{
    if (image->format1) {
        free(image->format1->piece);
        free(image->format1);
        image->format1 = NULL;
    }
}

const char *format1_base_name(const struct pcow_image *image, char *buffer)
{
    if (!image->format1 || !image->format1->base[0])
        return NULL;
    static_assert(PCOW_BASE_NAME_SIZE > NAME_SIZE, "the caller's buffer");
    memcpy(buffer, image->format1->base, sizeof image->format1->base);
    return buffer;
}

void format1_get_info(const struct pcow_image *image, struct pcow_info *info)
{
    const struct format1 *format1 = image->format1;
    uint32_t seen = 0;

    info->format = 1;
    info->cluster_size = format1->cluster_size;
    info->snapshots = format1->supers - 1;
    info->has_base = format1_base_name(image, info->base_name) != NULL;
    info->base_format = info->has_base ? 1 : 0;
    for (size_t i = 0; i < format1->count; i++) {
        const struct piece *piece = &format1->piece[i];

        if (i == 0 || piece[-1].cluster != piece->cluster)
            seen = 0;
        if (piece->bitmap)
            info->data_size += (uint64_t)__builtin_popcount(piece->bitmap & ~seen) * COPY_UNIT;
        else
            info->data_size +=
                format1->cluster_size - (uint64_t)__builtin_popcount(seen) * COPY_UNIT;
        seen |= piece->bitmap;
    }
}

bool format1_has_slab(const struct pcow_image *image, uint64_t guest_slab)
{
    const struct format1 *format1 = image->format1;
    uint64_t first = (guest_slab << SLAB_BITS) / format1->cluster_size;
    uint64_t last = (((guest_slab + 1) << SLAB_BITS) - 1) / format1->cluster_size;
    size_t at = find_cluster(format1, first);

    return at < format1->count && format1->piece[at].cluster <= last;
}

/*
 * The piece that a page (of its cluster) is read from; count if none. at: first piece of the
 * cluster.
 */
static size_t find_page(const struct format1 *format1, size_t at, uint64_t cluster, unsigned page)
{
    for (; at < format1->count && format1->piece[at].cluster == cluster; at++) {
        uint32_t bitmap = format1->piece[at].bitmap;

        if (bitmap == 0 || (page < BITMAP_PAGES && bitmap >> page & 1))
            return at;
    }
    return format1->count;
}

bool format1_find(const struct pcow_image *image, uint64_t page, uint64_t *offset, unsigned *run)
{
    const struct format1 *format1 = image->format1;
    uint64_t pages = format1->cluster_size / COPY_UNIT, cluster = page / pages;
    uint64_t slab_end = (page / PAGES_PER_SLAB + 1) * PAGES_PER_SLAB, at_page = page;
    size_t first = find_cluster(format1, cluster), none = format1->count;
    uint64_t expected = 0;
    bool found = false;

    do {
        unsigned in_cluster = (unsigned)(at_page % pages);
        size_t piece;
        uint64_t place;

        while (first < none && format1->piece[first].cluster < at_page / pages)
            first++;
        piece = find_page(format1, first, at_page / pages, in_cluster);
        place = piece == none ? 0 : format1->piece[piece].offset + in_cluster * COPY_UNIT;
        if (at_page == page) {
            found = piece != none;
            *offset = expected = place;
        } else if ((piece != none) != found || (found && place != expected)) {
            break;
        }
        expected += COPY_UNIT;
        at_page++;
    } while (at_page < slab_end);
    *run = (unsigned)(at_page - page);
    return found;
}
