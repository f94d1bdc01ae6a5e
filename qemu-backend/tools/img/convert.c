/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "command.h"
#include "copy.h"
#include "image.h"
#include "options.h"
#include "report.h"
#include "size.h"
#include "staging.h"

struct convert_request {
    const char *source_path, *source_format, *snapshot;
    const char *target_path, *target_format;
    const char *base, *base_format, *base_snapshot;
    uint64_t cluster_size;
    char qcow2_options[1024];
    char *option_list;                         /* of all -o */
    bool existing, quiet, progress, force_share, sealed, accept_damage;
    bool checksums, without_checksums;         /* neither: want_checksums() decides */
};

static bool is_qcow2_option(const char *key)
{
    static const char *const known[] = {
        "compat",         "cluster_size",  "compression_type", "extended_l2",
        "lazy_refcounts", "preallocation", "refcount_bits",
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (!strcmp(key, known[i])) {
            return true;
        }
    }
    return false;
}

static int apply_options(struct convert_request *request, enum image_format format,
                         struct pcow_error *error)
{
    char *list = request->option_list, *key, *value;
    size_t used = 0;
    int more;

    while ((more = next_key_value(&list, &key, &value, error)) > 0) {
        if (format == FORMAT_PCOW && !strcmp(key, "cluster_size")) {
            if (parse_size_of(key, value, &request->cluster_size, error)) {
                return -EINVAL;
            }
        } else if (format == FORMAT_PCOW && !strcmp(key, "base_snapshot")) {
            request->base_snapshot = value;
        } else if (format == FORMAT_PCOW && !strcmp(key, "sealed")) {
            if (!parse_switch(key, value, &request->sealed, error)) {
                return -EINVAL;
            }
        } else if (format == FORMAT_PCOW && !strcmp(key, "checksums")) {
            if (!parse_switch(key, value, &request->checksums, error)) {
                return -EINVAL;
            }
            request->without_checksums = !request->checksums;
        } else if (format == FORMAT_QCOW2 && is_qcow2_option(key) && !strchr(value, ',')) {
            used += (size_t)snprintf(request->qcow2_options + used,
                                     sizeof(request->qcow2_options) - used, "%s%s=%s",
                                     used ? "," : "", key, value);
            if (used >= sizeof(request->qcow2_options)) {
                return fail(error, -EINVAL, "the options of -o are too long");
            }
        } else {
            return fail(error, -EINVAL, "option '%s' of -o is not known for format %s", key,
                        format_name(format));
        }
    }
    return more;
}

static int open_base(const struct convert_request *request, const char *path, struct source **base,
                     struct pcow_error *error)
{
    bool format_1 = request->base_format && !strcmp(request->base_format, "pcow1");
    const struct source_options options = {
        .path = path,
        .snapshot = request->base_snapshot,
        .format = format_1 ? FORMAT_PCOW_1 : FORMAT_PCOW,
        .accept_damage = request->accept_damage,
    };

    return source_open(&options, base, error);
}

/* The size of a new image that holds all of source. */
static int target_size(const struct convert_request *request, enum image_format format,
                       const struct source *source, uint64_t *size, struct pcow_error *error)
{
    *size = source->size;
    if (format == FORMAT_PCOW) {
        return round_virtual_size(size, request->quiet, error);
    }
    return 0;
}

static int fill(const struct convert_request *request, const struct target_options *options,
                struct source *source, struct source *base, struct pcow_error *error)
{
    struct progress progress;
    struct target *target;
    int r;

    progress_begin(&progress, request->progress && !request->quiet);
    r = target_open(options, &target, error);
    if (!r) {
        if (target->size < source->size) {
            r = fail(error, -ENOSPC,
                     "%s has %" PRIu64 " bytes, which is less than the %" PRIu64
                     " of %s; resize it first",
                     options->shown_path, target->size, source->size, source->path);
        }
        if (!r) {
            r = copy_image(source, base, target, &progress, error);
        }
        if (!r) {
            r = target_finish(target, error);
        }
        target_close(target);
    }
    progress_end(&progress, r == 0);
    return r;
}

static int fill_new(const struct convert_request *request, struct target_options *options,
                    struct source *source, struct source *base, struct pcow_error *error)
{
    struct staging staging;
    int r = staging_begin(&staging, request->target_path, error);

    if (r) {
        return r;
    }
    options->path = staging.path;
    r = fill(request, options, source, base, error);
    if (r) {
        staging_abort(&staging);
        return r;
    }
    return staging_commit(&staging, error);
}

static bool is_same_file(const char *a, const char *b)
{
    struct stat status_a, status_b;

    return !stat(a, &status_a) && !stat(b, &status_b) && status_a.st_dev == status_b.st_dev &&
           status_a.st_ino == status_b.st_ino;
}

/*
 * By default all of a new template has them. But they would call health what is damaged in a source
 * that nobody has looked at; and what is there already may have no place for them.
 */
static bool want_checksums(const struct convert_request *request)
{
    return request->checksums
           || (request->sealed && !request->existing && !request->without_checksums
               && !request->accept_damage);
}

static int convert(struct convert_request *request, struct pcow_error *error)
{
    struct source_options from = {
        .path = request->source_path,
        .snapshot = request->snapshot,
        .force_share = request->force_share,
        .compare_data = true,
        .accept_damage = request->accept_damage,
    };
    struct target_options to = {
        .path = request->target_path,
        .shown_path = request->target_path,
        .existing = request->existing,
    };
    struct source *source = NULL, *base = NULL;
    char path_of_base[PATH_MAX];
    int r = format_of_file(from.path, request->source_format, "-f", &from.format, error);

    if (!r) {
        r = format_of_new_file(to.path, request->target_format, &to.format, error);
    }
    if (!r) {
        r = apply_options(request, to.format, error);
    }
    if (!r && is_same_file(from.path, to.path)) {
        r = fail(error, -EINVAL, "%s and %s are the same file", from.path, to.path);
    }
    if (!r && request->base && (to.format != FORMAT_PCOW || request->existing)) {
        r = fail(error, -EINVAL, "%s: -B is for new images of format pcow", to.path);
    }
    if (!r && !request->base && (request->base_format || request->base_snapshot)) {
        r = fail(error, -EINVAL, "%s: -F and base_snapshot need a base: give one with -B", to.path);
    }
    if (!r && request->checksums && !request->sealed) {
        r = fail(error, -EINVAL, "%s: checksums=on goes with sealed=on: data that is final has them",
                 to.path);
    }
    if (!r) {
        r = check_base_format(request->base_format, error);
    }
    if (!r && request->base) {
        r = base_path(to.path, request->base, path_of_base, error);
    }
    if (r) {
        return r;
    }
    r = source_open(&from, &source, error);
    if (!r && request->base) {
        r = open_base(request, path_of_base, &base, error);
        to.base = path_of_base;
    }
    if (!r && !request->existing) {
        r = target_size(request, to.format, source, &to.size, error);
    }
    if (!r) {
        to.base_snapshot = request->base_snapshot;
        to.cluster_size = request->cluster_size;
        to.sealed = request->sealed;
        to.checksums = want_checksums(request);
        to.qcow2_options = *request->qcow2_options ? request->qcow2_options : NULL;
        r = request->existing ? fill(request, &to, source, base, error)
                              : fill_new(request, &to, source, base, error);
    }
    source_close(base);
    source_close(source);
    return r;
}

/* Returns 0, or after a report or the help -1 with *status, the exit code. */
static int parse(int argc, char **argv, struct convert_request *request, int *status)
{
    enum { ACCEPT_DAMAGE = 256 };
    static const struct option names[] = {HELP_OPTION,
                                          {"accept-damage", no_argument, NULL, ACCEPT_DAMAGE},
                                          {"force-share", no_argument, NULL, 'U'},
                                          END_OF_OPTIONS};
    int option;

    *status = EXIT_FAILURE;
    while ((option = next_option(argc, argv, ":hpqnUf:O:B:F:o:l:", names)) != -1) {
        switch (option) {
        case 'h': *status = command_help(&convert_command, stdout); return -1;
        case 'p': request->progress = true; break;
        case 'q': request->quiet = true; break;
        case 'n': request->existing = true; break;
        case 'U': request->force_share = true; break;
        case 'f': request->source_format = optarg; break;
        case 'O': request->target_format = optarg; break;
        case 'B': request->base = optarg; break;
        case 'F': request->base_format = optarg; break;
        case 'l': request->snapshot = optarg; break;
        case ACCEPT_DAMAGE: request->accept_damage = true; break;
        case 'o':
            if (!append_key_values(&request->option_list, optarg)) {
                return -1;
            }
            break;
        default: return -1;
        }
    }
    if (!check_operands(argc, argv, 2, 2, "SOURCE DESTINATION")) {
        return -1;
    }
    request->source_path = argv[optind];
    request->target_path = argv[optind + 1];
    return 0;
}

static int run(int argc, char **argv)
{
    struct convert_request request = {0};
    struct pcow_error error;
    int status;

    if (!parse(argc, argv, &request, &status)) {
        status = convert(&request, &error) ? report_error(&error) : EXIT_SUCCESS;
    }
    free(request.option_list);
    return status;
}

const struct command convert_command = {
    .name = "convert",
    .arguments = "[-p] [-q] [-U] [-n] [-f FMT] [-O FMT] [-B BASE [-F FMT]] [-o OPTIONS] [-l "
                 "SNAPSHOT] [--accept-damage] SOURCE DESTINATION",
    .summary = "Copy an image into another format; sparse stays sparse",
    .help =
        "  -f FMT                     format of SOURCE: raw, qcow2, pcow, pcow1; may be left out "
        "for *.pcow\n"
        "  -O FMT                     format of DESTINATION: raw, qcow2, pcow; may be left out for "
        "*.pcow, *.qcow2, *.raw, *.img (raw)\n"
        "  -B BASE                    make a pcow image on this base that holds only what differs "
        "from it\n"
        "  -F FMT                     format of BASE: pcow (default) or pcow1\n"
        "  -l SNAPSHOT                copy a snapshot of SOURCE and not its present state; of pcow "
        "also while SOURCE is in use\n"
        "  -n                         write into DESTINATION, which exists (a block device, an "
        "image)\n"
        "  -o cluster_size=SIZE       of a pcow image, 4k to 2M, default 64k\n"
        "  -o base_snapshot=NAME      stand on this snapshot of BASE\n"
        "  -o sealed=on               make a template of the pcow image that nobody can change\n"
        "  -o checksums=on|off        of the template's data, for 'check --data'; default: on, with "
        "-n or --accept-damage off\n"
        "  -o ...                     for qcow2: qemu-img's compat, cluster_size, "
        "compression_type, extended_l2,\n"
        "                             lazy_refcounts, preallocation, refcount_bits\n"
        "  --accept-damage            copy SOURCE as it is, also if it is known to be damaged\n"
        "  -U, --force-share          take no lock on SOURCE: also while it is in use\n"
        "  -p                         show progress\n"
        "  -q                         print nothing on success\n"
        "Without -n DESTINATION appears, or is replaced, only when the copy is complete.\n",
    .run = run,
};
