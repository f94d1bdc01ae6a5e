/* SPDX-License-Identifier: BSD-3-Clause */
/* Of what was noted as lost: what anybody could have read, whose it was, and how much that is. */
#include "check/check.h"

const char *check_snapshot_name(const struct check *check, uint32_t layer)
{
    const struct check_layer *found = layer ? check_find_layer(check, layer) : NULL;

    return found && found->layer.state == LAYER_SNAPSHOT && found->layer.name[0] ? found->layer.name
                                                                                 : NULL;
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
    /* What lies above the size of its layer, which is one of whole slabs, is seen by nobody. */
    if (found && loss->is.kind == PCOW_LOSS_DATA && !(found->damage & DAMAGED_SIZE)
        && loss->is.guest_offset >= found->layer.virtual_size)
        return false;
    /* What stands on a hidden layer may hold the same page; and one without a record, be dead. */
    if (loss->certainty == PCOW_EXACT && loss->is.layer
        && (!found || found->layer.state == LAYER_HIDDEN))
        loss->certainty = PCOW_AT_MOST;
    return true;
}

bool check_next_range(const struct check *check, const struct check_loss *loss, unsigned *page,
                      struct pcow_loss *range)
{
    unsigned first = *page, end;
    uint64_t from;

    while (loss->is.kind == PCOW_LOSS_DATA && first < PAGES_PER_SLAB
           && !page_set_has(&loss->pages, first))
        first = page_set_run_end(&loss->pages, first, PAGES_PER_SLAB);
    if (first >= PAGES_PER_SLAB)
        return false;
    *range = loss->is;
    range->snapshot = check_snapshot_name(check, loss->is.layer);
    *page = PAGES_PER_SLAB;
    if (loss->is.kind != PCOW_LOSS_DATA)
        return true;
    end = page_set_run_end(&loss->pages, first, PAGES_PER_SLAB);
    from = first * PCOW_PAGE_SIZE;
    if (range->guest_offset != PCOW_NOWHERE)
        range->guest_offset += from;
    range->length = (end - first) * PCOW_PAGE_SIZE;
    check_find_content(check, range, loss->is.file_offset + from, range->length);
    *page = end;
    return true;
}

static void tell_loss(struct check *check, const struct check_loss *loss)
{
    struct pcow_check_result *result = check->result;
    struct pcow_loss range;
    unsigned page = 0;

    if (loss->certainty > result->lost_certainty)
        result->lost_certainty = loss->certainty;
    while (check_next_range(check, loss, &page, &range)) {
        result->losses++;
        result->lost_size += range.length;
        if (check->loss)
            check->loss(check->opaque, &range);
    }
}

void check_tell_losses(struct check *check)
{
    size_t kept = 0;

    for (size_t i = 0; i < check->loss_count; i++) {
        struct check_loss loss = check->losses[i];

        if (!weigh(check, &loss))
            continue;
        check->losses[kept++] = loss;
        tell_loss(check, &loss);
    }
    check->loss_count = kept;
}
