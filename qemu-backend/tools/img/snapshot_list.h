/* SPDX-License-Identifier: BSD-3-Clause */
/* The snapshots of an image, for people and as JSON. */
#ifndef IMG_SNAPSHOT_LIST_H
#define IMG_SNAPSHOT_LIST_H

#include <json.h>
#include <pcow.h>

int snapshot_list_json(pcow_image *image, json_object **array, struct pcow_error *error);
int snapshot_list_print(pcow_image *image, struct pcow_error *error);
/* Each below the one that it descends from. */
int snapshot_tree_print(pcow_image *image, struct pcow_error *error);

#endif
