/* SPDX-License-Identifier: BSD-3-Clause */
/* check --data: data and its checksums. */
#ifndef IMG_CHECK_DATA_H
#define IMG_CHECK_DATA_H

#include <json-c/json.h>
#include <pcow.h>
#include <stdbool.h>

#include "pace.h"

struct check_data {
    pcow_finding_fn finding;
    void *opaque;                              /* of finding */
    struct pace pace;
    struct pcow_data_result result;
    bool skipped;                              /* the metadata are damaged */
};

/* After pcow_check(), whose result it adds to. What was cancelled is an error. */
int check_data(const char *path, bool force_share, struct check_data *data,
               struct pcow_check_result *result, struct pcow_error *error);
void check_data_put_json(const struct check_data *data, json_object *object);
void check_data_print(const struct check_data *data);

#endif
