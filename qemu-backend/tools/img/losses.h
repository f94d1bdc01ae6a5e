/* SPDX-License-Identifier: BSD-3-Clause */
/* What a repair loses, in words and in JSON. */
#ifndef IMG_LOSSES_H
#define IMG_LOSSES_H

#include <json.h>
#include <pcow.h>
#include <stdbool.h>

struct loss_list {
    json_object *array;                        /* NULL: print them */
    bool quiet;
    uint64_t told, left_out;
};

/* A pcow_loss_fn, but for the type of list. */
void losses_add(struct loss_list *list, const struct pcow_loss *loss);
/* "at most 4096 bytes of guest data and VM state" */
const char *losses_text(const struct pcow_check_result *result, char *text, size_t size);
/*
 * What a check has found of an image that is about to be used: 0, with a warning of what the guest
 * may not have flushed when its host crashed, or -EBADMSG: something is lost.
 */
int losses_judge(const char *path, const struct pcow_check_result *result,
                 struct pcow_error *error);
void losses_put_json(json_object *object, const struct pcow_check_result *result,
                     const struct loss_list *list);
/* After the findings: what was lost, or would be. */
void losses_print(const char *path, const struct loss_list *list,
                  const struct pcow_check_result *result, bool repaired);

#endif
