/* SPDX-License-Identifier: BSD-3-Clause */
/* read, write, discard, flush: with qemu-io's options and output. */
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
#include "options.h"
#include "report.h"
#include "size.h"

#define DEFAULT_PATTERN 0xcd                   /* qemu-io's */

struct transfer {
    uint64_t offset, length;
    int pattern;                               /* -1: none given */
    uint64_t pattern_offset, pattern_length;   /* of read -P: what part of the range to compare */
    bool has_pattern_length;
    const char *source_file;
    bool quiet, machine, verbose, json, zero, flush;
};

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void print_report(const struct transfer *transfer, const char *verb, double seconds)
{
    char size[SIZE_TEXT_LENGTH], rate[SIZE_TEXT_LENGTH];
    double divisor = seconds > 1e-9 ? seconds : 1e-9;

    if (transfer->quiet) {
        return;
    }
    if (transfer->machine) {
        printf("%" PRIu64 ",1,%.6f,%.3f,%.3f\n", transfer->length, seconds,
               (double)transfer->length / divisor, 1 / divisor);
        return;
    }
    printf("%s %" PRIu64 "/%" PRIu64 " bytes at offset %" PRIu64 "\n", verb, transfer->length,
           transfer->length, transfer->offset);
    printf("%s, 1 ops; %05.2f sec (%s/sec and %.4f ops/sec)\n",
           format_size_decimals((double)transfer->length, size), seconds,
           format_size_decimals((double)transfer->length / divisor, rate), 1 / divisor);
}

static bool parse_pattern(const char *text, int *pattern)
{
    char *end;
    unsigned long value;

    errno = 0;
    value = strtoul(text, &end, 0);
    if (errno || end == text || *end || value > UCHAR_MAX || !isdigit((unsigned char)text[0])) {
        report("'%s' is not a pattern: give a byte, 0 to 255 or 0x0 to 0xff", text);
        return false;
    }
    *pattern = (int)value;
    return true;
}

static bool parse_range(const struct command *command, char **operands,
                        const struct session *session, struct transfer *transfer)
{
    struct pcow_error error;

    if (!parse_size_option("offset", operands[0], &transfer->offset) ||
        !parse_size_option("length", operands[1], &transfer->length)) {
        return false;
    }
    if (session_check_range(session, transfer->offset, transfer->length, &error)) {
        return command_failed(command, &error);
    }
    return true;
}

static void dump(const unsigned char *data, size_t length, uint64_t offset)
{
    for (size_t i = 0; i < length; i += 16) {
        printf("%08" PRIx64 ":  ", offset + i);
        for (size_t j = i; j < i + 16 && j < length; j++) {
            printf("%02x ", data[j]);
        }
        putchar(' ');
        for (size_t j = i; j < i + 16 && j < length; j++) {
            putchar(isprint(data[j]) ? data[j] : '.');
        }
        putchar('\n');
    }
}

static void dump_hexadecimal(const unsigned char *data, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        printf("%02x", data[i]);
    }
}

/* Do the bytes of a chunk that lie in the part to compare hold the pattern? */
static bool matches(const struct transfer *transfer, const unsigned char *data, size_t length,
                    uint64_t done)
{
    uint64_t begin = transfer->pattern_offset, end = begin + transfer->pattern_length;

    for (size_t i = 0; i < length; i++) {
        if (done + i >= begin && done + i < end && data[i] != transfer->pattern) {
            return false;
        }
    }
    return true;
}

static int read_range(struct session *session, const struct transfer *transfer,
                      unsigned char *buffer, bool *match, struct pcow_error *error)
{
    uint64_t done = 0;

    while (done < transfer->length) {
        uint64_t left = transfer->length - done;
        size_t piece = left < CHUNK_SIZE ? (size_t)left : CHUNK_SIZE;
        int r = session_read(session, transfer->offset + done, buffer, piece, error);

        if (r) {
            return r;
        }
        if (transfer->pattern >= 0) {
            *match = *match && matches(transfer, buffer, piece, done);
        }
        if (transfer->json) {
            dump_hexadecimal(buffer, piece);
        } else if (transfer->verbose) {
            dump(buffer, piece, transfer->offset + done);
        }
        done += piece;
    }
    return 0;
}

static bool parse_read(const struct command *command, struct session *session, int argc,
                       char **argv, struct transfer *transfer)
{
    int letter;
    bool ok = true;

    while (ok && (letter = next_letter(command, argc, argv)) != -1) {
        switch (letter) {
        case 'C': transfer->machine = true; break;
        case 'j': transfer->json = transfer->quiet = true; break;
        case 'q': transfer->quiet = true; break;
        case 'v': transfer->verbose = true; break;
        case 'P': ok = parse_pattern(optarg, &transfer->pattern); break;
        case 's':
            ok = parse_size_option("pattern offset", optarg, &transfer->pattern_offset);
            break;
        case 'l':
            ok = parse_size_option("pattern length", optarg, &transfer->pattern_length);
            transfer->has_pattern_length = true;
            break;
        default: return false;
        }
    }
    if (!ok || !parse_range(command, argv + optind, session, transfer)) {
        return false;
    }
    if ((transfer->pattern_offset || transfer->has_pattern_length) && transfer->pattern < 0) {
        report("read: -s and -l choose what -P compares; give -P too");
        return false;
    }
    if (!transfer->has_pattern_length && transfer->pattern_offset <= transfer->length) {
        transfer->pattern_length = transfer->length - transfer->pattern_offset;
    }
    if (transfer->pattern_offset > transfer->length ||
        transfer->pattern_length > transfer->length - transfer->pattern_offset) {
        report("read: pattern verification range exceeds end of read data");
        return false;
    }
    return true;
}

static bool run_read(struct session *session, const struct command *command, int argc, char **argv)
{
    struct transfer transfer = {.pattern = -1};
    unsigned char *buffer;
    struct pcow_error error;
    bool match = true;
    double start;
    int r;

    if (!parse_read(command, session, argc, argv, &transfer)) {
        return false;
    }
    buffer = malloc(CHUNK_SIZE);
    if (!buffer) {
        report("out of memory");
        return false;
    }
    if (transfer.json) {
        printf("{\"offset\": %" PRIu64 ", \"length\": %" PRIu64 ", \"data\": \"", transfer.offset,
               transfer.length);
    }
    start = now();
    r = read_range(session, &transfer, buffer, &match, &error);
    free(buffer);
    if (transfer.json) {
        puts("\"}");
    }
    if (r) {
        return command_failed(command, &error);
    }
    if (!match) {
        printf("Pattern verification failed at offset %" PRIu64 ", %" PRIu64 " bytes\n",
               transfer.offset + transfer.pattern_offset, transfer.pattern_length);
    }
    print_report(&transfer, "read", now() - start);
    return match;
}

/* The content of a file, again and again, as qemu-io's write -s. */
static int fill_from_file(const char *path, unsigned char *buffer, size_t *period,
                          struct pcow_error *error)
{
    FILE *file = fopen(path, "re");
    size_t length = file ? fread(buffer, 1, CHUNK_SIZE, file) : 0;
    int code = errno;

    if (file) {
        fclose(file);
    }
    if (length == 0) {
        return fail(error, -EINVAL, "%s: %s", path, file ? "the file is empty" : strerror(code));
    }
    *period = length;
    return 0;
}

static int write_range(struct session *session, const struct transfer *transfer,
                       const unsigned char *buffer, size_t period, struct pcow_error *error)
{
    uint64_t done = 0;

    while (done < transfer->length) {
        uint64_t left = transfer->length - done;
        size_t piece = left < period ? (size_t)left : period;
        int r = session_write(session, transfer->offset + done, buffer, piece, error);

        if (r) {
            return r;
        }
        done += piece;
    }
    return 0;
}

static int do_write(struct session *session, const struct transfer *transfer,
                    struct pcow_error *error)
{
    unsigned char *buffer = malloc(CHUNK_SIZE);
    size_t period = CHUNK_SIZE;
    int r = buffer ? 0 : fail(error, -ENOMEM, "out of memory");

    if (!r && transfer->zero) {
        r = session_zero(session, transfer->offset, transfer->length, error);
    } else if (!r) {
        memset(buffer, transfer->pattern < 0 ? DEFAULT_PATTERN : transfer->pattern, CHUNK_SIZE);
        if (transfer->source_file) {
            r = fill_from_file(transfer->source_file, buffer, &period, error);
        }
        r = r ? r : write_range(session, transfer, buffer, period, error);
    }
    if (!r && transfer->flush) {
        r = session_flush(session, error);
    }
    free(buffer);
    return r;
}

/* Carry out what is parsed but for its range, and report its time. */
static bool run_timed(struct session *session, const struct command *command, char **operands,
                      struct transfer *transfer,
                      int (*operation)(struct session *, const struct transfer *,
                                       struct pcow_error *),
                      const char *verb)
{
    struct pcow_error error;
    double start;

    if (!parse_range(command, operands, session, transfer)) {
        return false;
    }
    start = now();
    if (operation(session, transfer, &error)) {
        return command_failed(command, &error);
    }
    print_report(transfer, verb, now() - start);
    return true;
}

static bool run_write(struct session *session, const struct command *command, int argc, char **argv)
{
    struct transfer transfer = {.pattern = -1};
    int letter;

    while ((letter = next_letter(command, argc, argv)) != -1) {
        switch (letter) {
        case 'C': transfer.machine = true; break;
        case 'q': transfer.quiet = true; break;
        case 'f': transfer.flush = true; break;
        case 'u':                              /* unmap: what -z does anyway */
        case 'z': transfer.zero = true; break;
        case 's': transfer.source_file = optarg; break;
        case 'P':
            if (!parse_pattern(optarg, &transfer.pattern)) {
                return false;
            }
            break;
        default: return false;
        }
    }
    if (transfer.zero + (transfer.pattern >= 0) + (transfer.source_file != NULL) > 1) {
        report("write: give only one of -z, -P and -s");
        return false;
    }
    return run_timed(session, command, argv + optind, &transfer, do_write, "wrote");
}

static int do_discard(struct session *session, const struct transfer *transfer,
                      struct pcow_error *error)
{
    return session_zero(session, transfer->offset, transfer->length, error);
}

static bool run_discard(struct session *session, const struct command *command, int argc,
                        char **argv)
{
    struct transfer transfer = {.pattern = -1};
    int letter;

    while ((letter = next_letter(command, argc, argv)) != -1) {
        switch (letter) {
        case 'C': transfer.machine = true; break;
        case 'q': transfer.quiet = true; break;
        default: return false;
        }
    }
    return run_timed(session, command, argv + optind, &transfer, do_discard, "discard");
}

static bool run_flush(struct session *session, const struct command *command, int argc, char **argv)
{
    struct pcow_error error;

    (void)argc;
    (void)argv;
    return session_flush(session, &error) ? command_failed(command, &error) : true;
}

const struct command transfer_commands[] = {
    {"read", "r", "[-Cjqv] [-P PATTERN [-s OFFSET] [-l LENGTH]] OFFSET LENGTH",
     "load a range; -P: compare it (or LENGTH bytes from OFFSET of it) with a byte, -v: dump it, "
     "-C: machine-readable report, "
     "-q: no report; -j: as JSON, data in hexadecimal",
     ":CjqvP:s:l:", 2, 2, run_read},
    {"write", "w", "[-Cfquz] [-P PATTERN | -s FILE] OFFSET LENGTH",
     "store a byte (default 0xcd), or the content of FILE again and again; -z: give the range "
     "back, -f: flush after it",
     ":CfquzP:s:", 2, 2, run_write},
    {"discard", "d", "[-Cq] OFFSET LENGTH", "give a range back; it reads as zeros", ":Cq", 2, 2,
     run_discard},
    {"flush", "f", "", "make what was written durable", NULL, 0, 0, run_flush},
    {0},
};
