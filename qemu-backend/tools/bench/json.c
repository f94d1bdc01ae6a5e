/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "document.h"
#include "json_output.h"
#include "machine.h"
#include "report.h"

#define JSON_FLAGS \
    (JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_SPACED | JSON_C_TO_STRING_NOSLASHESCAPE)

/*
 * A number with the digits that mean something; null where nothing was measured (JSON has no NaN).
 */
static void put_number(json_object *object, const char *key, double value, const char *format)
{
    char text[64];

    if (isnan(value)) {
        json_object_object_add(object, key, NULL);
        return;
    }
    snprintf(text, sizeof(text), format, value);
    json_object_object_add(object, key, json_object_new_double_s(value, text));
}

static void put_ratio(json_object *object, const char *key, double numerator, double denominator)
{
    put_number(object, key, numerator / denominator, "%.4f");
}

static void put_met(json_object *object, int met)
{
    json_object_object_add(object, "met", met < 0 ? NULL : json_object_new_boolean(met));
}

static json_object *criteria_of(const struct row *row)
{
    json_object *list = json_object_new_array();

    for (unsigned i = 0; i < row->criterion_count; i++) {
        json_object *criterion = json_object_new_object();

        json_put_text(criterion, "what", row->criteria[i].what);
        put_number(criterion, "value", row->criteria[i].value, "%.4f");
        put_number(criterion, row->criteria[i].at_least ? "at-least" : "at-most",
                   row->criteria[i].bound, "%.4f");
        json_put_bool(criterion, "met", criterion_met(&row->criteria[i]));
        json_object_array_add(list, criterion);
    }
    return list;
}

/*
 * The ratio (pcow by raw) at which the first criterion would just be met, in whatever terms it is
 * stated.
 */
static double ratio_target(const struct row *row)
{
    const struct criterion *first = &row->criteria[0];
    double ratio = row->pcow_ns / row->raw_ns;

    if (row->criterion_count == 0) {
        return NAN;
    }
    return first->at_least ? ratio * first->value / first->bound
                           : ratio * first->bound / first->value;
}

static json_object *row_object(const struct row *row)
{
    json_object *object = json_object_new_object(), *details = json_object_new_object();

    json_put_text(object, "name", row->name);
    json_put_size(object, "threads", row->threads);
    json_put_text(object, "engine", row->engine);
    put_number(object, "limit_ns", row->limit_ns, "%.1f");
    put_number(object, "raw_ns", row->raw_ns, "%.1f");
    put_number(object, "raw_p99_ns", row->raw_p99_ns, "%.1f");
    put_number(object, "raw_p999_ns", row->raw_p999_ns, "%.1f");
    put_number(object, "paper_ns", row->paper_ns, "%.1f");
    put_number(object, "pcow_ns", row->pcow_ns, "%.1f");
    put_number(object, "pcow_p99_ns", row->pcow_p99_ns, "%.1f");
    put_number(object, "pcow_p999_ns", row->pcow_p999_ns, "%.1f");
    put_ratio(object, "ratio", row->pcow_ns, row->raw_ns);
    put_ratio(object, "limit_ratio", row->pcow_ns, row->limit_ns);
    put_ratio(object, "paper_ratio", row->paper_ns, row->pcow_ns);
    put_number(object, "target", ratio_target(row), "%.4f");
    put_met(object, row_met(row));
    json_object_object_add(object, "targets", criteria_of(row));
    for (unsigned i = 0; i < row->detail_count; i++) {
        put_number(details, row->details[i].key, row->details[i].value, "%.12g");
    }
    json_object_object_add(object, "details", details);
    if (row->note[0]) {
        json_put_text(object, "note", row->note);
    }
    return object;
}

static json_object *limits_object(const struct bench *bench)
{
    const struct limits *limits = &bench->limits;
    json_object *object = json_object_new_object();

    put_number(object, "fault_ns", limits->fault_ns[0], "%.1f");
    put_number(object, "fault_2_threads_ns", limits->fault_ns[1], "%.1f");
    put_number(object, "memcpy_4k_ns", limits->memcpy_4k_ns, "%.1f");
    put_number(object, "memcpy_64k_ns", limits->memcpy_64k_ns, "%.1f");
    put_number(object, "memcpy_2m_ns", limits->memcpy_2m_ns, "%.1f");
    put_number(object, "flush_line_ns", limits->flush_line_ns, "%.1f");
    put_number(object, "clock_ns", limits->clock_ns, "%.1f");
    return object;
}

json_object *document_machine(const struct bench *bench)
{
    json_object *object = json_object_new_object();
    struct machine machine;

    machine_describe(bench, &machine);
    json_put_text(object, "cpu", machine.cpu);
    json_put_text(object, "kernel", machine.kernel);
    json_put_size(object, "cores", machine.cores);
    json_put_size(object, "memory", machine.memory);
    json_put_text(object, "pool", bench->pool);
    json_put_text(object, "pool_file_system", machine.pool_file_system);
    json_put_text(object, "persistence", pcow_persistence_name(bench->persistence));
    json_put_text(object, "flush_instruction", bench->flush_instruction);
    json_put_size(object, "max_map_count", machine.max_map_count);
    json_put_text(object, "shmem_huge", machine.shmem_huge);
    return object;
}

static json_object *run_object(const struct bench *bench)
{
    json_object *object = json_object_new_object();

    json_put_text(object, "version", pcow_version());
    json_put_size(object, "size", bench->size);
    json_put_size(object, "repeat", bench->repeat);
    json_put_bool(object, "quick", bench->quick);
    json_put_bool(object, "mirror", !bench->no_mirror);
    if (bench->minor_problem) {
        json_put_text(object, "engine_minor_skipped", bench->minor_problem);
    }
    if (bench->paper_problem) {
        json_put_text(object, "paper_skipped", bench->paper_problem);
    }
    if (bench->huge_problem) {
        json_put_text(object, "huge_skipped", bench->huge_problem);
    }
    if (bench->qcow2_problem) {
        json_put_text(object, "qcow2_skipped", bench->qcow2_problem);
    }
    return object;
}

static json_object *document(const struct bench *bench)
{
    json_object *object = json_object_new_object(), *rows = json_object_new_array();

    for (size_t i = 0; i < bench->row_count; i++) {
        json_object_array_add(rows, row_object(&bench->rows[i]));
    }
    json_object_object_add(object, "rows", rows);
    json_object_object_add(object, "limits", limits_object(bench));
    json_object_object_add(object, "machine", document_machine(bench));
    json_object_object_add(object, "run", run_object(bench));
    return object;
}

int write_json(const struct bench *bench, const char *path)
{
    return document_put(document(bench), path);
}

int document_put(json_object *object, const char *path)
{
    FILE *file;
    bool ok;

    if (!path) {
        return json_print(object);
    }
    file = fopen(path, "we");
    ok = file && fprintf(file, "%s\n", json_object_to_json_string_ext(object, JSON_FLAGS)) > 0;
    if (file && fclose(file)) {
        ok = false;
    }
    if (!ok) {
        report("cannot write %s: %s", path, strerror(errno));
    }
    json_object_put(object);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
