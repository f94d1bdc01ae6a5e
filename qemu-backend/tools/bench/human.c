/* SPDX-License-Identifier: BSD-3-Clause */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "machine.h"
#include "report.h"
#include "size.h"

#define TIME_LENGTH 24

/* Three significant digits and a unit. */
static const char *format_time(double ns, char text[TIME_LENGTH])
{
    static const char *const units[] = {"ns", "us", "ms", "s"};
    unsigned unit = 0;

    if (isnan(ns)) {
        return "-";
    }
    while (unit < 3 && fabs(ns) >= 999.5) {
        ns /= 1000;
        unit++;
    }
    snprintf(text, TIME_LENGTH, "%.*f %s",
             fabs(ns) >= 99.95   ? 0
             : fabs(ns) >= 9.995 ? 1
                                 : 2,
             ns, units[unit]);
    return text;
}

static const char *format_ratio(double ratio, char text[TIME_LENGTH])
{
    if (isnan(ratio)) {
        return "-";
    }
    snprintf(text, TIME_LENGTH, "%.*f", fabs(ratio) >= 99.95 ? 0 : 2, ratio);
    return text;
}

static void print_criteria(const struct row *row)
{
    char value[TIME_LENGTH], bound[TIME_LENGTH];

    for (unsigned i = 0; i < row->criterion_count; i++) {
        const struct criterion *criterion = &row->criteria[i];
        const char *sign = criterion->at_least ? ">=" : "<=";

        if (!strcmp(criterion->what, "ns")) {
            format_time(criterion->value, value);
            format_time(criterion->bound, bound);
        } else {
            snprintf(value, sizeof(value), criterion->value >= 1000 ? "%.0f" : "%.3g",
                     criterion->value);
            snprintf(bound, sizeof(bound), criterion->bound >= 1000 ? "%.0f" : "%.3g",
                     criterion->bound);
        }
        printf("%s%s %s %s%s %s", i ? "; " : "",
               strcmp(criterion->what, "ns") ? criterion->what : "time", value,
               criterion_met(criterion) ? "" : "MISSES ", sign, bound);
    }
}

static double find_detail(const struct row *row, const char *key)
{
    for (unsigned i = 0; i < row->detail_count; i++) {
        if (!strcmp(row->details[i].key, key)) {
            return row->details[i].value;
        }
    }
    return NAN;
}

static void print_row(const struct row *row)
{
    char limit[TIME_LENGTH], raw[TIME_LENGTH], raw_p99[TIME_LENGTH], paper[TIME_LENGTH],
        pcow[TIME_LENGTH], pcow_p99[TIME_LENGTH], pcow_p999[TIME_LENGTH], cold[TIME_LENGTH],
        bare[TIME_LENGTH], bare_p99[TIME_LENGTH], ratio[TIME_LENGTH], limit_ratio[TIME_LENGTH],
        paper_ratio[TIME_LENGTH];

    printf("%-30s %3u %-6s %9s %9s %9s %9s %9s %9s %9s %9s %10s %9s %8s %8s %8s  ", row->name,
           row->threads, row->engine, format_time(row->limit_ns, limit),
           format_time(find_detail(row, "bare_trap_ns"), bare),
           format_time(find_detail(row, "bare_trap_p99_ns"), bare_p99),
           format_time(row->raw_ns, raw),
           format_time(row->raw_p99_ns, raw_p99), format_time(row->paper_ns, paper),
           format_time(row->pcow_ns, pcow), format_time(row->pcow_p99_ns, pcow_p99),
           format_time(row->pcow_p999_ns, pcow_p999),
           format_time(find_detail(row, "unprepared_ns"), cold),
           format_ratio(row->pcow_ns / row->limit_ns, limit_ratio),
           format_ratio(row->pcow_ns / row->raw_ns, ratio),
           format_ratio(row->paper_ns / row->pcow_ns, paper_ratio));
    print_criteria(row);
    putchar('\n');
}

void print_table(const struct bench *bench)
{
    const struct limits *limits = &bench->limits;
    char text[6][TIME_LENGTH], size[SIZE_TEXT_LENGTH], memory[SIZE_TEXT_LENGTH];
    struct machine machine;

    machine_describe(bench, &machine);
    printf("pcow-bench %s%s: %s for each side, %u repetitions\n", pcow_version(),
           bench->quick ? " (quick)" : "", format_size(bench->size, size), bench->repeat);
    printf("%s, %u cores, %s, %s\n", machine.cpu, machine.cores,
           format_size(machine.memory, memory), machine.kernel);
    printf("pool ");
    print_text(bench->pool);
    printf(": %s, persistence %s; huge pages of shared memory: %s; vm.max_map_count %u\n",
           machine.pool_file_system, pcow_persistence_name(bench->persistence),
           machine.shmem_huge[0] ? machine.shmem_huge : "none", machine.max_map_count);
    printf("limits: write fault %s (2 threads: %s), memcpy 4 KiB %s, 64 KiB %s, 2 MiB %s, store "
           "and %s of a line %s; "
           "clock %.0f ns, subtracted\n\n",
           format_time(limits->fault_ns[0], text[0]), format_time(limits->fault_ns[1], text[1]),
           format_time(limits->memcpy_4k_ns, text[2]), format_time(limits->memcpy_64k_ns, text[3]),
           format_time(limits->memcpy_2m_ns, text[4]), bench->flush_instruction,
           format_time(limits->flush_line_ns, text[5]), limits->clock_ns);
    if (bench->minor_problem) {
        printf("engine minor was left out: %s\n\n", bench->minor_problem);
    }
    if (bench->paper_problem) {
        printf("the paper's first touch and snapshots were left out: %s\n\n", bench->paper_problem);
    }
    if (bench->huge_problem) {
        printf("rows with 2 MiB pages were left out: %s\n\n", bench->huge_problem);
    }
    if (bench->qcow2_problem) {
        printf("rows beside qcow2 were left out: %s\n\n", bench->qcow2_problem);
    }
    printf("%-30s %3s %-6s %9s %9s %9s %9s %9s %9s %9s %9s %10s %9s %8s %8s %8s  %s\n", "row",
           "thr", "engine", "limit", "bare trap", "bare p99", "raw",
           "raw p99", "paper", "pcow", "pcow p99",
           "pcow p99.9", "pcow cold", "/limit", "/raw", "paper/", "target");
    for (size_t i = 0; i < bench->row_count; i++) {
        print_row(&bench->rows[i]);
    }
}
