/* SPDX-License-Identifier: BSD-3-Clause */
#include "check/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "image/lock.h"
#include "image/mirror.h"
#include "util/error.h"
#include "util/sized.h"

/* What was put right. */
static int copy_to_mirror(struct check *check)
{
    int ret = mirror_sync_alone(&check->file, NULL);

    if (ret == -ENOSPC)
        check_note(check,
                   "the pool is full, so pages of metadata stay without a copy in the mirror");
    else if (ret)
        return error_set_errno(check->error, ret, "cannot bring the mirror of %s up to date",
                               check->file.path);
    return 0;
}

static int run(struct check *check)
{
    /* Each step relies on what the ones before it have settled. */
    static int (*const step[])(struct check *) = {
        check_mirror,      check_header,
        check_length,      check_cut_mirror,
        check_datasums,    check_owners,
        check_records,     check_rebuild,
        check_tree,        check_dead_slabs,
        check_empty_slabs, check_overlaps,
        check_state,       check_free_blocks,
        check_datasums_of_nobody,
        check_all_summed,  check_header_copy,
    };
    int ret = 0;

    /* Before the mirror is mended, which lies behind. */
    check->has_no_tables = check->length >= LAYER_TABLE_OFFSET
                           && file_next_data(&check->file, SLAB_TABLE_OFFSET, check->length)
                                  >= check->length;
    for (size_t i = 0; i < sizeof step / sizeof step[0] && ret == 0; i++)
        ret = step[i](check);
    return ret || !check->repair ? ret : copy_to_mirror(check);
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

/* From the start: what a pass has found does not count for the next one. */
static void begin(struct check *check, const struct check_request *request, bool repair, bool tell,
                  bool dropped)
{
    struct check fresh = {
        .file = check->file,
        .length = check->file.size,
        .rescue = check->rescue,
        .repair = repair,
        .intended = request->flags & PCOW_CHECK_REPAIR,
        .dropped_before = dropped,
        .unlocked = check->unlocked,
        .only_gone = request->held,
        .finding = tell ? request->finding : NULL,
        .loss = tell ? request->loss : NULL,
        .opaque = request->opaque,
        .result = request->result,
        .error = request->error,
    };

    free(check->slabs);
    free(check->layers);
    free(check->lost_slots);
    free(check->slot_taken);
    free(check->overlay);
    free(check->unproven);
    free(check->losses);
    *check = fresh;
}

static int pass(struct check *check, const struct check_request *request, bool repair, bool tell)
{
    char suffix[sizeof request->result->rescue_suffix];
    bool dropped = check->drops_sums;
    int ret;

    memcpy(suffix, request->result->rescue_suffix, sizeof suffix);
    memset(request->result, 0, sizeof *request->result);
    memcpy(request->result->rescue_suffix, suffix, sizeof suffix);
    begin(check, request, repair, tell, dropped);
    ret = run(check);
    request->result->certain = !check->unlocked;
    count_slabs(check);
    check_tell_losses(check);
    check_end_of_findings(check);
    return ret;
}

static int open_file(struct check *check, const struct check_request *request, unsigned flags,
                     struct observer *observer)
{
    const char *name = request->held ? request->held : request->path;

    return file_open(&check->file, AT_FDCWD, name, request->path,
                     flags | (request->held ? FILE_FORCE_SHARE : 0), observer, request->error);
}

static bool is_unchanged(const struct check *check, const struct stat *before)
{
    struct stat now;

    return !file_has_writer(&check->file) && fstat(check->file.fd, &now) == 0
           && now.st_size == before->st_size && now.st_ctim.tv_sec == before->st_ctim.tv_sec
           && now.st_ctim.tv_nsec == before->st_ctim.tv_nsec;
}

/*
 * Without a lock, as somebody else may want it meanwhile. A writer changes the time of the file
 * before anything else of it: if nobody came, what is found is as good as with one.
 */
static int look_unlocked(struct check *check, const struct check_request *request, bool tell)
{
    struct stat before;
    bool steady = fstat(check->file.fd, &before) == 0 && !file_has_writer(&check->file);
    int ret = 0;

    if (steady)
        ret = pass(check, request, false, false);
    check->unlocked = ret || !steady || !is_unchanged(check, &before);
    ret = pass(check, request, false, tell);
    request->result->certain = !check->unlocked && is_unchanged(check, &before);
    if (!check->unlocked && !request->result->certain)
        request->result->corruptions_certain = 0;
    return ret;
}

/* Find out, and change nothing. */
static int look(struct check *check, const struct check_request *request, bool tell)
{
    bool unlocked = request->flags & PCOW_CHECK_FORCE_SHARE;
    int ret = open_file(check, request, unlocked ? FILE_FORCE_SHARE : 0,
                        request->flags & PCOW_CHECK_REPAIR ? NULL : request->observer);

    if (ret)
        return ret;
    ret = unlocked ? look_unlocked(check, request, tell) : pass(check, request, false, tell);
    file_close(&check->file);
    return ret;
}

/* Is what a pass has found what the caller wants to be repaired? */
static bool may_repair(const struct check_request *request)
{
    const struct pcow_check_result *result = request->result;

    return !(request->flags & PCOW_CHECK_LEAKS_ONLY && result->corruptions)
           && (!result->losses || request->flags & PCOW_CHECK_ACCEPT_LOSS);
}

/*
 * A pass goes the same way with repair as without, so what the first one finds to be lost is what
 * the second one drops.
 */
static int mend_locked(struct check *check, const struct check_request *request)
{
    int ret = pass(check, request, false, false);

    if (!ret && !may_repair(request))
        ret = error_set(check->error, -EAGAIN,
                        "%s was changed by somebody else since it was looked at; try again",
                        request->path);
    if (!ret && check->loss_count)
        ret = check_keep_losses(check);
    if (!ret)
        ret = pass(check, request, true, true);
    if (!ret && check->rescue)
        ret = check_end_rescue(check);
    if (check->rescue)
        fclose(check->rescue);
    check->rescue = NULL;
    return ret;
}

static int mend(struct check *check, const struct check_request *request)
{
    int ret = open_file(check, request, FILE_WRITE, request->observer);

    if (ret)
        return ret;
    /*
     * To the end of the metadata, where it was cut inside of it: slabs of data shall not lie in the
     * file again, with zeros in them, before it is dropped that they held something.
     */
    check->file.grows_exactly = true;
    /* Readers of a snapshot do not hold the image, and what is repaired may be moved. */
    ret = lock_everything(&check->file, request->error);
    if (!ret)
        ret = mend_locked(check, request);
    file_close(&check->file);
    return ret;
}

/* Whoever opens a file for writing changes its time: so whether to repair is found out before. */
static int check_or_repair(struct check *check, const struct check_request *request)
{
    int ret;

    if (!(request->flags & PCOW_CHECK_REPAIR))
        return look(check, request, true);
    ret = look(check, request, false);
    if (ret)
        return ret;
    if (may_repair(request))
        return mend(check, request);
    ret = look(check, request, true);
    request->result->refused =
        !ret && !(request->flags & PCOW_CHECK_LEAKS_ONLY && request->result->corruptions);
    return ret;
}

int check_file(const struct check_request *request)
{
    struct check *check;
    int ret;

    memset(request->result, 0, sizeof *request->result);
    if (request->flags & PCOW_CHECK_REPAIR && request->flags & PCOW_CHECK_FORCE_SHARE)
        return error_set(
            request->error, -EINVAL,
            "%s cannot be repaired without its lock (-U); stop what uses it and leave -U out",
            request->path);
    check = calloc(1, sizeof *check);
    if (!check)
        return error_set(request->error, -ENOMEM, "out of memory");
    ret = check_or_repair(check, request);
    if (request->gone)
        *request->gone = check->gone;
    free(check->slabs);
    free(check->layers);
    free(check->lost_slots);
    free(check->slot_taken);
    free(check->losses);
    free(check->overlay);
    free(check->unproven);
    free(check);
    return ret;
}

int pcow_check_sized(const char *path, unsigned flags, pcow_finding_fn finding, pcow_loss_fn loss,
                     void *opaque, struct pcow_check_result *given, size_t size,
                     struct pcow_error *error)
{
    struct pcow_check_result result;
    int ret = check_file(&(struct check_request){.path = path,
                                                 .flags = flags,
                                                 .finding = finding,
                                                 .loss = loss,
                                                 .opaque = opaque,
                                                 .result = &result,
                                                 .error = error});

    sized_give(given, size, &result, sizeof result);
    return ret;
}
