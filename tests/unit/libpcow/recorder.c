/* SPDX-License-Identifier: BSD-3-Clause */
#include "recorder.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "chain/chain.h"
#include "monitor/monitor.h"

static void append(struct recorder *recorder, struct entry entry, const void *bytes)
{
    if (recorder->count == recorder->capacity) {
        recorder->capacity = recorder->capacity ? recorder->capacity * 2 : 1024;
        recorder->entry = realloc(recorder->entry, recorder->capacity * sizeof *recorder->entry);
        assert_non_null(recorder->entry);
    }
    if (bytes) {
        entry.bytes = malloc(entry.length);
        assert_non_null(entry.bytes);
        memcpy(entry.bytes, bytes, entry.length);
    }
    recorder->entry[recorder->count++] = entry;
}

/* ---- files ----------------------------------------------------------------------------------- */

static void load_pages(struct recorded_file *file, int fd)
{
    off_t at = 0;

    while ((at = lseek(fd, at, SEEK_DATA)) >= 0) {
        off_t end = lseek(fd, at, SEEK_HOLE);

        for (; at < end; at += 4096) {
            uint8_t *bytes = malloc(4096);

            assert_non_null(bytes);
            assert_int_equal(pread(fd, bytes, 4096, at), 4096);
            file->page = realloc(file->page, (file->pages + 1) * sizeof *file->page);
            assert_non_null(file->page);
            file->page[file->pages++] = (struct page){(uint64_t)at / 4096, bytes};
        }
    }
}

static void opened(struct recorder *recorder, const struct file *open, const char *path)
{
    struct recorded_file *file;
    struct stat st;
    unsigned i = 0;

    while (i < recorder->files && strcmp(recorder->file[i].path, path))
        i++;
    assert_true(i < RECORDED_FILES);
    file = &recorder->file[i];
    if (i == recorder->files) {
        recorder->files++;
        snprintf(file->path, sizeof file->path, "%s", path);
        assert_int_equal(fstat(open->fd, &st), 0);
        file->size = (uint64_t)st.st_size;
        load_pages(file, open->fd);
    }
    i = 0;
    while (i < RECORDED_OPENS && file->open[i])
        i++;
    assert_true(i < RECORDED_OPENS);
    file->open[i] = open;
}

static const struct file *open_of(const struct persist *persist)
{
    return (const struct file *)((const char *)persist - offsetof(struct file, persist));
}

/* Where the file is noted that was opened so. */
static const struct file **find_open(struct recorder *recorder, const struct file *open,
                                     unsigned *number)
{
    for (*number = 0; *number < recorder->files; ++*number)
        for (unsigned i = 0; i < RECORDED_OPENS; i++)
            if (recorder->file[*number].open[i] == open)
                return &recorder->file[*number].open[i];
    fail_msg("a file that was not opened");
    return NULL;
}

static bool in_window(const struct file *open, const void *address, uint64_t *offset)
{
    for (uint64_t group = 0; group << (SLAB_BITS + GROUP_BITS) < open->size; group++) {
        uint64_t within = (uintptr_t)address - (uintptr_t)open->window[group];

        if (open->window[group] && within < GROUP_SIZE) {
            *offset = group * GROUP_SIZE + within;
            return true;
        }
    }
    return false;
}

/* ---- what the library does ------------------------------------------------------------------- */

/*
 * A range of addresses, in the window of the file or in the guest's range, page by page where that
 * leads to other places.
 */
static void append_range(struct recorder *recorder, const struct file *open, struct entry entry,
                         const uint8_t *address, const uint8_t *bytes)
{
    uint64_t length = entry.length, done = 0;

    if (in_window(open, address, &entry.offset)) {
        append(recorder, entry, bytes);
        return;
    }
    assert_non_null(recorder->map);
    while (done < length) {
        uint64_t guest = (uint64_t)(address + done - recorder->map->address),
                 piece = 4096 - guest % 4096;
        struct place place =
            chain_find(recorder->map->image, guest >> SLAB_BITS, (unsigned)(guest / 4096 % 512), 1);

        assert_true(guest < recorder->map->size);
        if (piece > length - done)
            piece = length - done;
        entry.offset = place.offset + guest % 4096;
        entry.length = piece;
        /* A flush may cover what lies in other files or nowhere. */
        if (place.present && place.own)
            append(recorder, entry, bytes ? bytes + done : NULL);
        else
            assert_null(bytes);
        done += piece;
    }
}

static int inject(struct recorder *recorder, enum observed what)
{
    if (!recorder->injecting || what != recorder->fail_what)
        return 0;
    return ++recorder->calls == recorder->fail_at ? recorder->fail_code : 0;
}

static void record(struct recorder *recorder, const struct observation *o)
{
    struct entry entry = {.offset = o->offset, .length = o->length};
    const struct file *open = open_of(o->persist), **noted;

    if (o->what == OBSERVED_OPEN) {
        opened(recorder, open, o->path);
        return;
    }
    noted = find_open(recorder, open, &entry.file);
    switch (o->what) {
    case OBSERVED_OPEN:
    case OBSERVED_MAP:
    case OBSERVED_ALLOCATE:    /* unwritten blocks read as zeros, as the hole did */
        break;
    case OBSERVED_CLOSE:
        *noted = NULL;
        break;
    case OBSERVED_STORE:
    case OBSERVED_COPY:
        entry.kind = ENTRY_STORE;
        entry.torn = o->what == OBSERVED_COPY;
        append_range(recorder, open, entry, o->address, o->from);
        break;
    case OBSERVED_WRITE:
        entry.kind = ENTRY_STORE;
        entry.torn = true;
        append(recorder, entry, o->from);
        break;
    case OBSERVED_FLUSH:
    case OBSERVED_MSYNC:
        entry.kind = o->what == OBSERVED_FLUSH ? ENTRY_FLUSH : ENTRY_MSYNC;
        append_range(recorder, open, entry, o->address, NULL);
        break;
    case OBSERVED_FENCE:
        entry.kind = ENTRY_FENCE;
        append(recorder, entry, NULL);
        break;
    case OBSERVED_PUNCH:
        entry.kind = ENTRY_PUNCH;
        append(recorder, entry, NULL);
        break;
    case OBSERVED_TRUNCATE:
        entry.kind = ENTRY_SIZE;
        append(recorder, entry, NULL);
        break;
    case OBSERVED_SYNC:
        entry.kind = ENTRY_SYNC;
        append(recorder, entry, NULL);
        break;
    }
}

/* Would it take a block? */
static bool finds_no_space(const struct recorder *recorder, const struct observation *observation)
{
    off_t hole;

    if (recorder->full < 0
        || (observation->what != OBSERVED_ALLOCATE && observation->what != OBSERVED_WRITE))
        return false;
    hole = lseek(recorder->full, (off_t)observation->offset, SEEK_HOLE);
    return hole < 0 || (uint64_t)hole < observation->offset + observation->length;
}

static int look(struct observer *observer, const struct observation *observation)
{
    struct recorder *recorder = (struct recorder *)observer;
    enum observed what = observation->what;
    void (*meanwhile)(void *opaque) = NULL;
    int ret;

    pthread_mutex_lock(&recorder->lock);
    ret = finds_no_space(recorder, observation) ? -ENOSPC : inject(recorder, observation->what);
    if (!recorder->injecting && ret != -ENOSPC)
        record(recorder, observation);
    if (recorder->meanwhile && pthread_equal(recorder->thread, pthread_self())
        && (what == OBSERVED_SYNC || what == OBSERVED_MSYNC || what == OBSERVED_FENCE))
        meanwhile = recorder->meanwhile;
    pthread_mutex_unlock(&recorder->lock);
    if (meanwhile)
        meanwhile(recorder->opaque);
    return ret;
}

/* ---- what the test and the guest do ---------------------------------------------------------- */

void recorder_init(struct recorder *recorder, enum pcow_persistence persistence)
{
    memset(recorder, 0, sizeof *recorder);
    recorder->observer.persistence = persistence;
    recorder->observer.look = look;
    recorder->full = -1;
    pthread_mutex_init(&recorder->lock, NULL);
}

void recorder_free(struct recorder *recorder)
{
    for (size_t i = 0; i < recorder->count; i++)
        free(recorder->entry[i].bytes);
    for (unsigned i = 0; i < recorder->files; i++) {
        for (size_t p = 0; p < recorder->file[i].pages; p++)
            free(recorder->file[i].page[p].bytes);
        free(recorder->file[i].page);
    }
    free(recorder->entry);
    pthread_mutex_destroy(&recorder->lock);
    memset(recorder, 0, sizeof *recorder);
}

void recorder_fill(struct recorder *recorder, int fd)
{
    pthread_mutex_lock(&recorder->lock);
    recorder->full = fd;
    pthread_mutex_unlock(&recorder->lock);
}

void recorder_fail(struct recorder *recorder, enum observed what, int code, unsigned n)
{
    pthread_mutex_lock(&recorder->lock);
    recorder->fail_what = what;
    recorder->fail_code = code;
    recorder->calls = 0;
    recorder->fail_at = n;
    pthread_mutex_unlock(&recorder->lock);
}

unsigned recorder_fail_no_more(struct recorder *recorder)
{
    unsigned calls;

    pthread_mutex_lock(&recorder->lock);
    calls = recorder->calls;
    recorder->fail_at = 0;
    pthread_mutex_unlock(&recorder->lock);
    return calls;
}

void recorder_mark(struct recorder *recorder, const void *expectation)
{
    pthread_mutex_lock(&recorder->lock);
    append(recorder, (struct entry){.kind = ENTRY_MARK, .expectation = expectation}, NULL);
    pthread_mutex_unlock(&recorder->lock);
}

void recorder_guest_store(struct recorder *recorder, uint64_t offset, const void *from,
                          size_t length)
{
    const struct file *file = &recorder->map->image->file;
    uint8_t *to = recorder->map->address + offset;
    struct entry entry = {.kind = ENTRY_STORE, .torn = true, .length = length};

    pthread_mutex_lock(&recorder->lock);
    find_open(recorder, file, &entry.file);
    append_range(recorder, file, entry, to, from);
    pthread_mutex_unlock(&recorder->lock);
    memcpy(to, from, length);
}

void recorder_guest_flush(struct recorder *recorder, uint64_t offset, size_t length)
{
    MUST(pcow_map_flush(recorder->map, offset, length, &error));
}

const char *recorder_describe(const struct entry *entry)
{
    static const char *const word[] = {"active_layer", "next_layer_id", "layer_slots",
                                       "generation",   "base_slot",     "state"};
    static const char *const field[] = {"state of record", "parent of record",
                                        "virtual_size of record", "parent_limit of record",
                                        "state_size of record"};
    uint64_t slab = entry->offset >> SLAB_BITS, at = entry->offset % PCOW_SLAB_SIZE;

    switch (entry->kind) {
    case ENTRY_FENCE:
        return "fence";
    case ENTRY_SYNC:
        return "fdatasync";
    case ENTRY_SIZE:
        return "end of file";
    default:
        break;
    }
    /* The images of these tests have a mirror. */
    if (slab % SLABS_PER_GROUP == 1)
        return at / PCOW_PAGE_SIZE == CHECKSUMS_PAGE ? "checksum" : "mirror";
    if (slab % SLABS_PER_GROUP)
        return "data";
    if (slab == 0 && at >= 512 && at < 560)
        return word[(at - 512) / 8];
    if (slab == 0 && at >= 1024 && at < 2048)
        return "base record";
    if (slab == 0 && at >= HEADER_COPY_OFFSET && at < HEADER_COPY_OFFSET + HEADER_SIZE)
        return "copy of the header";
    if (at >= BITMAP_OFFSET)
        return "bitmap";
    if (at >= LAYER_TABLE_OFFSET)
        return at % LAYER_RECORD_SIZE < 40 ? field[at % LAYER_RECORD_SIZE / 8] : "name of record";
    return at >= SLAB_TABLE_OFFSET ? "owner word" : "header";
}
