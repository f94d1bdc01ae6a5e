/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/source.h"

#include <errno.h>

#include "report.h"

int source_open(const struct source_options *options, struct source **source,
                struct pcow_error *error)
{
    int r;

    switch (options->format) {
    case FORMAT_RAW: r = raw_source_open(options, source, error); break;
    case FORMAT_QCOW2: r = qcow2_source_open(options, source, error); break;
    default: r = pcow_source_open(options, source, error); break;
    }
    if (!r) {
        (*source)->path = options->path;
        (*source)->format = options->format;
    }
    return r;
}

int source_read(struct source *source, uint64_t offset, void *buffer, size_t length,
                struct pcow_error *error)
{
    return source->operations->read(source, offset, buffer, length, error);
}

int source_get_extent(struct source *source, uint64_t offset, uint64_t length,
                      struct source_extent *extent, struct pcow_error *error)
{
    if (offset < source->known.start || offset >= source->known.end) {
        int r =
            source->operations->get_extent(source, offset, source->size - offset, extent, error);

        if (r) {
            return r;
        }
        if (extent->length == 0) {
            return fail(error, -EIO, "%s: no block status for offset %llu", source->path,
                        (unsigned long long)offset);
        }
        source->known.start = offset;
        source->known.end = offset + extent->length;
        source->known.zero = extent->zero;
    }
    extent->zero = source->known.zero;
    extent->length = source->known.end - offset < length ? source->known.end - offset : length;
    return 0;
}

void source_close(struct source *source)
{
    if (source) {
        source->operations->close(source);
    }
}
