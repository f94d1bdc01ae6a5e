/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "copy.h"
#include "options.h"
#include "progress.h"
#include "report.h"

/* Exit codes, those of qemu-img. */
enum { IDENTICAL = 0, DIFFERENT = 1, CANNOT_OPEN = 2, CANNOT_GET_STATUS = 3, CANNOT_READ = 4 };

struct comparison {
    struct source *source[2];
    unsigned char *buffer[2];
    bool strict, quiet;
    int status;                                /* exit code when something was found */
};

static void say(const struct comparison *comparison, const char *text, uint64_t offset)
{
    if (!comparison->quiet) {
        printf(text, offset);
    }
}

static int get_extent(struct comparison *comparison, unsigned i, uint64_t offset, uint64_t end,
                      struct source_extent *extent, struct pcow_error *error)
{
    struct source *source = comparison->source[i];

    if (offset >= source->size) {              /* behind its end a smaller image counts as zeros */
        *extent = (struct source_extent){.length = end - offset, .zero = true};
        return 0;
    }
    comparison->status = CANNOT_GET_STATUS;
    return source_get_extent(source, offset, (end < source->size ? end : source->size) - offset,
                             extent, error);
}

static int read_range(struct comparison *comparison, unsigned i, bool zero, uint64_t offset,
                      size_t length, struct pcow_error *error)
{
    if (zero) {
        memset(comparison->buffer[i], 0, length);
        return 0;
    }
    comparison->status = CANNOT_READ;
    return source_read(comparison->source[i], offset, comparison->buffer[i], length, error);
}

/* Returns 0 with *done = 0 if the images differ at or after offset. */
static int compare_step(struct comparison *comparison, uint64_t offset, uint64_t end,
                        uint64_t *done, struct pcow_error *error)
{
    struct source_extent extent[2];
    uint64_t length;
    int r = 0;

    for (unsigned i = 0; i < 2 && !r; i++) {
        r = get_extent(comparison, i, offset, end, &extent[i], error);
    }
    if (r) {
        return r;
    }
    length = extent[0].length < extent[1].length ? extent[0].length : extent[1].length;
    *done = length;
    if (comparison->strict && extent[0].zero != extent[1].zero) {
        say(comparison, "Strict mode: Offset %" PRIu64 " block status mismatch!\n", offset);
        *done = 0;
        return 0;
    }
    if (extent[0].zero && extent[1].zero) {
        return 0;
    }
    *done = length = length < MAX_CHUNK_SIZE ? length : MAX_CHUNK_SIZE;
    for (unsigned i = 0; i < 2 && !r; i++) {
        r = read_range(comparison, i, extent[i].zero, offset, (size_t)length, error);
    }
    if (r || !memcmp(comparison->buffer[0], comparison->buffer[1], (size_t)length)) {
        return r;
    }
    for (size_t i = 0; i < length; i++) {
        if (comparison->buffer[0][i] != comparison->buffer[1][i]) {
            say(comparison, "Content mismatch at offset %" PRIu64 "!\n", offset + i);
            break;
        }
    }
    *done = 0;
    return 0;
}

static int compare_all(struct comparison *comparison, struct progress *progress,
                       struct pcow_error *error)
{
    uint64_t size[2] = {comparison->source[0]->size, comparison->source[1]->size};
    uint64_t end = size[0] > size[1] ? size[0] : size[1], offset = 0, done;

    if (size[0] != size[1]) {
        if (comparison->strict) {
            say(comparison, "Strict mode: Image size mismatch!\n", 0);
            comparison->status = DIFFERENT;
            return 0;
        }
        say(comparison, "Warning: Image size mismatch!\n", 0);
    }
    while (offset < end) {
        int r = compare_step(comparison, offset, end, &done, error);

        if (r) {
            return r;
        }
        if (done == 0) {
            comparison->status = DIFFERENT;
            return 0;
        }
        offset += done;
        if (progress_update(progress, offset, end)) {
            comparison->status = CANNOT_READ;
            return fail(error, -ECANCELED, "interrupted");
        }
    }
    say(comparison, "Images are identical.\n", 0);
    comparison->status = IDENTICAL;
    return 0;
}

static int compare(struct comparison *comparison, const struct source_options options[2],
                   bool show_progress)
{
    struct progress progress;
    struct pcow_error error;
    int r = 0;

    comparison->status = CANNOT_OPEN;
    for (unsigned i = 0; i < 2 && !r; i++) {
        comparison->buffer[i] = malloc(MAX_CHUNK_SIZE);
        r = comparison->buffer[i] ? source_open(&options[i], &comparison->source[i], &error)
                                  : fail(&error, -ENOMEM, "out of memory");
    }
    if (!r) {
        progress_begin(&progress, show_progress);
        r = compare_all(comparison, &progress, &error);
        progress_end(&progress, r == 0);
    }
    for (unsigned i = 0; i < 2; i++) {
        source_close(comparison->source[i]);
        free(comparison->buffer[i]);
    }
    if (r) {
        report_error(&error);
    }
    return comparison->status;
}

static int run(int argc, char **argv)
{
    static const struct option names[] = {
        HELP_OPTION, {"force-share", no_argument, NULL, 'U'}, END_OF_OPTIONS};
    const char *formats[2] = {NULL, NULL};
    struct source_options options[2] = {0};
    struct comparison comparison = {0};
    bool show_progress = false, force_share = false;
    struct pcow_error error;
    int option;

    while ((option = next_option(argc, argv, ":hpqsUf:F:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&compare_command, stdout);
        case 'p': show_progress = true; break;
        case 'q': comparison.quiet = true; break;
        case 's': comparison.strict = true; break;
        case 'U': force_share = true; break;
        case 'f': formats[0] = optarg; break;
        case 'F': formats[1] = optarg; break;
        default: return CANNOT_OPEN;
        }
    }
    if (!check_operands(argc, argv, 2, 2, "FILE1 FILE2")) {
        return CANNOT_OPEN;
    }
    for (int i = 0; i < 2; i++) {
        options[i].path = argv[optind + i];
        options[i].force_share = force_share;
        if (format_of_file(options[i].path, formats[i], i ? "-F" : "-f", &options[i].format,
                           &error)) {
            report_error(&error);
            return CANNOT_OPEN;
        }
    }
    return compare(&comparison, options, show_progress && !comparison.quiet);
}

const struct command compare_command = {
    .name = "compare",
    .arguments = "[-p] [-q] [-s] [-U] [-f FMT] [-F FMT] FILE1 FILE2",
    .summary = "Compare what two guests would read",
    .help = "  -f FMT                     format of FILE1: raw, qcow2, pcow, pcow1; may be left "
            "out for *.pcow\n"
            "  -F FMT                     format of FILE2\n"
            "  -s                         strict: sizes and holes must be equal too\n"
            "  -U, --force-share          take no locks: also while the images are in use\n"
            "  -p                         show progress\n"
            "  -q                         print nothing, only the exit code tells\n"
            "Exit code: 0 identical, 1 different, 2 an image cannot be opened (or wrong usage), 3 "
            "no block status, 4 read error.\n",
    .run = run,
};
