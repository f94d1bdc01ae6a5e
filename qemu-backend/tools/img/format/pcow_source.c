/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/source.h"
#include "losses.h"
#include "report.h"

struct pcow_source {
    struct source source;
    pcow_image *image;
};

static int read_image(struct source *source, uint64_t offset, void *buffer, size_t length,
                      struct pcow_error *error)
{
    return pcow_read(((struct pcow_source *)source)->image, offset, buffer, length, error);
}

static int get_extent(struct source *source, uint64_t offset, uint64_t length,
                      struct source_extent *extent, struct pcow_error *error)
{
    struct pcow_extent found;
    int r = pcow_get_extent(((struct pcow_source *)source)->image, offset, length, &found, error);

    if (!r) {
        *extent = (struct source_extent){.length = found.length, .zero = found.zero};
    }
    return r;
}

static void close_image(struct source *source)
{
    struct pcow_source *pcow = (struct pcow_source *)source;

    pcow_close(pcow->image);
    free(pcow);
}

/*
 * An image without a mirror opens although its bitmaps or its slab table are lost: what they told
 * of would be read as the base's bytes or as zeros. So does one with a mirror, if its writer was
 * killed: pages that it had changed have no checksum. Beside a writer nothing can be said of that.
 */
static int look_for_losses(pcow_image *image, struct pcow_error *error)
{
    struct pcow_check_result result;
    struct pcow_info info;
    struct pcow_error busy;
    int r = 0;

    for (; image && !r; image = pcow_base(image)) {
        pcow_get_info(image, &info);
        if (info.format == 1) {
            continue;
        }
        r = pcow_check_losses(pcow_path(image), 0, NULL, NULL, NULL, &result, &busy);
        if (r == -EBUSY) {
            r = 0;
        } else if (r) {
            *error = busy;
        } else {
            r = losses_judge(pcow_path(image), &result, error);
        }
    }
    return r;
}

static void keep_first(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    char *first = opaque;

    if (kind == PCOW_FINDING_CORRUPTION && !*first) {
        snprintf(first, sizeof(((struct pcow_error *)0)->message), "%s", message);
    }
}

/*
 * Also of what is copied stands on: or what is damaged there would pass into a copy that has no
 * checksums. Somebody may write to what is not sealed; of that only snapshots have some, which do
 * not change.
 */
static int compare_data(pcow_image *image, const struct source_options *options,
                        struct pcow_error *error)
{
    int r = 0;

    for (; image && !r; image = pcow_base(image)) {
        char first[sizeof(error->message)] = "";
        struct pcow_data_result result;
        struct pcow_info info;

        pcow_get_info(image, &info);
        if (info.format == 1 || !info.mirror) {
            continue;
        }
        r = pcow_check_data(pcow_path(image),
                            options->force_share || !info.sealed ? PCOW_CHECK_FORCE_SHARE : 0,
                            keep_first, NULL, first, &result, error);
        if (!r && result.corruptions) {
            r = fail(error, -EBADMSG,
                     "%s is damaged: %.300s; put a whole copy in its place (pcow-img check --data "
                     "tells all of it), or copy it as it is with --accept-damage",
                     pcow_path(image), first);
        }
    }
    return r;
}

static int look(const struct source_options *options, pcow_image *image, struct pcow_error *error)
{
    int r = 0;

    if (!options->accept_damage && !options->force_share) {
        r = look_for_losses(image, error);
    }
    if (!r && !options->accept_damage && options->compare_data) {
        r = compare_data(image, options, error);
    }
    return r;
}

int pcow_source_open(const struct source_options *options, struct source **source,
                     struct pcow_error *error)
{
    static const struct source_operations operations = {read_image, get_extent, close_image};
    unsigned flags = (options->force_share ? PCOW_OPEN_FORCE_SHARE : 0) |
                     (options->format == FORMAT_PCOW_1 ? PCOW_OPEN_FORMAT_1 : 0);
    struct pcow_source *pcow = calloc(1, sizeof(*pcow));
    int r;

    if (!pcow) {
        return fail(error, -ENOMEM, "out of memory");
    }
    r = pcow_open(options->path, flags, options->snapshot, &pcow->image, error);
    if (r) {
        struct pcow_error busy = *error;

        free(pcow);
        if (r == -EBUSY && !options->snapshot) {
            fail(error, r, "%s; a snapshot of it can be read meanwhile", busy.message);
        }
        return r;
    }
    r = look(options, pcow->image, error);
    if (r) {
        pcow_close(pcow->image);
        free(pcow);
        return r;
    }
    pcow->source.operations = &operations;
    pcow->source.size = pcow_size(pcow->image);
    *source = &pcow->source;
    return 0;
}
