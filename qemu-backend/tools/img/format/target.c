/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/target.h"

int target_open(const struct target_options *options, struct target **target,
                struct pcow_error *error)
{
    int r;

    switch (options->format) {
    case FORMAT_RAW: r = raw_target_open(options, target, error); break;
    case FORMAT_QCOW2: r = qcow2_target_open(options, target, error); break;
    default: r = pcow_target_open(options, target, error); break;
    }
    if (!r) {
        (*target)->path = options->shown_path;
        (*target)->blank = !options->existing;
    }
    return r;
}

int target_write(struct target *target, uint64_t offset, const void *buffer, size_t length,
                 struct pcow_error *error)
{
    return target->operations->write(target, offset, buffer, length, error);
}

int target_zero(struct target *target, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    return target->operations->zero(target, offset, length, error);
}

int target_finish(struct target *target, struct pcow_error *error)
{
    return target->operations->finish(target, error);
}

void target_close(struct target *target)
{
    if (target) {
        target->operations->close(target);
    }
}
