/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot_list.h"

#include <errno.h>
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
    json_put_size(object, "shared-size", snapshot->shared_size);
    json_put_size(object, "delete-frees", snapshot->delete_frees);
    json_put_bool(object, "current", snapshot->current);
    json_put_bool(object, "pinned", snapshot->pinned);
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

static void print_sizes(const struct pcow_snapshot *snapshot)
{
    char state[SIZE_TEXT_LENGTH], own[SIZE_TEXT_LENGTH], shared[SIZE_TEXT_LENGTH],
        frees[SIZE_TEXT_LENGTH], date[32] = "?";
    time_t seconds = (time_t)snapshot->date_seconds;
    struct tm local;

    if (localtime_r(&seconds, &local)) {
        strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S", &local);
    }
    printf("%9s %9s %9s %9s %s %c%c ", format_size(snapshot->state_size, state),
           format_size(snapshot->data_size, own), format_size(snapshot->shared_size, shared),
           format_size(snapshot->delete_frees, frees), date, snapshot->current ? '*' : ' ',
           snapshot->pinned ? 'p' : ' ');
}

/*
 * the name comes last, because it may be 127 bytes long; '*': the active layer stands on it; 'p':
 * an image does
 */
#define SIZES_HEADING \
    "%9s %9s %9s %9s %-19s %2s %s\n", "VM SIZE", "OWN", "SHARED", "FREES", "DATE", "", "TAG"

int snapshot_list_print(pcow_image *image, struct pcow_error *error)
{
    struct pcow_snapshot *list;
    size_t count;
    int r = pcow_snapshot_list(image, &list, &count, error);

    if (r) {
        return r;
    }
    if (count) {
        printf("Snapshot list:\n%-7s %-7s ", "ID", "PARENT");
        printf(SIZES_HEADING);
    }
    for (size_t i = 0; i < count; i++) {
        printf("%-7" PRIu32 " %-7" PRIu32 " ", list[i].id, list[i].parent_id);
        print_sizes(&list[i]);
        print_text(list[i].name);
        putchar('\n');
    }
    free(list);
    return 0;
}

/* ---- the tree -------------------------------------------------------------------------------- */

#define NONE SIZE_MAX
#define MAX_INDENT 30                          /* levels; beyond, the depth is shown as a number */

struct tree {
    const struct pcow_snapshot *list;
    size_t count;
    size_t *first_child, *next_sibling, *parent;
};

/* The list is sorted by id. */
static size_t find_id(const struct tree *tree, uint32_t id)
{
    size_t low = 0, high = tree->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (tree->list[middle].id < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < tree->count && tree->list[low].id == id ? low : NONE;
}

static void print_line(const struct tree *tree, size_t i, unsigned depth)
{
    print_sizes(&tree->list[i]);
    printf("%*s", (int)(depth < MAX_INDENT ? depth : MAX_INDENT) * 2, "");
    if (depth > MAX_INDENT) {
        printf("(%u) ", depth);
    }
    print_text(tree->list[i].name);
    putchar('\n');
}

/*
 * first_root: the first entry without a parent. Without recursion: a row of snapshots is as deep as
 * it is long.
 */
static void print_tree(const struct tree *tree, size_t first_root)
{
    unsigned depth = 0;
    size_t i = first_root;

    while (i != NONE) {
        print_line(tree, i, depth);
        if (tree->first_child[i] != NONE) {
            i = tree->first_child[i];
            depth++;
            continue;
        }
        while (i != NONE && tree->next_sibling[i] == NONE) {
            i = tree->parent[i];
            depth -= i != NONE;
        }
        i = i != NONE ? tree->next_sibling[i] : NONE;
    }
}

int snapshot_tree_print(pcow_image *image, struct pcow_error *error)
{
    struct pcow_snapshot *list;
    struct tree tree = {0};
    size_t first_root = NONE;
    int r = pcow_snapshot_list(image, &list, &tree.count, error);

    if (r) {
        return r;
    }
    tree.list = list;
    tree.first_child = malloc((tree.count + 1) * sizeof(size_t));
    tree.next_sibling = malloc((tree.count + 1) * sizeof(size_t));
    tree.parent = malloc((tree.count + 1) * sizeof(size_t));
    if (!tree.first_child || !tree.next_sibling || !tree.parent) {
        r = fail(error, -ENOMEM, "out of memory");
    }
    for (size_t i = 0; !r && i < tree.count; i++) {
        tree.first_child[i] = NONE;
    }
    /* From the newest, so that the oldest comes first among sisters. */
    for (size_t i = tree.count; !r && i-- > 0;) {
        size_t *first = &first_root;

        tree.parent[i] = list[i].parent_id ? find_id(&tree, list[i].parent_id) : NONE;
        if (tree.parent[i] != NONE) {
            first = &tree.first_child[tree.parent[i]];
        }
        tree.next_sibling[i] = *first;
        *first = i;
    }
    if (!r && tree.count) {
        printf(SIZES_HEADING);
        print_tree(&tree, first_root);
    }
    free(tree.first_child);
    free(tree.next_sibling);
    free(tree.parent);
    free(list);
    return r;
}
