/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * pcow-bench: what pcow costs beside raw memory and beside the published method, measured in one
 * run.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "guard.h"
#include "interrupt.h"
#include "options.h"
#include "report.h"
#include "sample.h"
#include "soak.h"
#include "soak_threads.h"

#define DEFAULT_SIZE (UINT64_C(512) << 20)
#define QUICK_SIZE (UINT64_C(32) << 20)
#define MIN_SIZE (UINT64_C(16) << 20)
#define DEFAULT_REPEAT 7
#define QUICK_REPEAT 2
#define DEFAULT_THREADS 4
#define MAX_WANTED 64

static const struct group *const groups[] = {&first_touch_group, &copy_group,      &steady_group,
                                             &open_group,        &scattered_group, &snapshot_group,
                                             &freeze_group,      &large_group,     &qcow2_group};

#define GROUPS (sizeof(groups) / sizeof(groups[0]))

struct options {
    const char *pool, *json_file;
    bool json;
    char *row_list;
    unsigned soak_seconds, threads;            /* 0: no soak */
    uint64_t seed;
    const char *wanted[MAX_WANTED + 1];
};

static int help(void)
{
    puts("usage: pcow-bench [OPTION]...\n"
         "Measure pcow beside raw memory and beside the published method, in one run.\n\n"
         "      --output=human|json    a table (default), or JSON\n"
         "      --json-file FILE       write the JSON to FILE as well\n"
         "      --pool DIR             where the files are made and removed again (default: "
         "/dev/shm)\n"
         "      --rows NAME,...        only these rows\n"
         "      --size SIZE            working set of each side (default 512M, at least 16M)\n"
         "      --repeat NUMBER        repetitions of which the median is taken (default 7)\n"
         "      --no-mirror            images without the mirror of their metadata: what that "
         "costs\n"
         "      --quick                small and short: to see that it works, not for numbers\n"
         "      --soak SECONDS         measure nothing; use an image at random for so long and "
         "compare every byte\n"
         "      --threads NUMBER       of a soak (default 4, at most 64)\n"
         "      --seed NUMBER          of a soak (default: from the clock)\n"
         "  -h, --help                 this text\n"
         "  -V, --version              the version\n\nRows:");
    for (size_t i = 0; i < GROUPS; i++) {
        for (const char *const *name = groups[i]->names; *name; name++) {
            printf("  %s\n", *name);
        }
    }
    puts("\nExit code: 0 if everything was measured and all data was right, whether or not targets "
         "were met; else 1.");
    return EXIT_SUCCESS;
}

static bool is_row(const char *text)
{
    for (size_t i = 0; i < GROUPS; i++) {
        for (const char *const *name = groups[i]->names; *name; name++) {
            if (!strcmp(*name, text)) {
                return true;
            }
        }
    }
    report("there is no row '%s'; see 'pcow-bench --help'", text);
    return false;
}

static bool parse_rows(char *list, struct options *options)
{
    char *name;
    size_t count = 0;

    while ((name = strsep(&list, ","))) {
        if (count == MAX_WANTED || !is_row(name)) {
            return false;
        }
        options->wanted[count++] = name;
    }
    return true;
}

static bool parse_number(const char *option, const char *text, uint64_t most, uint64_t *number)
{
    char *end;

    errno = 0;
    *number = strtoull(text, &end, 10);
    if (end == text || *end || text[0] == '-' || errno || *number == 0 || *number > most) {
        report("%s takes a number from 1 to %llu, not '%s'", option, (unsigned long long)most,
               text);
        return false;
    }
    return true;
}

static bool parse_unsigned(const char *option, const char *text, unsigned most, unsigned *number)
{
    uint64_t value;
    bool ok = parse_number(option, text, most, &value);

    *number = ok ? (unsigned)value : 0;
    return ok;
}

static bool parse_size_of_set(const char *text, uint64_t *size)
{
    if (!parse_size_option("--size", text, size)) {
        return false;
    }
    if (*size < MIN_SIZE || *size % PCOW_SLAB_SIZE || *size > PCOW_MAX_VIRTUAL_SIZE) {
        report("--size takes a multiple of 2M, at least 16M, not '%s'", text);
        return false;
    }
    return true;
}

static int parse_options(int argc, char **argv, struct bench *bench, struct options *options)
{
    enum { OUTPUT = 256, JSON_FILE, POOL, ROWS, SIZE, REPEAT, QUICK, NO_MIRROR, SOAK, THREADS, SEED };
    static const struct option names[] = {
        {"output", required_argument, NULL, OUTPUT},
        {"json-file", required_argument, NULL, JSON_FILE},
        {"pool", required_argument, NULL, POOL},
        {"rows", required_argument, NULL, ROWS},
        {"size", required_argument, NULL, SIZE},
        {"repeat", required_argument, NULL, REPEAT},
        {"quick", no_argument, NULL, QUICK},
        {"no-mirror", no_argument, NULL, NO_MIRROR},
        {"soak", required_argument, NULL, SOAK},
        {"threads", required_argument, NULL, THREADS},
        {"seed", required_argument, NULL, SEED},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    int option;
    bool ok = true;

    while (ok && (option = next_option(argc, argv, ":hV", names)) != -1) {
        switch (option) {
        case OUTPUT: ok = parse_output(optarg, &options->json); break;
        case JSON_FILE: options->json_file = optarg; break;
        case POOL: options->pool = optarg; break;
        case ROWS: options->row_list = optarg; break;
        case SIZE: ok = parse_size_of_set(optarg, &bench->size); break;
        case REPEAT: ok = parse_unsigned("--repeat", optarg, MAX_REPEAT, &bench->repeat); break;
        case QUICK: bench->quick = true; break;
        case NO_MIRROR: bench->no_mirror = true; break;
        case SOAK: ok = parse_unsigned("--soak", optarg, UINT32_MAX, &options->soak_seconds); break;
        case THREADS:
            ok = parse_unsigned("--threads", optarg, MAX_SOAK_THREADS, &options->threads);
            break;
        case SEED: ok = parse_number("--seed", optarg, UINT64_MAX, &options->seed); break;
        case 'h': exit(help());
        case 'V':
            printf("pcow-bench version %s\n", pcow_version());
            exit(EXIT_SUCCESS);
        default: ok = false;
        }
    }
    if (ok && optind != argc) {
        report("'%s' is not expected; see 'pcow-bench --help'", argv[optind]);
        ok = false;
    }
    if (ok && options->row_list) {
        ok = parse_rows(options->row_list, options);
        bench->wanted = options->wanted;
    }
    if (ok && !options->soak_seconds && (options->threads || options->seed)) {
        report("--threads and --seed go with --soak");
        ok = false;
    }
    if (ok && options->soak_seconds && (options->row_list || bench->repeat || bench->quick)) {
        report("--soak measures nothing: leave out --rows, --repeat and --quick");
        ok = false;
    }
    if (!bench->size) {
        bench->size = options->soak_seconds ? SOAK_SIZE : bench->quick ? QUICK_SIZE : DEFAULT_SIZE;
    }
    if (!bench->repeat) {
        bench->repeat = bench->quick ? QUICK_REPEAT : DEFAULT_REPEAT;
    }
    return ok ? 0 : -EINVAL;
}

static int show(const struct bench *bench, const struct options *options)
{
    int status = options->json_file ? write_json(bench, options->json_file) : EXIT_SUCCESS;

    if (options->json) {
        return write_json(bench, NULL) == EXIT_SUCCESS ? status : EXIT_FAILURE;
    }
    print_table(bench);
    if (fflush(stdout)) {
        report("could not write the output");
        status = EXIT_FAILURE;
    }
    return status;
}

struct run {
    struct bench *bench;
    const struct options *options;
};

static int measure(void *opaque)
{
    const struct run *run = opaque;
    struct pcow_error error = {0};
    int r = measure_limits(run->bench, &error);

    for (size_t i = 0; i < GROUPS && !r; i++) {
        r = groups[i]->run(run->bench, &error);
    }
    if (interrupt_pending()) {
        return EXIT_FAILURE;
    }
    return r ? report_error(&error) : show(run->bench, run->options);
}

static int use(void *opaque)
{
    const struct run *run = opaque;
    const struct options *options = run->options;
    struct pcow_error error = {0};
    struct soak_report done;
    int r =
        soak(run->bench, options->soak_seconds,
             options->threads ? options->threads : DEFAULT_THREADS, options->seed, &done, &error);

    if (interrupt_pending()) {
        return EXIT_FAILURE;
    }
    if (r) {
        report("%s (seed %llu)", error.message, (unsigned long long)done.seed);
        return EXIT_FAILURE;
    }
    if (options->json_file && write_soak_json(run->bench, &done, options->json_file)) {
        return EXIT_FAILURE;
    }
    if (options->json) {
        return write_soak_json(run->bench, &done, NULL);
    }
    print_soak(&done);
    return fflush(stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* Before minutes of measuring, not after them. */
static bool can_write(const char *path)
{
    FILE *file = fopen(path, "ae");

    if (!file) {
        report("cannot write %s: %s", path, strerror(errno));
        return false;
    }
    fclose(file);
    return true;
}

int main(int argc, char **argv)
{
    struct options options = {0};
    struct bench bench = {0};
    struct pcow_error error = {0};
    int status;

    if (parse_options(argc, argv, &bench, &options)
        || (options.json_file && !can_write(options.json_file))) {
        return EXIT_FAILURE;
    }
    interrupt_catch();
    if (bench_begin(&bench, options.pool, &error)) {
        status = report_error(&error);
    } else {
        status = run_guarded(options.soak_seconds ? use : measure, &(struct run){&bench, &options});
    }
    bench_end(&bench);
    return interrupt_obey(status);
}
