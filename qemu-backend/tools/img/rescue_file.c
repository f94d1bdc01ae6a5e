/* SPDX-License-Identifier: BSD-3-Clause */
#include "rescue_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

#define MAX_LINE 4096

struct rescue_file {
    const char *path;
    FILE *from;
    json_object *object; /* of the line that was read last */
    uint64_t left; /* of its content */
    bool content; /* a newline follows it */
    uint64_t number; /* of the line */
};

int rescue_open(const char *path, struct rescue_file **file, struct pcow_error *error)
{
    *file = calloc(1, sizeof(**file));
    if (!*file) {
        return fail(error, -ENOMEM, "out of memory");
    }
    (*file)->path = path;
    (*file)->from = fopen(path, "re");
    if (!(*file)->from) {
        int r = fail(error, -errno, "cannot open %s: %s", path, strerror(errno));

        free(*file);
        *file = NULL;
        return r;
    }
    return 0;
}

void rescue_close(struct rescue_file *file)
{
    if (file) {
        json_object_put(file->object);
        fclose(file->from);
        free(file);
    }
}

uint64_t rescue_number(json_object *object, const char *key)
{
    json_object *value;

    return json_object_object_get_ex(object, key, &value) && json_object_get_int64(value) > 0
               ? (uint64_t)json_object_get_int64(value)
               : 0;
}

const char *rescue_text(json_object *object, const char *key)
{
    json_object *value;

    return json_object_object_get_ex(object, key, &value) ? json_object_get_string(value) : NULL;
}

static int damaged(const struct rescue_file *file, struct pcow_error *error)
{
    return ferror(file->from)
               ? fail(error, -EIO, "cannot read %s", file->path)
               : fail(error, -EBADMSG,
                      "%s: piece %" PRIu64 " of it is none of a rescue file; was it cut short?",
                      file->path, file->number);
}

int64_t rescue_read(struct rescue_file *file, void *buffer, size_t size, struct pcow_error *error)
{
    if (file->left < size) {
        size = (size_t)file->left;
    }
    if (fread(buffer, 1, size, file->from) != size) {
        return damaged(file, error);
    }
    file->left -= size;
    return (int64_t)size;
}

static int pass_over(struct rescue_file *file, struct pcow_error *error)
{
    char buffer[65536];
    int64_t got = 1;

    while (file->content && got > 0) {
        got = rescue_read(file, buffer, sizeof(buffer), error);
    }
    if (got < 0) {
        return (int)got;
    }
    if (file->content && getc(file->from) != '\n') {
        return damaged(file, error);
    }
    file->content = false;
    return 0;
}

static int kind_of(json_object *object)
{
    static const struct {
        const char *key;
        enum rescue_line kind;
    } kinds[] = {
        {"pcow-rescue", RESCUE_HEADER}, {"lost", RESCUE_LOST},     {"layer", RESCUE_LAYER},
        {"at", RESCUE_CONTENT},         {"unread", RESCUE_UNREAD}, {"end", RESCUE_END},
        {"repaired", RESCUE_REPAIRED},
    };

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (json_object_object_get_ex(object, kinds[i].key, NULL)) {
            return kinds[i].kind;
        }
    }
    return -EBADMSG;
}

int rescue_next(struct rescue_file *file, json_object **object, struct pcow_error *error)
{
    char line[MAX_LINE];
    int kind = pass_over(file, error);

    if (kind) {
        return kind;
    }
    file->number++;
    json_object_put(file->object);
    file->object = NULL;
    if (!fgets(line, sizeof(line), file->from)) {
        return ferror(file->from) ? damaged(file, error) : RESCUE_END_OF_FILE;
    }
    file->object = line[strlen(line) - (*line ? 1 : 0)] == '\n' ? json_tokener_parse(line) : NULL;
    if (!json_object_is_type(file->object, json_type_object)) {
        return damaged(file, error);
    }
    kind = kind_of(file->object);
    if (kind < 0 || (kind == RESCUE_HEADER) != (file->number == 1)
        || (kind == RESCUE_HEADER && rescue_number(file->object, "pcow-rescue") != 1)) {
        return damaged(file, error);
    }
    file->content = kind == RESCUE_CONTENT;
    file->left = file->content ? rescue_number(file->object, "bytes") : 0;
    *object = file->object;
    return kind;
}
