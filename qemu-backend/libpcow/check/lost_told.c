/* SPDX-License-Identifier: BSD-3-Clause */
/* Of what was noted as lost: what anybody could have read, whose it was, and how much that is. */
#include "check/check.h"

const char *check_snapshot_name(const struct check *check, uint32_t layer)
{
    const struct check_layer *found = layer ? check_find_layer(check, layer) : NULL;

    return found && found->layer.state == LAYER_SNAPSHOT && found->layer.name[0] ? found->layer.name
                                                                                 : NULL;
}

/* What lies above the size of its layer is seen by nobody. */
static void clip(struct pcow_loss *loss, uint64_t size)
{
    if (loss->guest_offset == PCOW_NOWHERE || loss->guest_offset + loss->length <= size)
        return;
    loss->length = loss->guest_offset < size ? size - loss->guest_offset : 0;
    if (loss->content > loss->length)
        loss->content = loss->length;
}

/* False: nobody could read it. */
static bool weigh(const struct check *check, struct check_loss *loss)
{
    const struct check_layer *found =
        loss->is.layer ? check_find_layer(check, loss->is.layer) : NULL;

    if (loss->is.kind != PCOW_LOSS_DATA && loss->is.kind != PCOW_LOSS_STATE)
        return true;
    if (found && !found->alive && !found->doubtful)
        return false;
    if (found && loss->is.kind == PCOW_LOSS_DATA && !(found->damage & DAMAGED_SIZE))
        clip(&loss->is, found->layer.virtual_size);
    /* What stands on a hidden layer may hold the same page; and one without a record, be dead. */
    if (loss->certainty == PCOW_EXACT && loss->is.layer
        && (!found || found->layer.state == LAYER_HIDDEN))
        loss->certainty = PCOW_AT_MOST;
    return loss->is.length;
}

void check_tell_losses(struct check *check)
{
    struct pcow_check_result *result = check->result;
    size_t kept = 0;

    for (size_t i = 0; i < check->loss_count; i++) {
        struct check_loss loss = check->losses[i];

        if (!weigh(check, &loss))
            continue;
        check->losses[kept++] = loss;
        result->lost_size += loss.is.length;
        if (loss.certainty > result->lost_certainty)
            result->lost_certainty = loss.certainty;
        if (check->loss) {
            loss.is.snapshot = check_snapshot_name(check, loss.is.layer);
            check->loss(check->opaque, &loss.is);
        }
    }
    result->losses = check->loss_count = kept;
}
