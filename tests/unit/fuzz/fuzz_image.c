/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * libFuzzer target: whatever the file holds, nothing crashes, hangs or leaks, and what the library
 * says about it holds together: an image that check calls healthy can be opened and stays healthy
 * in use, one that cannot be opened is found damaged, and one that was repaired is healthy.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "description.h"
#include "pcow.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BUFFER (UINT64_C(64) << 10)

static char buffer[BUFFER];
static char findings[16384];

static void broken(const char *what, const struct pcow_error *error)
{
    fprintf(stderr, "fuzz: %s: %s\n%s", what, error ? error->message : "", findings);
    abort();
}

static void collect(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    size_t used = strlen(findings);

    (void)opaque;
    snprintf(findings + used, sizeof findings - used, "  %d: %s\n", (int)kind, message);
}

static int check(const char *path, unsigned flags, struct pcow_check_result *result,
                 struct pcow_error *error)
{
    char rescue[600];

    findings[0] = 0;
    snprintf(rescue, sizeof rescue, "%s.rescue", path);
    unlink(rescue);
    return pcow_check(path, flags, collect, NULL, result, error);
}

static void read_some(pcow_image *image)
{
    uint64_t size = pcow_size(image), step = size / 8 > BUFFER ? size / 8 : BUFFER;
    struct pcow_extent extent;
    struct pcow_info info;

    pcow_get_info(image, &info);
    for (uint64_t offset = 0; offset < size; offset += step) {
        uint64_t length = size - offset < BUFFER ? size - offset : BUFFER;

        pcow_read(image, offset, buffer, length, NULL);
    }
    for (uint64_t offset = 0, count = 0; offset < size && count < 64;
         offset += extent.length, count++) {
        if (pcow_get_extent(image, offset,
                            size - offset < PCOW_SLAB_SIZE * 8 ? size - offset : PCOW_SLAB_SIZE * 8,
                            &extent, NULL))
            return;
        if (extent.length == 0 || extent.offset != offset)
            broken("an extent without length", NULL);
    }
}

static void use_snapshots(pcow_image *image, const char *path)
{
    struct pcow_snapshot *list = NULL;
    size_t count = 0;

    if (pcow_snapshot_list(image, &list, &count, NULL))
        return;
    for (size_t i = 0; i < count && i < 4; i++) {
        pcow_image *view = NULL;

        if (pcow_open(path, PCOW_OPEN_FORCE_SHARE, list[i].name, &view, NULL) == 0)
            read_some(view);
        pcow_close(view);
        pcow_snapshot_read_state(image, list[i].name, 0, buffer,
                                 list[i].state_size < BUFFER ? list[i].state_size : BUFFER, NULL);
    }
    free(list);
}

static void look(const char *path, unsigned flags)
{
    struct pcow_data_result data;
    pcow_image *image = NULL;

    if (pcow_open(path, flags, NULL, &image, NULL) == 0) {
        read_some(image);
        use_snapshots(image, path);
        pcow_check_data(path, 0, NULL, NULL, NULL, &data, NULL);
    }
    pcow_close(image);
}

/* What was written is read back, in the middle of everything else. */
static void write_some(pcow_image *image, uint64_t offset, unsigned salt)
{
    char page[6000];

    if (offset + sizeof page > pcow_size(image))
        return;
    memset(page, (int)salt | 1, sizeof page);
    if (pcow_write(image, offset, page, sizeof page, NULL) == 0
        && (pcow_read(image, offset, buffer, sizeof page, NULL)
            || memcmp(buffer, page, sizeof page)))
        broken("what was written does not read back", NULL);
}

static void change(const char *path, const uint8_t *data, size_t size)
{
    unsigned salt = size ? data[size - 1] : 0;
    struct pcow_snapshot *list = NULL;
    pcow_image *image = NULL;
    size_t count = 0;

    if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, NULL)) {
        pcow_close(image);
        return;
    }
    write_some(image, 5000, salt);
    if (pcow_snapshot_list(image, &list, &count, NULL) == 0 && count) {
        const char *name = list[salt % count].name;

        write_some(image, PCOW_SLAB_SIZE + 600 * 4096, salt + 1);
        if (salt & 0x10)
            pcow_snapshot_rename(image, name, "renamed", NULL);
        else if (salt & 0x20)
            pcow_snapshot_revert(image, name, NULL);
        else
            pcow_snapshot_delete(image, name, NULL, NULL);
    }
    free(list);
    if (pcow_snapshot_create(image, "fuzz", NULL) == 0) {
        pcow_snapshot_write_state(image, "fuzz", 100, buffer, 5000, NULL);
        pcow_snapshot_set_state_size(image, "fuzz", 4000, NULL);
    }
    write_some(image, 1000 * 4096, salt + 2);
    if (pcow_size(image) >= PCOW_SLAB_SIZE)
        pcow_write_zeroes(image, 4096 * (salt & 7), 20000, NULL);
    if (salt & 0x40)
        pcow_resize(image, pcow_size(image) / PCOW_SLAB_SIZE / 2 * PCOW_SLAB_SIZE, true, NULL);
    if (salt & 0x80)
        pcow_resize(image, pcow_size(image) + 2 * PCOW_SLAB_SIZE, false, NULL);
    write_some(image, pcow_size(image) - 6000, salt + 3);
    pcow_flush(image, NULL);
    pcow_close(image);
}

/* Errors of pcow_open() that check has nothing to say about: the base, a template. */
static bool is_outside(int error)
{
    return error == -ENOENT || error == -ESTALE || error == -ELOOP || error == -EROFS
           || error == -EMEDIUMTYPE || error == -ENOTSUP || error == -EISDIR
           || error == -ENAMETOOLONG;
}

static void test_format_2(const char *path, const uint8_t *data, size_t size)
{
    struct pcow_check_result before = {0}, after = {0};
    struct pcow_error error = {0};
    pcow_image *image = NULL;
    bool format_1;
    int checked = check(path, 0, &before, &error), opened;

    opened = pcow_open(path, PCOW_OPEN_NO_BASE, NULL, &image, &error);
    pcow_close(image);
    if (checked == 0 && before.corruptions == 0 && opened)
        broken("check finds nothing, but it cannot be opened", &error);
    look(path, 0);
    look(path, PCOW_OPEN_NO_BASE);
    change(path, data, size);
    if (checked == 0 && before.corruptions == 0) {
        if (check(path, 0, &after, &error))
            broken("cannot be checked after use", &error);
        if (after.corruptions)
            broken("was healthy, and is damaged after use", NULL);
    }
    if (checked)
        return;
    path = description_materialize(data, size, &format_1);
    if (check(path, PCOW_CHECK_REPAIR | PCOW_CHECK_ACCEPT_LOSS, &before, &error)
        || before.corruptions_fixed != before.corruptions)
        return;
    if (check(path, 0, &after, &error) || after.corruptions || after.leaks)
        broken("not clean after a repair", NULL);
    image = NULL;
    opened = pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, &error);
    pcow_close(image);
    if (opened && !is_outside(opened))
        broken("cannot be opened after a repair", &error);
    change(path, data, size);
    if (check(path, 0, &after, &error) || after.corruptions)
        broken("damaged by use after a repair", NULL);
}

/*
 * What has a mirror, is healthy and was closed by its last writer: damage of a page is found and
 * put right, and nothing is lost.
 */
static void test_mirror(const char *path, const uint8_t *data, size_t size)
{
    struct pcow_check_result result = {0};
    struct pcow_error error = {0};
    pcow_image *image = NULL;

    if (pcow_open(path, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE, NULL, &image, &error)) {
        pcow_close(image);
        return;
    }
    if (pcow_finish(image, &error))
        broken("it is said to be overwritten by others", &error);
    pcow_close(image);
    if (check(path, 0, &result, &error) || result.corruptions || result.leaks
        || !description_damage(path, data, size))
        return;
    if (check(path, 0, &result, &error) || !result.corruptions)
        broken("damage of a page is not found", &error);
    image = NULL;
    if (pcow_open(path, 0, NULL, &image, NULL) == 0)
        broken("it was opened with a damaged page", NULL);
    pcow_close(image);
    if (check(path, PCOW_CHECK_REPAIR, &result, &error)
        || result.corruptions != result.corruptions_fixed || result.losses)
        broken("damage of a page is not put right", &error);
    if (check(path, 0, &result, &error) || result.corruptions)
        broken("not clean after the repair of a page", NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool ready;
    const char *path;
    bool format_1;

    if (!ready) {
        description_setup();
        ready = true;
    }
    path = description_materialize(data, size, &format_1);
    if (format_1) {
        look(path, PCOW_OPEN_FORMAT_1);
        look(path, PCOW_OPEN_FORMAT_1 | PCOW_OPEN_NO_BASE);
    } else {
        test_format_2(path, data, size);
        if (description_has_mirror(data, size))
            test_mirror(description_materialize(data, size, &format_1), data, size);
    }
    return 0;
}
