/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The file beside an image that keeps what a repair drops: doc/source/reference/rescue.rst. It is
 * written before the repair begins, so a crash loses nothing: either the image is as it was, or the
 * file is whole.
 */
#include "check/rescue.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "util/error.h"
#include "util/utf8.h"

#define LINE_SIZE 1024u

struct rescue {
    struct check *check;
    FILE *to; /* NULL: only count */
    uint64_t size;
    int error;
};

static void put(struct rescue *rescue, const void *from, size_t length)
{
    rescue->size += length;
    errno = 0;
    if (rescue->to && rescue->error == 0 && fwrite(from, 1, length, rescue->to) != length)
        rescue->error = errno ? -errno : -EIO;
}

static void put_line(struct rescue *rescue, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void put_line(struct rescue *rescue, const char *format, ...)
{
    char line[LINE_SIZE];
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    put(rescue, line, (size_t)length < sizeof line ? (size_t)length : sizeof line - 1);
}

/* ,"key": "text", as JSON; or nothing for NULL. */
static const char *as_json(char *to, size_t size, const char *key, const char *text)
{
    size_t used = (size_t)snprintf(to, size, ", \"%s\": \"", key);

    if (!text)
        return "";
    while (*text && used + 8 < size) {
        size_t length = utf8_sequence(text);

        if (*text == '"' || *text == '\\' || (unsigned char)*text < 0x20) {
            used += (size_t)snprintf(to + used, size - used, "\\u%04x", (unsigned char)*text);
        } else {
            memcpy(to + used, length ? text : UTF8_REPLACEMENT, length ? length : 3);
            used += length ? length : 3;
        }
        text += length ? length : 1;
    }
    snprintf(to + used, size - used, "\"");
    return to;
}

static const char *kind_name(enum pcow_loss_kind kind)
{
    static const char *const names[] = {
        [PCOW_LOSS_DATA] = "data",
        [PCOW_LOSS_STATE] = "state",
        [PCOW_LOSS_SNAPSHOT] = "snapshot",
        [PCOW_LOSS_UNKNOWN] = "unknown",
    };

    return names[kind];
}

#define BATCH 16u /* pages */

/* Read some pages; which of them hold anything but zeros. Gives how many bytes could not be read. */
static uint64_t read_pages(const struct check *check, uint64_t offset, uint8_t *pages,
                           size_t length, bool holds[BATCH])
{
    int ret = file_read(&check->file, offset, pages, length);
    uint64_t unread = 0;

    for (unsigned i = 0; i * PCOW_PAGE_SIZE < length; i++) {
        uint8_t *page = pages + i * PCOW_PAGE_SIZE;
        size_t size = length - i * PCOW_PAGE_SIZE;

        size = size < PCOW_PAGE_SIZE ? size : PCOW_PAGE_SIZE;
        if (ret && file_read(&check->file, offset + i * PCOW_PAGE_SIZE, page, size)) {
            unread += size;
            holds[i] = false;
        } else {
            holds[i] = page[0] || memcmp(page, page + 1, size - 1);
        }
    }
    return unread;
}

static void put_pages(struct rescue *rescue, uint64_t at, const uint8_t *pages, size_t length,
                      const bool holds[BATCH])
{
    const unsigned count = (unsigned)((length + PCOW_PAGE_SIZE - 1) / PCOW_PAGE_SIZE);

    for (unsigned first = 0, end; first < count; first = end) {
        size_t from = first * PCOW_PAGE_SIZE, to;

        for (end = first; end < count && holds[end]; end++)
            ;
        to = end * PCOW_PAGE_SIZE < length ? end * PCOW_PAGE_SIZE : length;
        if (end == first) {
            end++;
            continue;
        }
        put_line(rescue, "{\"at\": %llu, \"bytes\": %zu}\n", (unsigned long long)(at + from),
                 to - from);
        put(rescue, pages + from, to - from);
        put(rescue, "\n", 1);
    }
}

/* Zeros are left out, and so is what the medium does not give back: how much that is. */
static uint64_t put_content(struct rescue *rescue, const struct pcow_loss *loss)
{
    static const size_t batch = BATCH * PCOW_PAGE_SIZE;
    uint8_t pages[BATCH * PCOW_PAGE_SIZE];
    uint64_t unread = 0;

    for (uint64_t at = 0; at < loss->content && rescue->error == 0; at += batch) {
        size_t length = loss->content - at < batch ? (size_t)(loss->content - at) : batch;
        bool holds[BATCH];

        unread += read_pages(rescue->check, loss->file_offset + at, pages, length, holds);
        put_pages(rescue, at, pages, length, holds);
    }
    return unread;
}

static void put_range(struct rescue *rescue, const struct pcow_loss *is)
{
    char name[PCOW_SNAPSHOT_NAME_SIZE * 6 + 32], offset[64] = "";
    uint64_t unread;

    if (is->guest_offset != PCOW_NOWHERE)
        snprintf(offset, sizeof offset, ", \"guest-offset\": %llu",
                 (unsigned long long)is->guest_offset);
    put_line(rescue, "{\"lost\": \"%s\", \"layer\": %u%s%s, \"length\": %llu, \"there\": %llu}\n",
             kind_name(is->kind), is->layer,
             as_json(name, sizeof name, "snapshot", is->snapshot), offset,
             (unsigned long long)is->length, (unsigned long long)is->content);
    unread = put_content(rescue, is);
    if (unread)
        put_line(rescue, "{\"unread\": %llu}\n", (unsigned long long)unread);
}

static void put_loss(struct rescue *rescue, const struct check_loss *loss)
{
    struct pcow_loss range;
    unsigned page = 0;

    while (rescue->error == 0 && check_next_range(rescue->check, loss, &page, &range))
        put_range(rescue, &range);
}

static void put_snapshots(struct rescue *rescue)
{
    const struct check *check = rescue->check;
    char name[PCOW_SNAPSHOT_NAME_SIZE * 6 + 32];

    for (size_t i = 0; i < check->layer_count; i++) {
        const struct layer *layer = &check->layers[i].layer;

        if (check->layers[i].alive)
            put_line(rescue, "{\"layer\": %u, \"parent\": %u, \"size\": %llu%s}\n", layer->id,
                     layer->parent, (unsigned long long)layer->virtual_size,
                     as_json(name, sizeof name, "snapshot", check_snapshot_name(check, layer->id)));
    }
}

static void put_all(struct rescue *rescue)
{
    const struct check *check = rescue->check;
    const struct pcow_check_result *result = check->result;
    char first[RESCUE_FIRST_SIZE];

    rescue_first_words(check, first);
    put_line(rescue, "%s, \"date\": %lld}\n", first, (long long)time(NULL));
    put_snapshots(rescue);
    for (size_t i = 0; i < check->loss_count && rescue->error == 0; i++)
        put_loss(rescue, &check->losses[i]);
    if (result->lost_size == 0 && result->lost_certainty == PCOW_ESTIMATE)
        put_line(rescue, "{\"end\": %llu, \"lost-size\": null}\n",
                 (unsigned long long)result->losses);
    else
        put_line(rescue, "{\"end\": %llu, \"lost-size\": %llu}\n",
                 (unsigned long long)result->losses, (unsigned long long)result->lost_size);
}

static int write_all(struct check *check, int fd, const char *path)
{
    struct rescue rescue = {.check = check, .to = fdopen(fd, "w")};

    check->rescue = rescue.to;
    if (!rescue.to) {
        rescue.error = -errno;
        close(fd);
        return rescue.error;
    }
    rescue.error = rescue_take_mode(check, fd);
    put_all(&rescue);
    if (!rescue.error && (fflush(rescue.to) || fsync(fd)))
        rescue.error = -errno;
    return rescue.error ? rescue.error : rescue_sync_directory(path);
}

int check_keep_losses(struct check *check)
{
    struct rescue count = {.check = check};
    char *path = NULL;
    int ret, fd;

    put_all(&count);
    ret = rescue_check_room(check, count.size);
    if (ret)
        return ret;
    fd = rescue_create(check, &path);
    ret = fd < 0 ? fd : write_all(check, fd, path);
    if (fd >= 0 && ret) {
        unlink(path);
        check->result->rescue_suffix[0] = 0;
        error_set_errno(check->error, ret, "cannot write %s; nothing was repaired", path);
    }
    free(path);
    return ret;
}

int check_end_rescue(struct check *check)
{
    struct rescue rescue = {.check = check, .to = check->rescue};

    put(&rescue, RESCUE_FINISHED, sizeof RESCUE_FINISHED - 1);
    if (!rescue.error && (fflush(rescue.to) || fsync(fileno(rescue.to))))
        rescue.error = -errno;
    return rescue.error
               ? error_set_errno(check->error, rescue.error,
                                 "%s is repaired, but that cannot be noted in the file that keeps "
                                 "what was dropped",
                                 check->file.path)
               : 0;
}
