/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot_list.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "json_output.h"
#include "report.h"
#include "size.h"

static void put_id(json_object *object, const char *key, uint32_t id)
{
    char text[16];

    snprintf(text, sizeof(text), "%" PRIu32, id);
    json_put_text(object, key, text);
}

static json_object *snapshot_json(const struct pcow_snapshot *snapshot)
{
    json_object *object = json_object_new_object();

    put_id(object, "id", snapshot->id);
    json_put_text(object, "name", snapshot->name);
    if (snapshot->parent_id) {
        put_id(object, "parent-id", snapshot->parent_id);
    } else {
        json_object_object_add(object, "parent-id", NULL);
    }
    json_put_size(object, "vm-state-size", snapshot->state_size);
    json_object_object_add(object, "date-sec", json_object_new_int64(snapshot->date_seconds));
    json_put_size(object, "date-nsec", snapshot->date_nanoseconds);
    json_put_size(object, "virtual-size", snapshot->virtual_size);
    json_put_size(object, "data-size", snapshot->data_size);
    json_put_bool(object, "current", snapshot->current);
    return object;
}

int snapshot_list_json(pcow_image *image, json_object **array, struct pcow_error *error)
{
    struct pcow_snapshot *list;
    size_t count;
    int r = pcow_snapshot_list(image, &list, &count, error);

    if (r) {
        return r;
    }
    *array = json_object_new_array();
    for (size_t i = 0; i < count; i++) {
        json_object_array_add(*array, snapshot_json(&list[i]));
    }
    free(list);
    return 0;
}

static void print_snapshot(const struct pcow_snapshot *snapshot)
{
    char state[SIZE_TEXT_LENGTH], data[SIZE_TEXT_LENGTH], date[32] = "?";
    time_t seconds = (time_t)snapshot->date_seconds;
    struct tm local;

    if (localtime_r(&seconds, &local)) {
        strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S", &local);
    }
    printf("%-7" PRIu32 " %-7" PRIu32 " %9s %9s %s %c ", snapshot->id, snapshot->parent_id,
           format_size(snapshot->state_size, state), format_size(snapshot->data_size, data), date,
           snapshot->current ? '*' : ' ');
    print_text(snapshot->name);
    putchar('\n');
}

int snapshot_list_print(pcow_image *image, struct pcow_error *error)
{
    struct pcow_snapshot *list;
    size_t count;
    int r = pcow_snapshot_list(image, &list, &count, error);

    if (r) {
        return r;
    }
    if (count) {
        /* the name comes last, because it may be 127 bytes long; '*': the active layer stands on it */
        printf("Snapshot list:\n%-7s %-7s %9s %9s %-19s %c %s\n", "ID", "PARENT", "VM SIZE", "DATA", "DATE", ' ', "TAG");
    }
    for (size_t i = 0; i < count; i++) {
        print_snapshot(&list[i]);
    }
    free(list);
    return 0;
}
