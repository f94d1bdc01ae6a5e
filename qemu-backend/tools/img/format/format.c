/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/format.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "report.h"

static const char *const names[] = {
    [FORMAT_RAW] = "raw",
    [FORMAT_QCOW2] = "qcow2",
    [FORMAT_PCOW] = "pcow",
    [FORMAT_PCOW_1] = "pcow1",
};

const char *format_name(enum image_format format)
{
    return names[format];
}

/* By these, new files tell their format. */
static const struct {
    const char *suffix;
    enum image_format format;
} suffixes[] = {
    {".pcow", FORMAT_PCOW},
    {".qcow2", FORMAT_QCOW2},
    {".raw", FORMAT_RAW},
    {".img", FORMAT_RAW},
};

static bool ends_with(const char *path, const char *suffix)
{
    size_t length = strlen(path), end = strlen(suffix);

    return length > end && !strcmp(path + length - end, suffix);
}

bool is_called_pcow(const char *path)
{
    return ends_with(path, ".pcow");
}

static int format_of_name(const char *path, enum image_format *format, struct pcow_error *error)
{
    for (size_t i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++) {
        if (ends_with(path, suffixes[i].suffix)) {
            *format = suffixes[i].format;
            return 0;
        }
    }
    return fail(error, -EINVAL,
                "%s: its name does not tell which format it shall have, as *.pcow, *.qcow2, *.raw "
                "and *.img do; say -O raw, -O qcow2 or -O pcow",
                path);
}

static int parse_format(const char *name, enum image_format *format, struct pcow_error *error)
{
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!strcmp(name, names[i])) {
            *format = (enum image_format)i;
            return 0;
        }
    }
    return fail(error, -EINVAL, "format '%s' is not known; there are raw, qcow2, pcow and pcow1",
                name);
}

int format_of_file(const char *path, const char *name, const char *option,
                   enum image_format *format, struct pcow_error *error)
{
    if (name) {
        return parse_format(name, format, error);
    }
    if (!is_called_pcow(path)) {
        return fail(error, -EINVAL,
                    "%s: say which format it has with %s raw, %s qcow2, %s pcow or %s pcow1; only "
                    "for files "
                    "called *.pcow is pcow assumed, and nothing is guessed from content",
                    path, option, option, option, option);
    }
    *format = FORMAT_PCOW;
    return 0;
}

int format_of_new_file(const char *path, const char *name, enum image_format *format,
                       struct pcow_error *error)
{
    int r = name ? parse_format(name, format, error) : format_of_name(path, format, error);

    if (!r && *format == FORMAT_PCOW_1) {
        return fail(error, -EINVAL, "%s: format pcow1 is only read; use -O pcow", path);
    }
    return r;
}
