/* SPDX-License-Identifier: BSD-3-Clause */
#include "check/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "image/lock.h"
#include "image/mirror.h"
#include "util/error.h"

static int run(struct check *check)
{
    /* Each step relies on what the ones before it have settled. */
    static int (*const step[])(struct check *) = {
        check_mirror, check_header, check_length, check_cut_mirror, check_datasums, check_owners, check_records, check_rebuild, check_tree,
        check_dead_slabs, check_overlaps, check_state, check_free_blocks, check_header_copy,
    };
    int ret = 0;

    for (size_t i = 0; i < sizeof step / sizeof step[0] && ret == 0; i++)
        ret = step[i](check);
    /* What was put right is copied to the mirror. */
    return ret || !check->repair ? ret : mirror_sync(&check->file);
}

/* Those that no group needs for its metadata. */
static uint64_t count_data_slabs(const struct check *check)
{
    uint64_t whole = check->slab_count / SLABS_PER_GROUP,
             rest = check->slab_count % SLABS_PER_GROUP, heads = check->file.heads;

    return whole * (SLABS_PER_GROUP - heads) + (rest > heads ? rest - heads : 0);
}

static void count_slabs(struct check *check)
{
    check->result->slabs =
        count_data_slabs(check);
    for (size_t i = 0; i < check->count; i++)
        check->result->slabs_used += check->slabs[i].owner.kind != OWNER_NONE;
}

int pcow_check(const char *path, unsigned flags, pcow_finding_fn finding, void *opaque,
               struct pcow_check_result *result, struct pcow_error *error)
{
    return check_file(path, flags, NULL, finding, opaque, result, error);
}

int check_file(const char *path, unsigned flags, struct observer *observer, pcow_finding_fn finding,
               void *opaque, struct pcow_check_result *result, struct pcow_error *error)
{
    struct check *check;
    int ret;

    memset(result, 0, sizeof *result);
    if (flags & PCOW_CHECK_REPAIR && flags & PCOW_CHECK_FORCE_SHARE)
        return error_set(
            error, -EINVAL,
            "%s cannot be repaired without its lock (-U); stop what uses it and leave -U out",
            path);
    check = calloc(1, sizeof *check);
    if (!check)
        return error_set(error, -ENOMEM, "out of memory");
    check->repair = flags & PCOW_CHECK_REPAIR;
    check->unlocked = flags & PCOW_CHECK_FORCE_SHARE;
    check->finding = finding;
    check->opaque = opaque;
    check->result = result;
    check->error = error;
    ret = file_open(&check->file, AT_FDCWD, path, path,
                    (check->repair ? FILE_WRITE : 0)
                        | (flags & PCOW_CHECK_FORCE_SHARE ? FILE_FORCE_SHARE : 0),
                    observer, error);
    if (!ret) {
        /* Readers of a snapshot do not hold the image, and what is repaired may be moved. */
        ret = check->repair ? lock_everything(&check->file, error) : 0;
        if (!ret) {
            ret = run(check);
            count_slabs(check);
            check_end_of_findings(check);
        }
        file_close(&check->file);
    }
    free(check->slabs);
    free(check->layers);
    free(check->lost_slots);
    free(check->slot_taken);
    free(check->overlay);
    free(check);
    return ret;
}
