/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What can be said of an image at little cost: a few reads of its tables, and no mapping, directory
 * or base.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/format2.h"
#include "util/error.h"
#include "util/sized.h"

#define BATCH 256u                     /* records; divides the number of slots of every table */

struct tables {
    int fd;
    const char *name;
    struct header header;
    struct pcow_version version;
    /* groups of which the file has no metadata, so no owners either */
    bool unowned[MAX_GROUPS];
    bool has_no_writer;
    uint64_t slabs;                    /* of the file */
    uint64_t *owners;                  /* of each slab */
    uint64_t table[MAX_LAYER_TABLE + 1]; /* file slab of each table of layers */
    uint64_t virtual_size;             /* of the active layer */
    unsigned snapshots;
};

static int read_at(const struct tables *t, uint64_t offset, void *buffer, size_t length,
                   struct pcow_error *error)
{
    ssize_t got;

    do
        got = pread(t->fd, buffer, length, (off_t)offset);
    while (got < 0 && errno == EINTR);
    if (got == (ssize_t)length)
        return 0;
    return got < 0 ? error_set_errno(error, -errno, "cannot read %s", t->name)
                   : error_set(error, -EBADMSG, "%s: it ends within its tables; see pcow-img check",
                               t->name);
}

static uint64_t allocated(const struct tables *t)
{
    return t->version.blocks * 512;
}

static struct pcow_version version_of(const struct stat *st)
{
    return (struct pcow_version){
        .inode = st->st_ino,
        .size = (uint64_t)st->st_size,
        .blocks = (uint64_t)st->st_blocks,
        .changed = st->st_ctim.tv_sec * INT64_C(1000000000) + st->st_ctim.tv_nsec,
    };
}

/*
 * Nobody has it open for writing, or changes the tree. Asked before the tables are read: who comes
 * later takes his lock and changes the time of the file (file_open()) before anything else of it.
 */
static bool has_no_writer(const struct tables *t)
{
    struct flock lock = {
        .l_type = F_RDLCK,
        .l_whence = SEEK_SET,
        .l_start = LOCK_OFFSET,
        .l_len = LOCK_TREE_OFFSET - LOCK_OFFSET + 1,
    };

    return fcntl(t->fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

static bool is_unchanged(const struct tables *t)
{
    struct pcow_version now;
    struct stat st;

    if (fstat(t->fd, &st))
        return false;
    now = version_of(&st);
    return memcmp(&now, &t->version, sizeof now) == 0;
}

static int read_header(struct tables *t, struct pcow_error *error)
{
    struct stat st;
    int ret;

    if (fstat(t->fd, &st))
        return error_set_errno(error, -errno, "cannot stat %s", t->name);
    if (!S_ISREG(st.st_mode))
        return error_set(error, -EMEDIUMTYPE,
                         "%s is not a regular file; images are files in a pool", t->name);
    if ((uint64_t)st.st_size < sizeof t->header)
        return error_set(error, -EMEDIUMTYPE, "%s is too short to be a pcow image (%lld bytes)",
                         t->name, (long long)st.st_size);
    t->version = version_of(&st);
    t->has_no_writer = has_no_writer(t);
    ret = read_at(t, 0, &t->header, sizeof t->header, error);
    if (!ret)
        ret = header_validate(&t->header, t->name, error);
    if (ret)
        return ret;
    if (st.st_size % PCOW_SLAB_SIZE || (uint64_t)st.st_size > MAX_FILE_SLABS << SLAB_BITS)
        return error_set(error, -EBADMSG,
                         "%s: its length (%lld bytes) is not that of an image; see pcow-img check",
                         t->name, (long long)st.st_size);
    t->slabs = (uint64_t)st.st_size >> SLAB_BITS;
    return 0;
}

static int read_owners(struct tables *t, struct pcow_error *error)
{
    t->owners = calloc(t->slabs, sizeof *t->owners);
    if (!t->owners)
        return error_set(error, -ENOMEM, "out of memory for the tables of %s", t->name);
    for (uint64_t first = 0; first < t->slabs; first += SLABS_PER_GROUP) {
        uint64_t count = t->slabs - first < SLABS_PER_GROUP ? t->slabs - first : SLABS_PER_GROUP;
        off_t data = lseek(t->fd, (off_t)(first << SLAB_BITS), SEEK_DATA);
        bool is_hole = data < 0 ? errno == ENXIO : (uint64_t)data >> SLAB_BITS > first;
        int ret = count > 1 && !is_hole
                      ? read_at(t, owner_offset(first), &t->owners[first],
                                count * sizeof *t->owners, error)
                      : 0;

        if (ret)
            return ret;
        t->unowned[first / SLABS_PER_GROUP] = is_hole;
        if (is_hole)
            continue;
        for (uint64_t p = first; p < first + count; p++) {
            struct owner owner = owner_decode(t->owners[p]);

            if (!word_is_valid(t->owners[p]))
                return error_set(error, -EBADMSG,
                                 "%s: the owner of file slab %llu is damaged; see pcow-img check",
                                 t->name, (unsigned long long)p);
            if (owner.kind == OWNER_TABLE && owner.number && owner.number <= MAX_LAYER_TABLE
                && !t->table[owner.number])
                t->table[owner.number] = p;
        }
    }
    return 0;
}

/* Where the record of a slot is; a multiple of BATCH. 0: nowhere. */
static uint64_t record_offset(const struct tables *t, uint64_t slot)
{
    uint64_t number, slab;

    if (slot < LAYER_TABLE_0_SLOTS)
        return LAYER_TABLE_OFFSET + slot * LAYER_RECORD_SIZE;
    slot -= LAYER_TABLE_0_SLOTS;
    number = slot / LAYER_TABLE_SLOTS + 1;
    slab = number <= MAX_LAYER_TABLE ? t->table[number] : 0;
    return slab ? (slab << SLAB_BITS) + slot % LAYER_TABLE_SLOTS * LAYER_RECORD_SIZE : 0;
}

/* The record of the active layer; of two with its id the one with the higher sequence counts. */
static int read_layers(struct tables *t, struct pcow_error *error)
{
    uint64_t slots = word_value(t->header.layer_slots), active = word_value(t->header.active_layer);
    struct layer_record *records = malloc(BATCH * sizeof *records);
    unsigned sequence = 0;
    bool found = false;
    int ret = records ? 0 : error_set(error, -ENOMEM, "out of memory");

    if (!ret && slots > MAX_LAYERS)
        ret = error_set(error, -EBADMSG,
                        "%s: the header has impossible counts of layers; see pcow-img check",
                        t->name);
    for (uint64_t slot = 0; slot < slots && ret == 0; slot++) {
        const struct layer_record *record = &records[slot % BATCH];
        uint64_t state;

        if (slot % BATCH == 0) {
            uint64_t offset = record_offset(t, slot),
                     count = slots - slot < BATCH ? slots - slot : BATCH;

            ret = offset
                      ? read_at(t, offset, records, count * sizeof *records, error)
                      : error_set(error, -EBADMSG,
                                  "%s: a table of layers is missing; see pcow-img check", t->name);
            if (ret)
                break;
        }
        if (!word_is_valid(record->state) || !word_is_valid(record->virtual_size)) {
            ret = error_set(error, -EBADMSG, "%s: layer record %llu is damaged; see pcow-img check",
                            t->name, (unsigned long long)slot);
            break;
        }
        state = word_value(record->state);
        t->snapshots += (state >> 28 & 0xf) == LAYER_SNAPSHOT;
        if ((state & MAX_LAYER_ID) != active || (state >> 28 & 0xf) == LAYER_FREE
            || (found && (uint8_t)((state >> 40) - sequence) >= 128))
            continue;
        found = true;
        sequence = (unsigned)(state >> 40 & 0xff);
        t->virtual_size = word_value(record->virtual_size);
    }
    free(records);
    if (!ret
        && (!found || t->virtual_size % PCOW_SLAB_SIZE || t->virtual_size > PCOW_MAX_VIRTUAL_SIZE))
        ret = error_set(
            error, -EBADMSG,
            "%s: the active layer %llu has no record that can be used; see pcow-img check", t->name,
            (unsigned long long)active);
    return ret;
}

/*
 * Slabs that hold data, asked for in ascending order: the file system is asked once for each hole,
 * however many slabs it has.
 */
struct data_cursor {
    uint64_t next;                             /* the first slab from the last one on that has any */
    bool known;
};

static bool holds_data(const struct tables *t, struct data_cursor *cursor, uint64_t slab)
{
    if (!cursor->known || cursor->next < slab) {
        off_t data = lseek(t->fd, (off_t)(slab << SLAB_BITS), SEEK_DATA);

        cursor->known = true;
        cursor->next = data >= 0         ? (uint64_t)data >> SLAB_BITS
                       : errno == ENXIO ? UINT64_MAX
                                        : slab;
    }
    return cursor->next == slab;
}

/*
 * File slabs whose blocks stores to the active layer may need once more: those of other layers, and
 * where the layer has a guest slab already. Free ones are taken again; if they are holes, nothing
 * of what is allocated lies there.
 */
static int count_others(const struct tables *t, uint64_t *others, struct pcow_error *error)
{
    uint64_t guest_slabs = t->virtual_size >> SLAB_BITS,
             active = word_value(t->header.active_layer);
    uint64_t *seen = calloc(guest_slabs / 64 + 1, sizeof *seen);
    struct data_cursor cursor = {0};

    *others = 0;
    if (!seen)
        return error_set(error, -ENOMEM, "out of memory for the tables of %s", t->name);
    for (uint64_t p = 0; p < t->slabs; p++) {
        struct owner owner = owner_decode(t->owners[p]);
        uint64_t group = p / SLABS_PER_GROUP, end = (group + 1) * SLABS_PER_GROUP;
        bool is_active =
            owner.kind == OWNER_DATA && owner.layer == active && owner.number < guest_slabs;

        if (slab_is_group_head(p, header_heads(&t->header)))
            continue;
        /* A file may be made as long as file systems have it, at no cost. */
        if (t->unowned[group] && !holds_data(t, &cursor, p)) {
            p = (cursor.next < end ? cursor.next : end) - 1;
            continue;
        }
        if (is_active && !(seen[owner.number / 64] >> owner.number % 64 & 1))
            seen[owner.number / 64] |= UINT64_C(1) << owner.number % 64;
        else if (owner.kind != OWNER_NONE || holds_data(t, &cursor, p))
            *others += 1;
    }
    free(seen);
    return 0;
}

static int describe_growth(const struct tables *t, struct pcow_summary *summary,
                           struct pcow_error *error)
{
    /* Each guest slab in a file slab, and the metadata of all groups. */
    uint64_t slabs = (t->virtual_size >> SLAB_BITS) + t->slabs,
             heads = header_heads(&t->header),
             whole = t->virtual_size
                     + (heads * (slabs / (SLABS_PER_GROUP - heads) + 1) << SLAB_BITS);
    uint64_t others, counts;
    int ret = count_others(t, &others, error);

    if (ret)
        return ret;
    counts = allocated(t) > others << SLAB_BITS ? allocated(t) - (others << SLAB_BITS) : 0;
    summary->may_grow = summary->sealed || counts > whole ? 0 : whole - counts;
    summary->may_grow_frozen = summary->sealed ? 0 : whole;
    return 0;
}

static int describe_base(const struct tables *t, struct pcow_summary *summary,
                         struct pcow_error *error)
{
    uint64_t slot = word_value(t->header.base_slot);
    const struct base_record *record = slot ? &t->header.base[slot - 1] : NULL;
    int ret = record ? base_record_validate(record, t->name, error) : 0;

    if (ret || !record)
        return ret;
    summary->has_base = true;
    summary->base_format = record->format;
    memcpy(summary->base_uuid, record->uuid, sizeof summary->base_uuid);
    summary->base_layer = record->layer <= MAX_LAYER_ID ? (uint32_t)record->layer : MAX_LAYER_ID;
    memcpy(summary->base_name, record->name, sizeof summary->base_name);
    return 0;
}

static int describe_layers(struct tables *t, struct pcow_summary *summary, struct pcow_error *error)
{
    int ret = read_owners(t, error);

    if (!ret)
        ret = read_layers(t, error);
    if (ret)
        return ret;
    summary->virtual_size = t->virtual_size;
    summary->snapshots = t->snapshots;
    return describe_growth(t, summary, error);
}

static int summarize(int directory, const char *name, bool header_only,
                     struct pcow_summary *summary, struct pcow_error *error)
{
    struct tables t = {.name = name};
    int ret;

    memset(summary, 0, sizeof *summary);
    /* O_NONBLOCK: a FIFO put in place of an image must not hang us. */
    t.fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW);
    if (t.fd < 0)
        return error_set_errno(error, -errno, "cannot open %s", name);
    ret = read_header(&t, error);
    if (!ret)
        ret = describe_base(&t, summary, error);
    if (!ret) {
        memcpy(summary->uuid, t.header.uuid, sizeof summary->uuid);
        summary->allocated_size = allocated(&t);
        summary->sealed = word_value(t.header.state) & HEADER_SEALED;
    }
    if (!ret && !header_only)
        ret = describe_layers(&t, summary, error);
    if (!ret) {
        summary->version = t.version;
        summary->steady = t.has_no_writer && is_unchanged(&t);
    }
    free(t.owners);
    close(t.fd);
    return ret;
}

int pcow_summarize_sized(int directory, const char *name, bool header_only,
                         struct pcow_summary *given, size_t size, struct pcow_error *error)
{
    struct pcow_summary summary;
    int ret = summarize(directory, name, header_only, &summary, error);

    sized_give(given, size, &summary, sizeof summary);
    return ret;
}
