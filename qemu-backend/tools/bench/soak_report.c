/* SPDX-License-Identifier: BSD-3-Clause */
#include <stdio.h>
#include <string.h>

#include "document.h"
#include "json_output.h"
#include "soak.h"

#define COUNTS 32

struct count {
    const char *key, *text;
    uint64_t value;
};

static size_t counts(const struct soak_report *report, struct count list[COUNTS])
{
    const struct count all[] = {
        {"seconds", "seconds", report->seconds},
        {"threads", "threads", report->threads},
        {"size", "bytes of the image", report->size},
        {"seed", "seed", report->seed},
        {"bursts", "bursts of the threads", report->bursts},
        {"stores", "stores", report->stores},
        {"loads", "loads compared", report->loads},
        {"kernel-writes", "writes by system calls", report->kernel_writes},
        {"kernel-reads", "reads by system calls", report->kernel_reads},
        {"flushes", "flushes", report->flushes},
        {"snapshots", "snapshots", report->snapshots},
        {"reverts", "reverts", report->reverts},
        {"deletions", "snapshots deleted", report->deletions},
        {"reopened", "opened anew", report->reopened},
        {"checks", "checks of the file", report->checks},
        {"verifications", "whole contents compared", report->verifications},
        {"verified-bytes", "bytes in these", report->verified_bytes},
        {"traps", "traps", report->traps},
        {"pages-copied", "pages copied", report->pages_copied},
        {"pages-zeroed", "pages zeroed", report->pages_zeroed},
        {"slabs-promoted", "slabs made whole for want of mappings", report->slabs_promoted},
        {"slabs", "slabs of the file, at the end", report->slabs},
        {"slabs-used", "of these in use", report->slabs_used},
        {"leaks", "slabs leaked, at most at any check", report->leaks},
        {"signal-seconds", "seconds with the engine signal", report->signal_seconds},
        {"minor-seconds", "seconds with the engine minor", report->minor_seconds},
        {"kvm-seconds", "seconds with the engine kvm", report->kvm_seconds},
    };

    memcpy(list, all, sizeof(all));
    return sizeof(all) / sizeof(all[0]);
}

void print_soak(const struct soak_report *report)
{
    struct count list[COUNTS];
    size_t count = counts(report, list);

    printf("soak: every byte was right\n");
    for (size_t i = 0; i < count; i++) {
        printf("%-40s %20llu\n", list[i].text, (unsigned long long)list[i].value);
    }
}

int write_soak_json(const struct bench *bench, const struct soak_report *report, const char *path)
{
    json_object *object = json_object_new_object(), *soaked = json_object_new_object();
    struct count list[COUNTS];
    size_t count = counts(report, list);

    for (size_t i = 0; i < count; i++) {
        json_put_size(soaked, list[i].key, list[i].value);
    }
    json_object_object_add(object, "soak", soaked);
    json_object_object_add(object, "machine", document_machine(bench));
    return document_put(object, path);
}
