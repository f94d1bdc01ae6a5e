/* SPDX-License-Identifier: BSD-3-Clause */
#include "losses.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "json_output.h"
#include "report.h"

/* A screen or two; in JSON what a program can work with, however the image was made. */
#define MOST_PRINTED 100
#define MOST_IN_JSON 1000

static const char *const kind_name[] = {
    [PCOW_LOSS_DATA] = "data",
    [PCOW_LOSS_STATE] = "state",
    [PCOW_LOSS_SNAPSHOT] = "snapshot",
    [PCOW_LOSS_UNKNOWN] = "unknown",
};

static const char *const certainty_name[] = {
    [PCOW_EXACT] = "exact",
    [PCOW_AT_MOST] = "at-most",
    [PCOW_ESTIMATE] = "estimate",
};

/* Of no range that is lost is known how many bytes it has. */
static bool is_unknown(const struct pcow_check_result *result)
{
    return result->lost_size == 0 && result->lost_certainty == PCOW_ESTIMATE;
}

static void put_offset(json_object *object, const char *key, uint64_t offset)
{
    if (offset != PCOW_NOWHERE) {
        json_put_size(object, key, offset);
    }
}

static void add_json(json_object *array, const struct pcow_loss *loss)
{
    json_object *object = json_object_new_object();

    json_put_text(object, "kind", kind_name[loss->kind]);
    if (loss->layer) {
        json_put_size(object, "layer", loss->layer);
    }
    if (loss->snapshot) {
        json_put_text(object, "snapshot", loss->snapshot);
    }
    put_offset(object, "guest-offset", loss->guest_offset);
    json_put_size(object, "length", loss->length);
    put_offset(object, "offset", loss->file_offset);
    json_put_size(object, "content", loss->content);
    json_object_array_add(array, object);
}

static void print_whose(const struct pcow_loss *loss)
{
    if (loss->snapshot) {
        printf(" of snapshot '");
        print_text(loss->snapshot);
        printf("' (layer %" PRIu32 ")", loss->layer);
    } else if (loss->layer) {
        printf(" of layer %" PRIu32, loss->layer);
    } else {
        printf(" of a layer that nothing names");
    }
}

static void print_loss(const struct pcow_loss *loss)
{
    switch (loss->kind) {
    case PCOW_LOSS_DATA:
    case PCOW_LOSS_STATE:
        printf("Loss: %" PRIu64 " bytes of %s", loss->length,
               loss->kind == PCOW_LOSS_DATA ? "data" : "VM state");
        print_whose(loss);
        if (loss->guest_offset != PCOW_NOWHERE) {
            printf(", from %s %" PRIu64 " on",
                   loss->kind == PCOW_LOSS_DATA ? "guest byte" : "its byte", loss->guest_offset);
        }
        if (loss->content == 0) {
            printf("; nothing of it is in the file");
        }
        break;
    case PCOW_LOSS_SNAPSHOT:
        printf("Loss: what the record");
        print_whose(loss);
        printf(" said: its name, its parent or its size");
        break;
    case PCOW_LOSS_UNKNOWN:
        if (loss->content) {
            printf("Loss: what a file slab at offset %" PRIu64 " holds, and nothing names",
                   loss->file_offset);
        } else {
            printf("Loss: what a part of the metadata that is gone said");
        }
        break;
    }
    putchar('\n');
}

void losses_add(struct loss_list *list, const struct pcow_loss *loss)
{
    if (list->told == (list->array ? MOST_IN_JSON : MOST_PRINTED)) {
        list->left_out++;
        return;
    }
    list->told++;
    if (list->array) {
        add_json(list->array, loss);
    } else if (!list->quiet) {
        print_loss(loss);
    }
}

const char *losses_text(const struct pcow_check_result *result, char *text, size_t size)
{
    static const char *const prefix[] = {
        [PCOW_EXACT] = "",
        [PCOW_AT_MOST] = "at most ",
        [PCOW_ESTIMATE] = "about ",
    };

    if (result->lost_size) {
        snprintf(text, size, "%s%" PRIu64 " bytes of guest data and VM state",
                 prefix[result->lost_certainty], result->lost_size);
    } else if (is_unknown(result)) {
        snprintf(text, size, "guest data and VM state, and nothing tells how much");
    } else {
        snprintf(text, size, "what %" PRIu64 " damaged parts of the metadata said", result->losses);
    }
    return text;
}

/*
 * Something is lost: or a host crash has left what the guest had not flushed. Only the former is a
 * reason to refuse an image, or nobody could copy one that is healthy but for the power that went.
 */
int losses_judge(const char *path, const struct pcow_check_result *result,
                 struct pcow_error *error)
{
    char text[128];

    if (!result->losses) {
        return 0;
    }
    losses_text(result, text, sizeof(text));
    if (!result->corruptions && result->leaks_doubtful == result->leaks_unflushed) {
        report("warning: %s: %s may be lost, or were not flushed when the host crashed; see "
               "pcow-img check",
               path, text);
        return 0;
    }
    return fail(error, -EBADMSG,
                "%s may have lost %s, which would be read as if it had never been written; see "
                "pcow-img check: repair it, put a whole copy in its place, or copy it as it is "
                "with convert --accept-damage",
                path, text);
}

void losses_put_json(json_object *object, const struct pcow_check_result *result,
                     const struct loss_list *list)
{
    if (is_unknown(result)) {
        json_object_object_add(object, "lost-size", NULL);
        json_put_text(object, "lost-size-is", "unknown");
    } else {
        json_put_size(object, "lost-size", result->lost_size);
        json_put_text(object, "lost-size-is", certainty_name[result->lost_certainty]);
    }
    json_object_object_add(object, "lost", list->array);
    json_put_size(object, "lost-left-out", list->left_out);
    json_put_bool(object, "refused", result->refused);
}

void losses_print(const char *path, const struct loss_list *list,
                  const struct pcow_check_result *result, bool repaired)
{
    char text[128];

    if (list->left_out) {
        printf("Loss: %" PRIu64 " more ranges; %s\n", list->left_out,
               repaired ? "pcow-img rescue lists what was kept of all"
                        : "a repair keeps what it can of all, for pcow-img rescue");
    }
    if (result->losses == 0) {
        return;
    }
    losses_text(result, text, sizeof(text));
    if (!repaired) {
        printf("\nA repair would lose %s.\n", text);
        return;
    }
    printf("\nThe repair has lost %s.\nWhat of it was in the file is kept: see pcow-img rescue ",
           text);
    print_text(path);
    printf("%s\n\n", result->rescue_suffix);
}
