/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "check_data.h"
#include "command.h"
#include "image.h"
#include "json_output.h"
#include "losses.h"
#include "options.h"
#include "report.h"

/* Exit codes, those of qemu-img. */
enum { CLEAN = 0, NOT_CHECKED = 1, CORRUPTED = 2, LEAKING = 3, UNSUPPORTED = 63 };

enum repair { REPAIR_NOTHING, REPAIR_LEAKS, REPAIR_ALL };

struct check_request {
    enum repair repair;
    bool accept_loss, json, quiet, force_share;
    bool data;                                 /* and this is of it */
    struct check_data of_data;
};

struct finding_list {
    json_object *array;                        /* NULL: print them */
    bool quiet;
    struct loss_list losses;
};

static void note_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    static const char *const kinds[] = {
        [PCOW_FINDING_CORRUPTION] = "corruption",
        [PCOW_FINDING_LEAK] = "leak",
        [PCOW_FINDING_NOTE] = "note",
    };
    static const char *const prefixes[] = {
        [PCOW_FINDING_CORRUPTION] = "ERROR",
        [PCOW_FINDING_LEAK] = "Leaked",
        [PCOW_FINDING_NOTE] = "Note",
    };
    struct finding_list *list = opaque;

    if (list->array) {
        json_object *object = json_object_new_object();

        json_put_text(object, "kind", kinds[kind]);
        json_put_text(object, "message", message);
        json_object_array_add(list->array, object);
    } else if (!list->quiet) {
        printf("%s: ", prefixes[kind]);
        print_text(message);
        putchar('\n');
    }
}

static void note_loss(void *opaque, const struct pcow_loss *loss)
{
    struct finding_list *list = opaque;

    losses_add(&list->losses, loss);
}

static void print_result(const struct pcow_check_result *result)
{
    uint64_t corruptions = result->corruptions - result->corruptions_fixed,
             leaks = result->leaks - result->leaks_fixed;

    if (result->corruptions_fixed || result->leaks_fixed) {
        printf("The following inconsistencies were found and repaired:\n\n    %" PRIu64
               " leaked slabs\n    %" PRIu64 " corruptions\n\n",
               result->leaks_fixed, result->corruptions_fixed);
    }
    if (corruptions) {
        printf("\n%" PRIu64 " errors were found on the image.\n"
               "Data may be corrupted, or further writes to the image may corrupt it.\n",
               corruptions);
    }
    if (leaks) {
        printf("\n%" PRIu64 " leaked slabs were found on the image.\n%s\n", leaks,
               result->losses ? "Some of them may be data that nothing refers to any more."
                              : "This means waste of disk space, but no harm to data.");
    }
    if (!corruptions && !leaks) {
        puts("No errors were found on the image.");
    }
    printf("%" PRIu64 "/%" PRIu64 " slabs in use\n", result->slabs_used, result->slabs);
}

static int print_json(const char *path, const struct pcow_check_result *result,
                      const struct check_data *data, const struct finding_list *list)
{
    json_object *object = json_object_new_object();

    json_put_text(object, "filename", path);
    json_put_text(object, "format", "pcow");
    json_put_size(object, "check-errors", 0);
    json_put_size(object, "corruptions", result->corruptions);
    json_put_size(object, "corruptions-fixed", result->corruptions_fixed);
    json_put_bool(object, "certain", result->certain);
    json_put_size(object, "corruptions-certain", result->corruptions_certain);
    json_put_size(object, "leaks", result->leaks);
    json_put_size(object, "leaks-fixed", result->leaks_fixed);
    json_put_size(object, "leaks-doubtful", result->leaks_doubtful);
    losses_put_json(object, result, &list->losses);
    if (result->rescue_suffix[0]) {
        char rescue[PATH_MAX];

        snprintf(rescue, sizeof(rescue), "%s%s", path, result->rescue_suffix);
        json_put_text(object, "rescue", rescue);
    }
    json_put_size(object, "slabs", result->slabs);
    json_put_size(object, "slabs-used", result->slabs_used);
    if (data) {
        check_data_put_json(data, object);
    }
    json_object_object_add(object, "findings", list->array);
    return json_print(object);
}

static int check_image(const char *path, const struct check_request *request,
                       struct finding_list *list, struct pcow_check_result *result,
                       struct pcow_error *error)
{
    const unsigned flags = (request->force_share ? PCOW_CHECK_FORCE_SHARE : 0)
                           | (request->accept_loss ? PCOW_CHECK_ACCEPT_LOSS : 0)
                           | (request->repair != REPAIR_NOTHING ? PCOW_CHECK_REPAIR : 0)
                           | (request->repair == REPAIR_LEAKS ? PCOW_CHECK_LEAKS_ONLY : 0);
    int r = pcow_check_losses(path, flags, note_finding, note_loss, list, result, error);

    if (!r && request->repair == REPAIR_LEAKS && result->corruptions) {
        note_finding(list, PCOW_FINDING_NOTE,
                     "nothing was repaired: there are corruptions, which need '-r all'");
    }
    return r;
}

static void report_refused(const char *path, const struct check_request *request,
                           const struct pcow_check_result *result)
{
    char text[128];

    report("%s: nothing was repaired: it would lose %s. Keep a copy of the file first, then go on "
           "with: pcow-img check -r %s --accept-loss %s",
           path, losses_text(result, text, sizeof(text)),
           request->repair == REPAIR_ALL ? "all" : "leaks", path);
}

/* Whoever wants to hear nothing accepted a loss, and not to be told of none. */
static void report_lost(const char *path, const struct pcow_check_result *result)
{
    char text[128];

    report("%s: the repair has lost %s; what of it was in the file is kept in %s%s", path,
           losses_text(result, text, sizeof(text)), path, result->rescue_suffix);
}

/*
 * A file without damage may still be one that nobody can open, as its base is gone or is another
 * one now: that is said. Without a lock, as a base that is in use is not lost.
 */
static void warn_if_not_opened(const char *path, bool clean, struct finding_list *list)
{
    const unsigned flags = PCOW_OPEN_FORCE_SHARE;
    struct pcow_error error, problem;
    pcow_image *image;

    if (!img_open(path, NULL, flags, NULL, &image, &error)) {
        pcow_close(image);
        return;
    }
    if (!clean) {
        /* the damage that was told may be why */
        if (img_open(path, NULL, flags | PCOW_OPEN_NO_BASE, NULL, &image, &problem)) {
            return;
        }
        pcow_close(image);
    }
    if (list->array) {
        note_finding(list, PCOW_FINDING_NOTE, error.message);
    }
    if (!list->quiet) {
        report("warning: %s", error.message);
    }
}

static int check(const char *path, struct check_request *request)
{
    struct finding_list list = {
        .array = request->json ? json_object_new_array() : NULL,
        .quiet = request->quiet,
        .losses = {.array = request->json ? json_object_new_array() : NULL,
                   .quiet = request->quiet},
    };
    struct pcow_check_result result = {0};
    struct pcow_error error;
    int r = check_image(path, request, &list, &result, &error);

    if (!r && request->data) {
        request->of_data.finding = note_finding;
        request->of_data.opaque = &list;
        r = check_data(path, request->force_share, &request->of_data, &result, &error);
    }
    if (r) {
        json_object_put(list.array);
        json_object_put(list.losses.array);
        report_error(&error);
        return r == -ENOTSUP ? UNSUPPORTED : NOT_CHECKED;
    }
    warn_if_not_opened(path, result.corruptions == result.corruptions_fixed, &list);
    if (request->json) {
        if (print_json(path, &result, request->data ? &request->of_data : NULL, &list)) {
            return NOT_CHECKED;
        }
    } else if (!request->quiet) {
        losses_print(path, &list.losses, &result, result.rescue_suffix[0]);
        print_result(&result);
        if (request->data) {
            check_data_print(&request->of_data);
        }
    }
    if (result.refused) {
        report_refused(path, request, &result);
    }
    if (result.rescue_suffix[0] && request->quiet && !request->json) {
        report_lost(path, &result);
    }
    if (result.corruptions > result.corruptions_fixed) {
        return CORRUPTED;
    }
    if (result.leaks > result.leaks_fixed) {
        return result.leaks_doubtful ? CORRUPTED : LEAKING;
    }
    return CLEAN;
}

static int run(int argc, char **argv)
{
    enum { OUTPUT = 256, ACCEPT_LOSS, DATA, RATE };
    static const struct option names[] = {
        HELP_OPTION,
        {"accept-loss", no_argument, NULL, ACCEPT_LOSS},
        {"data", no_argument, NULL, DATA},
        {"output", required_argument, NULL, OUTPUT},
        {"rate", required_argument, NULL, RATE},
        {"repair", required_argument, NULL, 'r'},
        {"force-share", no_argument, NULL, 'U'},
        END_OF_OPTIONS,
    };
    struct check_request request = {0};
    const char *path, *format = "pcow";
    int option;

    while ((option = next_option(argc, argv, ":hqUf:r:", names)) != -1) {
        switch (option) {
        case 'h': return command_help(&check_command, stdout);
        case 'q': request.quiet = true; break;
        case 'U': request.force_share = true; break;
        case 'f': format = optarg; break;
        case 'r':
            request.repair = !strcmp(optarg, "leaks") ? REPAIR_LEAKS : REPAIR_ALL;
            if (strcmp(optarg, "leaks") && strcmp(optarg, "all")) {
                report("check: -r takes 'leaks' or 'all', not '%s'", optarg);
                return NOT_CHECKED;
            }
            break;
        case ACCEPT_LOSS: request.accept_loss = true; break;
        case DATA: request.data = true; break;
        case RATE:
            if (!parse_size_option("rate", optarg, &request.of_data.pace.rate)) {
                return NOT_CHECKED;
            }
            break;
        case OUTPUT:
            if (!parse_output(optarg, &request.json)) {
                return NOT_CHECKED;
            }
            break;
        default: return NOT_CHECKED;
        }
    }
    path = only_operand(&check_command, argc, argv);
    if (!path) {
        return NOT_CHECKED;
    }
    if (strcmp(format, "pcow")) {
        report("%s: format '%s' does not support checks; only pcow does", path, format);
        return UNSUPPORTED;
    }
    if (request.accept_loss && request.repair == REPAIR_NOTHING) {
        report("check: --accept-loss is for a repair (-r): without it nothing is lost");
        return NOT_CHECKED;
    }
    if (request.repair != REPAIR_NOTHING && request.force_share) {
        report("check: -r cannot be used with -U: a repair needs the image for itself");
        return NOT_CHECKED;
    }
    return check(path, &request);
}

const struct command check_command = {
    .name = "check",
    .arguments = "[-q] [-U] [-f pcow] [--data [--rate BYTES]] [--output human|json] "
                 "[-r leaks|all [--accept-loss]] FILE",
    .summary = "Look for damage in an image file, and repair it",
    .help = "  --data                     compare all data that has checksums with them\n"
            "  --rate BYTES               look at no more data a second\n"
            "  -r leaks                   give back lost space, if nothing worse is found\n"
            "  -r all                     repair everything that can be, if nothing is lost by it\n"
            "  --accept-loss              also if something is: what is dropped is kept in "
            "FILE.rescue\n"
            "  -U, --force-share          take no lock: also while the image is in use (findings "
            "may then be false)\n"
            "  -q                         print nothing but errors, and what a repair has lost\n"
            "  -f pcow                    the format (there is no other)\n"
            "  --output human|json        default: human\n"
            "Exit code: 0 clean or repaired, 1 not checked, 2 corrupted or data may be lost, 3 "
            "leaks only, 63 format without checks.\n",
    .run = run,
};
