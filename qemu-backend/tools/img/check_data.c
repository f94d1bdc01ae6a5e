/* SPDX-License-Identifier: BSD-3-Clause */
#include "check_data.h"

#include <stdio.h>

#include "json_output.h"
#include "size.h"

static void note_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    const struct check_data *data = opaque;

    data->finding(data->opaque, kind, message);
}

static int update(void *opaque, uint64_t done, uint64_t total)
{
    struct check_data *data = opaque;

    return pace_update(&data->pace, done, total);
}

int check_data(const char *path, bool force_share, struct check_data *data,
               struct pcow_check_result *result, struct pcow_error *error)
{
    int r;

    /* Whose data it is cannot be said. */
    if (result->corruptions > result->corruptions_fixed) {
        data->skipped = true;
        data->finding(data->opaque, PCOW_FINDING_NOTE,
                      "the data was not looked at: the metadata that says whose it is has to be "
                      "repaired first, with '-r all'");
        return 0;
    }
    progress_begin(&data->pace.progress, false);
    r = pcow_check_data(path, force_share ? PCOW_CHECK_FORCE_SHARE : 0, note_finding, update, data,
                        &data->result, error);
    result->corruptions += data->result.corruptions;
    return r;
}

void check_data_put_json(const struct check_data *data, json_object *object)
{
    json_put_bool(object, "data-checked", !data->skipped);
    json_put_size(object, "data-verified", data->result.verified);
    json_put_size(object, "data-damaged", data->result.damaged);
    json_put_size(object, "data-unjudged", data->result.unjudged);
    json_put_size(object, "data-without-checksum", data->result.without);
}

void check_data_print(const struct check_data *data)
{
    char text[4][SIZE_TEXT_LENGTH];

    if (data->skipped) {
        return;
    }
    printf("Data: %s verified, %s damaged, %s with a damaged checksum, %s without a checksum\n",
           format_size(data->result.verified, text[0]), format_size(data->result.damaged, text[1]),
           format_size(data->result.unjudged, text[2]), format_size(data->result.without, text[3]));
}
