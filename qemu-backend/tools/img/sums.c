/* SPDX-License-Identifier: BSD-3-Clause */
#include "sums.h"

#include <errno.h>
#include <stdio.h>

#include "report.h"

#define EXIT_DAMAGED 2                         /* that of check */

void sums_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    const struct sums *sums = opaque;

    if (sums->quiet) {
        return;
    }
    printf(kind == PCOW_FINDING_NOTE                    ? "Note: "
           : sums->flags & PCOW_CHECKSUM_ACCEPT_DAMAGE ? "Accepted: "
                                                        : "ERROR: ");
    print_text(message);
    putchar('\n');
}

int sums_progress(void *opaque, uint64_t done, uint64_t total)
{
    struct sums *sums = opaque;

    return pace_update(&sums->pace, done, total);
}

int sums_failed(int code, const struct pcow_error *error)
{
    int status = report_error(error);

    return code == -EUCLEAN ? EXIT_DAMAGED : status;
}
