/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * byte 0: bits 0-2 the image to begin with, bit 3 recompute the checksum of the header, bit 4 of
 * the base records, bit 5 of the layer records; where it has a mirror, bit 7 those of the checksums
 * of data, bit 6 the mirror and its checksums, so that what was patched is what was stored. Then
 * patches, each an operation byte and its arguments, until the input ends.
 */
#include "description.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/format2.h"
#include "image/mirror.h"
#include "pcow.h"

#define MUST(condition)                                                      \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "fuzz: cannot set up: %s\n", #condition);        \
            abort();                                                         \
        }                                                                    \
    } while (0)

enum { PLAIN, SNAPSHOTS, OVERLAY, STATE, FORMAT_1, EMPTY_FILE, MIRROR, SUMMED, START_COUNT };
enum { FIX_HEADER = 8, FIX_BASE = 16, FIX_RECORDS = 32, FIX_MIRROR = 64, FIX_SUMS = 128 };

#define SIZE (UINT64_C(8) << 20)
#define FIXED_RECORDS 16u

/* A healthy image as a list of its parts that are not holes. */
struct start {
    uint64_t size;
    struct part { uint64_t offset; size_t length; uint8_t *bytes; } part[64];
    unsigned parts;
};

static struct start start[START_COUNT];
static char directory[256];

/* ---- the healthy images ---------------------------------------------------------------------- */

static const char *path_of(const char *name)
{
    static char path[2][512];
    static unsigned turn;

    turn ^= 1;
    snprintf(path[turn], sizeof path[turn], "%s/%s", directory, name);
    return path[turn];
}

static void write_pages(pcow_image *image, unsigned first, unsigned count)
{
    uint8_t page[4096];

    for (unsigned i = first; i < first + count; i++) {
        memset(page, (int)(i % 255) + 1, sizeof page);
        MUST(pcow_write(image, i * UINT64_C(4096), page, sizeof page, NULL) == 0);
    }
}

static pcow_image *make(const char *name, const char *base, bool mirror)
{
    /* Without one, what is damaged reaches the code that reads it. */
    struct pcow_create_options options = {
        .virtual_size = SIZE, .base = base, .no_mirror = !mirror};
    pcow_image *image;

    MUST(pcow_create(path_of(name), &options, NULL) == 0);
    MUST(pcow_open(path_of(name), PCOW_OPEN_WRITE, NULL, &image, NULL) == 0);
    return image;
}

static void make_snapshots(pcow_image *image)
{
    write_pages(image, 1, 3);
    write_pages(image, 1000, 2);
    MUST(pcow_snapshot_create(image, "a", NULL) == 0);
    write_pages(image, 2, 1);
    write_pages(image, 600, 2);
    MUST(pcow_snapshot_create(image, "b", NULL) == 0);
    write_pages(image, 601, 2);
    MUST(pcow_snapshot_create(image, "c", NULL) == 0);
    MUST(pcow_snapshot_revert(image, "a", NULL) == 0);
    write_pages(image, 3, 2);
    MUST(pcow_snapshot_create(image, "d", NULL) == 0);
    write_pages(image, 1001, 1);
    MUST(pcow_snapshot_delete(image, "b", NULL, NULL) == 0);
}

static void make_state(pcow_image *image)
{
    uint8_t state[5000];

    memset(state, 77, sizeof state);
    write_pages(image, 5, 1);
    MUST(pcow_snapshot_create(image, "s", NULL) == 0);
    MUST(pcow_snapshot_write_state(image, "s", 0, state, sizeof state, NULL) == 0);
    MUST(pcow_snapshot_write_state(image, "s", PCOW_SLAB_SIZE, state, sizeof state, NULL) == 0);
    MUST(pcow_snapshot_set_state_size(image, "s", PCOW_SLAB_SIZE + sizeof state, NULL) == 0);
}

static void put32(uint8_t *to, uint32_t value)
{
    memcpy(to, &value, sizeof value);
}

/* Clusters of 4 KiB: two whole ones, one partly copied, then a snapshot with another. */
static void make_format_1(const char *path)
{
    static uint8_t file[10 * 4096];
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);

    for (unsigned super = 0; super <= 5; super += 5) {
        uint8_t *at = file + super * 4096;

        put32(at, 4096);
        put32(at + 4, 600);
        memcpy(at + 12, "NBJL", 4);
        put32(at + 4096, super ? 1 : 3);
        for (uint32_t i = 0; i < 3; i++) {
            put32(at + 4096 + 64 + i * 8, i * 300 % 599);
            put32(at + 4096 + 68 + i * 8, i == 2);
        }
    }
    memset(file + 2 * 4096, 1, 3 * 4096);
    memset(file + 7 * 4096, 2, 3 * 4096);
    MUST(fd >= 0 && write(fd, file, 8 * 4096) == 8 * 4096);
    close(fd);
}

static void remember(struct start *into, const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    off_t at = 0, hole;

    MUST(fd >= 0 && fstat(fd, &st) == 0);
    into->size = (uint64_t)st.st_size;
    while ((at = lseek(fd, at, SEEK_DATA)) >= 0) {
        struct part *part = &into->part[into->parts++];

        hole = lseek(fd, at, SEEK_HOLE);
        MUST(into->parts <= 64 && hole > at);
        part->offset = (uint64_t)at;
        part->length = (size_t)(hole - at);
        part->bytes = malloc(part->length);
        MUST(part->bytes && pread(fd, part->bytes, part->length, at) == (ssize_t)part->length);
        at = hole;
    }
    close(fd);
}

static void remove_directory(void)
{
    DIR *dir = opendir(directory);
    struct dirent *entry;

    while (dir && (entry = readdir(dir)))
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    rmdir(directory);
    for (unsigned s = 0; s < START_COUNT; s++)
        for (unsigned i = 0; i < start[s].parts; i++)
            free(start[s].part[i].bytes);
}

void description_setup(void)
{
    const char *top = getenv("TMPDIR");
    struct stat st;
    pcow_image *image;

    snprintf(directory, sizeof directory, "%s/pcow-fuzz-XXXXXX",
             top                          ? top
             : stat("/dev/shm", &st) == 0 ? "/dev/shm"
                                          : "/tmp");
    MUST(mkdtemp(directory));
    atexit(remove_directory);
    image = make("plain", NULL, false);
    write_pages(image, 1, 3);
    pcow_close(image);
    image = make("snapshots", NULL, false);
    make_snapshots(image);
    pcow_close(image);
    image = make("overlay", path_of("plain"), false);
    write_pages(image, 2, 1);
    pcow_close(image);
    image = make("state", NULL, false);
    make_state(image);
    pcow_close(image);
    make_format_1(path_of("format1"));
    image = make("mirror", NULL, true);
    make_snapshots(image);
    make_state(image);
    pcow_close(image);
    image = make("summed", NULL, true);
    make_state(image);
    make_snapshots(image);
    MUST(pcow_checksum(image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, NULL) == 0);
    pcow_close(image);
    remember(&start[PLAIN], path_of("plain"));
    remember(&start[SNAPSHOTS], path_of("snapshots"));
    remember(&start[OVERLAY], path_of("overlay"));
    remember(&start[STATE], path_of("state"));
    remember(&start[FORMAT_1], path_of("format1"));
    remember(&start[MIRROR], path_of("mirror"));
    remember(&start[SUMMED], path_of("summed"));
}

/* ---- reading the description ----------------------------------------------------------------- */

struct input {
    const uint8_t *at, *end;
};

static uint64_t take(struct input *input, unsigned bytes)
{
    uint64_t value = 0;

    for (unsigned i = 0; i < bytes && input->at < input->end; i++)
        value |= (uint64_t)*input->at++ << 8 * i;
    return value;
}

/* 0 to 7 bytes, the first says how many; or the size of the image, plus or minus a few slabs. */
static uint64_t take_value(struct input *input)
{
    unsigned form = (unsigned)take(input, 1);

    if (form >= 0xf0)
        return SIZE + ((form & 15) - UINT64_C(8)) * PCOW_SLAB_SIZE;
    return take(input, form % 8);
}

static void poke(int fd, uint64_t offset, const void *from, size_t length)
{
    /* A file that would not end is no image; that far, nothing new is to be found. */
    if (offset < UINT64_C(1) << 36)
        MUST(pwrite(fd, from, length, (off_t)offset) == (ssize_t)length);
}

static void poke_bytes(int fd, uint64_t offset, struct input *input)
{
    uint8_t bytes[16];
    size_t length = take(input, 1) % sizeof bytes + 1;

    for (size_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)take(input, 1);
    poke(fd, offset, bytes, length);
}

static void poke_word(int fd, uint64_t offset, uint64_t value)
{
    uint64_t word = word_encode(value);

    poke(fd, offset, &word, sizeof word);
}

static uint64_t record_offset(unsigned slot)
{
    return LAYER_TABLE_OFFSET + slot * (uint64_t)LAYER_RECORD_SIZE;
}

static void patch_owner(int fd, struct input *input)
{
    uint64_t slab = take(input, 1);
    struct owner owner = {.kind = (enum owner_kind)(take(input, 1) & 3)};
    uint64_t word;

    if (slab >= 0xf0)
        slab = SLABS_PER_GROUP + (slab & 15);
    owner.layer = (uint32_t)take_value(input) & MAX_LAYER_ID;
    owner.number = (uint32_t)take_value(input) & ((1u << OWNER_NUMBER_BITS) - 1);
    word = owner_encode(owner);
    poke(fd, owner_offset(slab), &word, sizeof word);
}

static void patch_state(int fd, struct input *input)
{
    unsigned slot = (unsigned)take(input, 1) % FIXED_RECORDS, state = (unsigned)take(input, 1);
    uint32_t id = (uint32_t)take_value(input) & MAX_LAYER_ID;
    uint64_t word = layer_state_word(id, (enum layer_state)(state & 7), state >> 3 & 1, state >> 4);

    poke(fd, record_offset(slot), &word, sizeof word);
}

static void copy_record(int fd, struct input *input)
{
    unsigned from = (unsigned)take(input, 1) % FIXED_RECORDS,
             to = (unsigned)take(input, 1) % FIXED_RECORDS;
    struct layer_record record;

    if (pread(fd, &record, sizeof record, (off_t)record_offset(from)) == sizeof record)
        poke(fd, record_offset(to), &record, sizeof record);
}

static void patch_bitmap(int fd, struct input *input)
{
    uint64_t slab = take(input, 1), word = take(input, 1) % PAGE_SET_WORDS, value = take(input, 8);

    poke(fd, bitmap_offset(slab) + word * 8, &value, sizeof value);
}

static void resize(int fd, struct input *input)
{
    uint64_t size = take(input, 2) * (UINT64_C(64) << 10) + take(input, 1);

    MUST(ftruncate(fd, (off_t)size) == 0);
}

static void raw(int fd, struct input *input)
{
    uint8_t bytes[4096];
    uint64_t offset = take(input, 1) * 512;
    size_t length = (size_t)(input->end - input->at) < sizeof bytes
                        ? (size_t)(input->end - input->at)
                        : sizeof bytes;

    memcpy(bytes, input->at, length);
    input->at += length;
    poke(fd, offset, bytes, length);
}

/* ---- patches of the mirror and of checksums -------------------------------------------------- */

#define PAGES (2 * METADATA_PAGES)     /* of metadata and mirror of group 0 */

static uint64_t word_offset(unsigned page)
{
    return mirror_offset(0, CHECKSUMS_PAGE) + page * sizeof(uint64_t);
}

static void patch_checksum(int fd, struct input *input)
{
    uint64_t offset = word_offset((unsigned)take(input, 2) % METADATA_PAGES), word;
    unsigned what = (unsigned)take(input, 1);

    word = what < 0x80 ? checksum_encode(what % 4, (uint32_t)take(input, 4)) : take(input, 8);
    poke(fd, offset, &word, sizeof word);
}

/* Another page's content, or a mirror's, or the other way round. */
static void copy_page(int fd, struct input *input)
{
    uint64_t from = take(input, 2) % PAGES, to = take(input, 2) % PAGES;
    uint8_t page[PCOW_PAGE_SIZE];

    if (pread(fd, page, sizeof page, (off_t)(from * sizeof page)) == sizeof page)
        poke(fd, to * sizeof page, page, sizeof page);
}

static void fill_page(int fd, struct input *input)
{
    uint64_t to = take(input, 2) % PAGES;
    uint8_t page[PCOW_PAGE_SIZE];

    memset(page, (int)take(input, 1), sizeof page);
    poke(fd, to * sizeof page, page, sizeof page);
}

static void patch_datasum(int fd, struct input *input)
{
    uint64_t offset = datasum_offset(take(input, 1));
    unsigned what = (unsigned)take(input, 1);
    uint64_t word = datasum_word((uint32_t)take_value(input) & MAX_LAYER_ID);

    if (what < 0x80)
        poke(fd, offset, &word, sizeof word);
    else
        poke_bytes(fd, offset + what % sizeof(struct datasum), input);
}

static void patch_mirror(int fd, unsigned what, struct input *input)
{
    switch (what % 5) {
    case 0:
        poke_bytes(fd, mirror_offset(0, 0) + take(input, 3) % PCOW_SLAB_SIZE, input);
        break;
    case 1:
        patch_checksum(fd, input);
        break;
    case 2:
        copy_page(fd, input);
        break;
    case 3:
        fill_page(fd, input);
        break;
    default:
        patch_datasum(fd, input);
    }
}

static void patch(int fd, struct input *input)
{
    unsigned what = (unsigned)take(input, 1);
    uint64_t first;

    if (what >= 0xf0) {
        patch_mirror(fd, what & 15, input);
        return;
    }
    switch (what % 14) {
    case 0:
        poke_bytes(fd, take(input, 2) % (2 * HEADER_SIZE), input);
        break;
    case 1:
        first = take(input, 1);
        poke_word(fd,
                  (first & 0x80 ? HEADER_COPY_OFFSET : 0) + offsetof(struct header, active_layer)
                      + first % 6 * 8,
                  take_value(input));
        break;
    case 2:
        patch_owner(fd, input);
        break;
    case 3:
        poke_bytes(fd, owner_offset(take(input, 1)) + take(input, 1) % 8, input);
        break;
    case 4:
        first = take(input, 1);
        poke_word(fd, record_offset(first & 15) + 8 * (1 + (first >> 4) % 4), take_value(input));
        break;
    case 5:
        poke_bytes(fd, record_offset(take(input, 1) % FIXED_RECORDS) + take(input, 1), input);
        break;
    case 6:
        patch_bitmap(fd, input);
        break;
    case 7:
        resize(fd, input);
        break;
    case 8:
        poke_bytes(fd, take(input, 3), input);
        break;
    case 9:
        first = take(input, 1);
        poke_bytes(fd,
                   offsetof(struct header, base) + (first & 1) * sizeof(struct base_record)
                       + (first >> 1) % 64,
                   input);
        break;
    case 10:
        MUST(ftruncate(fd, (off_t)(GROUP_SIZE + take(input, 1) * PCOW_SLAB_SIZE)) == 0);
        break;
    case 11:
        copy_record(fd, input);
        break;
    case 12:
        patch_state(fd, input);
        break;
    default:
        raw(fd, input);
    }
}

/* ---- checksums ------------------------------------------------------------------------------- */

static void fix_header(int fd, uint64_t offset, unsigned flags)
{
    struct header header;

    if (pread(fd, &header, sizeof header, (off_t)offset) != sizeof header)
        return;
    if (flags & FIX_HEADER)
        header.crc = header_crc(&header);
    for (unsigned i = 0; i < 2 && flags & FIX_BASE; i++)
        header.base[i].crc = base_record_crc(&header.base[i]);
    poke(fd, offset, &header, sizeof header);
}

static void fix_records(int fd)
{
    for (unsigned slot = 0; slot < FIXED_RECORDS; slot++) {
        struct layer_record record;

        if (pread(fd, &record, sizeof record, (off_t)record_offset(slot)) != sizeof record)
            return;
        record.crc = layer_record_crc(&record);
        poke(fd, record_offset(slot), &record, sizeof record);
    }
}

static void fix_sums(int fd, const struct header *header)
{
    for (uint64_t slab = MIRROR_HEADS; slab < 64; slab++) {
        struct datasum datasum;
        uint32_t crc = crc32c(header->uuid, sizeof header->uuid);

        if (pread(fd, &datasum, sizeof datasum, (off_t)datasum_offset(slab)) != sizeof datasum)
            return;
        crc = crc32c_of_more(crc, &slab, sizeof slab);
        datasum.crc = crc32c_of_more(crc, datasum.hash,
                                     sizeof datasum - offsetof(struct datasum, hash));
        if (datasum.word)
            poke(fd, datasum_offset(slab), &datasum, sizeof datasum);
    }
}

/* As a writer who closes the image leaves it. */
static void fix_mirror(int fd, const struct header *header)
{
    static const uint8_t zeros[PCOW_PAGE_SIZE];
    struct file file;

    memcpy(file.uuid, header->uuid, sizeof file.uuid);
    for (unsigned page = 0; page < METADATA_PAGES; page++) {
        uint8_t content[PCOW_PAGE_SIZE];
        uint64_t old, word;

        if (!metadata_page_counts(page))
            continue;
        if (pread(fd, content, sizeof content, (off_t)(page * PCOW_PAGE_SIZE)) != sizeof content
            || pread(fd, &old, sizeof old, (off_t)word_offset(page)) != sizeof old)
            return;
        if (!old && !memcmp(content, zeros, sizeof zeros))
            continue;
        word = checksum_encode(CHECKSUM_VALID, mirror_checksum(&file, 0, page, content));
        poke(fd, mirror_offset(0, page), content, sizeof content);
        poke(fd, word_offset(page), &word, sizeof word);
    }
}

static void fix_mirrored(int fd, unsigned flags)
{
    struct header header;

    if (pread(fd, &header, sizeof header, 0) != sizeof header)
        return;
    if (flags & FIX_SUMS)
        fix_sums(fd, &header);
    if (flags & FIX_MIRROR)
        fix_mirror(fd, &header);
}

bool description_has_mirror(const uint8_t *data, size_t size)
{
    return size && (data[0] & 7) >= MIRROR;
}

static void read_page(int fd, uint64_t page, uint8_t content[PCOW_PAGE_SIZE])
{
    MUST(pread(fd, content, PCOW_PAGE_SIZE, (off_t)(page * PCOW_PAGE_SIZE)) == PCOW_PAGE_SIZE);
}

bool description_damage(const char *path, const uint8_t *data, size_t size)
{
    /* Those that hold something in these images: the first ones of each structure. */
    static const unsigned pages[] = {0, 1, SLAB_TABLE_OFFSET / PCOW_PAGE_SIZE,
                                     LAYER_TABLE_OFFSET / PCOW_PAGE_SIZE,
                                     BITMAP_OFFSET / PCOW_PAGE_SIZE};
    struct input input = {data + size / 2, data + size};
    unsigned page = pages[take(&input, 1) % 5], what = (unsigned)take(&input, 1);
    uint8_t before[PCOW_PAGE_SIZE], content[PCOW_PAGE_SIZE];
    uint64_t words[PCOW_PAGE_SIZE / sizeof(uint64_t)];
    int fd = open(path, O_RDWR);
    bool damaged;

    MUST(fd >= 0);
    read_page(fd, page, before);
    read_page(fd, METADATA_PAGES + CHECKSUMS_PAGE, (uint8_t *)words);
    memcpy(content, before, sizeof content);
    if (what < 0x40)
        memset(content, what < 0x20 ? 0 : 0xff, sizeof content);
    else if (what < 0x60)
        read_page(fd, page + 1, content);
    else
        content[take(&input, 2) % sizeof content] ^= (uint8_t)(1 << what % 8);
    damaged = memcmp(before, content, sizeof before) && checksum_is(words[page], CHECKSUM_VALID);
    if (damaged)
        poke(fd, page * sizeof content, content, sizeof content);
    close(fd);
    return damaged;
}

const char *description_materialize(const uint8_t *data, size_t size, bool *format_1)
{
    struct input input = {data, data + size};
    unsigned flags = (unsigned)take(&input, 1);
    const struct start *from = &start[(flags & 7) % START_COUNT];
    const char *path = path_of("image");
    int fd;

    *format_1 = from == &start[FORMAT_1];
    unlink(path);
    fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    MUST(fd >= 0);
    for (unsigned i = 0; i < from->parts; i++)
        poke(fd, from->part[i].offset, from->part[i].bytes, from->part[i].length);
    MUST(ftruncate(fd, (off_t)from->size) == 0);
    while (input.at < input.end)
        patch(fd, &input);
    if (flags & (FIX_HEADER | FIX_BASE) && !*format_1) {
        fix_header(fd, 0, flags);
        fix_header(fd, HEADER_COPY_OFFSET, flags);
    }
    if (flags & FIX_RECORDS && !*format_1)
        fix_records(fd);
    if (description_has_mirror(data, size))
        fix_mirrored(fd, flags);
    close(fd);
    return path;
}
