/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>

#include "format/source.h"
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
    pcow->source.operations = &operations;
    pcow->source.size = pcow_size(pcow->image);
    *source = &pcow->source;
    return 0;
}
