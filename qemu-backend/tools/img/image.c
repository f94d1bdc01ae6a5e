/* SPDX-License-Identifier: BSD-3-Clause */
#include "image.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "report.h"

int img_open(const char *path, const char *format, unsigned flags, const char *snapshot,
             pcow_image **image, struct pcow_error *error)
{
    if (format && !strcmp(format, "pcow1")) {
        flags |= PCOW_OPEN_FORMAT_1;
        if (flags & PCOW_OPEN_WRITE) {
            return fail(error, -EROFS,
                        "%s: format pcow1 is read-only; make an image that can be changed with "
                        "'pcow-img convert -f pcow1 -O pcow'",
                        path);
        }
    } else if (format && strcmp(format, "pcow")) {
        return fail(error, -EINVAL,
                    "%s: format '%s' is not for this command; it works on pcow and pcow1", path,
                    format);
    }
    return pcow_open(path, flags, snapshot, image, error);
}

int img_close(pcow_image *image, int r, struct pcow_error *error)
{
    int finished = pcow_finish(image, r ? NULL : error);

    pcow_close(image);
    return r ? r : finished;
}

int sibling_path(const char *path, const char *name, char result[PATH_MAX],
                 struct pcow_error *error)
{
    const char *slash = strrchr(path, '/');
    int directory = slash ? (int)(slash - path) + 1 : 0;

    if (snprintf(result, PATH_MAX, "%.*s%s", directory, path, name) >= PATH_MAX) {
        return fail(error, -ENAMETOOLONG, "%s: the path of '%s' in this directory is too long",
                    path, name);
    }
    return 0;
}

int base_path(const char *path, const char *base, char result[PATH_MAX], struct pcow_error *error)
{
    if (!strchr(base, '/')) {
        return sibling_path(path, base, result, error);
    }
    if (snprintf(result, PATH_MAX, "%s", base) >= PATH_MAX) {
        return fail(error, -ENAMETOOLONG, "%s: the path of the base is too long", path);
    }
    return 0;
}

int check_base_format(const char *format, struct pcow_error *error)
{
    if (format && strcmp(format, "pcow") && strcmp(format, "pcow1")) {
        return fail(
            error, -EINVAL,
            "base format '%s' is not supported: a base must be pcow or pcow1; convert it with "
            "'pcow-img convert -f %s -O pcow'",
            format, format);
    }
    return 0;
}

bool parse_switch(const char *key, const char *value, bool *on, struct pcow_error *error)
{
    *on = !strcmp(value, "on");
    if (!*on && strcmp(value, "off")) {
        fail(error, -EINVAL, "%s is 'on' or 'off', not '%s'", key, value);
        return false;
    }
    return true;
}
