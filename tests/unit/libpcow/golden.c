/* SPDX-License-Identifier: BSD-3-Clause */
#include "golden.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORDS 512u

/* ---- files as text --------------------------------------------------------------------------- */

static void store_page(FILE *text, uint64_t offset, const uint64_t *words)
{
    fprintf(text, "@%" PRIx64, offset);
    for (unsigned i = 0, run; i < WORDS; i += run) {
        for (run = 1; i + run < WORDS && words[i + run] == words[i]; run++)
            ;
        fprintf(text, run > 1 ? " %" PRIx64 "*%u" : " %" PRIx64, words[i], run);
    }
    fputc('\n', text);
}

void golden_store(const char *path, FILE *text)
{
    static const uint64_t zeros[WORDS];
    uint64_t words[WORDS];
    int fd = open(path, O_RDONLY);
    struct stat st;
    off_t at = 0;

    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    fprintf(text, "length %" PRIu64 "\n", (uint64_t)st.st_size);
    while ((at = lseek(fd, at, SEEK_DATA)) >= 0) {
        memset(words, 0, sizeof words);
        at &= ~(off_t)4095;
        assert_true(pread(fd, words, sizeof words, at) > 0);
        if (memcmp(words, zeros, sizeof words))
            store_page(text, (uint64_t)at, words);
        at += 4096;
    }
    close(fd);
}

static void load_page(FILE *text, uint64_t words[WORDS])
{
    for (unsigned i = 0; i < WORDS;) {
        unsigned run = 1;
        uint64_t word;

        assert_int_equal(fscanf(text, "%" SCNx64, &word), 1);
        if (fscanf(text, "*%u", &run) != 1)
            run = 1;
        assert_true(run <= WORDS - i);
        while (run--)
            words[i++] = word;
    }
}

void golden_load(FILE *text, const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    uint64_t length, offset, words[WORDS];

    assert_true(fd >= 0);
    assert_int_equal(fscanf(text, "length %" SCNu64, &length), 1);
    assert_int_equal(ftruncate(fd, (off_t)length), 0);
    while (fscanf(text, " @%" SCNx64, &offset) == 1) {
        size_t piece = length - offset < sizeof words ? length - offset : sizeof words;

        load_page(text, words);
        assert_int_equal(pwrite(fd, words, piece, (off_t)offset), piece);
    }
    close(fd);
}

/* ---- what is in them ------------------------------------------------------------------------- */

/* Messages name files by their path; the directory is another each time. */
static void tell_message(FILE *out, const char *directory, const char *message)
{
    size_t length = strlen(directory);

    for (const char *at = message; *at;) {
        if (strncmp(at, directory, length) == 0 && at[length] == '/')
            at += length + 1;
        else
            fputc(*at++, out);
    }
    fputc('\n', out);
}

struct telling {
    FILE *out;
    const char *directory;
};

static void tell_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    static const char *const name[] = {"corruption", "leak", "note"};
    const struct telling *telling = opaque;

    fprintf(telling->out, "  %s: ", name[kind]);
    tell_message(telling->out, telling->directory, message);
}

static struct pcow_check_result tell_check(FILE *out, const char *directory, const char *path,
                                           unsigned flags, const char *what)
{
    static const char *const certainty[] = {"", "at most ", "about "};
    struct telling telling = {out, directory};
    struct pcow_check_result result;
    struct pcow_error error;

    fprintf(out, "%s:\n", what);
    if (flags & PCOW_CHECK_REPAIR)
        flags |= PCOW_CHECK_ACCEPT_LOSS;
    if (pcow_check(path, flags, tell_finding, &telling, &result, &error)) {
        fprintf(out, "  cannot be checked: ");
        tell_message(out, directory, error.message);
        memset(&result, 0, sizeof result);
        return result;
    }
    fprintf(out,
            "  %" PRIu64 " corruptions (%" PRIu64 " fixed), %" PRIu64 " leaks (%" PRIu64
            " fixed), %s%" PRIu64 " bytes in %" PRIu64 " ranges lost\n",
            result.corruptions, result.corruptions_fixed, result.leaks, result.leaks_fixed,
            certainty[result.lost_certainty], result.lost_size, result.losses);
    return result;
}

/* FNV-1a, 64 bits, by words. */
static uint64_t digest(pcow_image *image)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    uint64_t *words = malloc(PCOW_SLAB_SIZE);

    assert_non_null(words);
    for (uint64_t offset = 0; offset < pcow_size(image); offset += PCOW_SLAB_SIZE) {
        uint64_t piece =
            pcow_size(image) - offset < PCOW_SLAB_SIZE ? pcow_size(image) - offset : PCOW_SLAB_SIZE;

        MUST(pcow_read(image, offset, words, piece, &error));
        for (uint64_t i = 0; i < piece / 8; i++)
            hash = (hash ^ words[i]) * UINT64_C(0x100000001b3);
    }
    free(words);
    return hash;
}

static void tell_state(FILE *out, pcow_image *image, const struct pcow_snapshot *snapshot)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    uint8_t *bytes = malloc(snapshot->state_size);

    assert_non_null(bytes);
    fprintf(out, ", state %" PRIu64, snapshot->state_size);
    if (pcow_snapshot_read_state(image, snapshot->name, 0, bytes, snapshot->state_size, NULL)) {
        fprintf(out, ", not readable");
    } else {
        for (uint64_t i = 0; i < snapshot->state_size; i++)
            hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
        fprintf(out, ", digest %016" PRIx64, hash);
    }
    free(bytes);
}

static void tell_snapshot(FILE *out, pcow_image *image, const char *path,
                          const struct pcow_snapshot *snapshot)
{
    pcow_image *view;

    fprintf(out, "  snapshot %u '%s' on %u%s, %" PRIi64 ".%09u, ", snapshot->id, snapshot->name,
            snapshot->parent_id, snapshot->current ? ", current" : "", snapshot->date_seconds,
            snapshot->date_nanoseconds);
    MUST(pcow_open(path, 0, snapshot->name, &view, &error));
    fprintf(out, "%" PRIu64 " bytes, own %" PRIu64 ", digest %016" PRIx64, snapshot->virtual_size,
            snapshot->data_size, digest(view));
    pcow_close(view);
    if (snapshot->state_size)
        tell_state(out, image, snapshot);
    fputc('\n', out);
}

static void tell_image(FILE *out, const char *directory, const char *path, unsigned flags)
{
    struct pcow_snapshot *list;
    struct pcow_error why;
    struct pcow_info info;
    pcow_image *image;
    size_t count;

    if (pcow_open(path, flags, NULL, &image, &why)) {
        fprintf(out, "open:\n  ");
        tell_message(out, directory, why.message);
        return;
    }
    pcow_get_info(image, &info);
    fprintf(out, "image:\n  format %u, uuid ", info.format);
    for (unsigned i = 0; i < PCOW_UUID_SIZE; i++)
        fprintf(out, "%02x", info.uuid[i]);
    fprintf(out,
            ", %" PRIu64 " bytes, cluster %" PRIu64 ", generation %" PRIu64 "%s, chain of %u\n",
            info.virtual_size, info.cluster_size, info.generation, info.sealed ? ", sealed" : "",
            info.chain_depth);
    if (info.has_base)
        fprintf(out, "  base '%s' (format %u), snapshot '%s'\n", info.base_name, info.base_format,
                info.base_snapshot);
    fprintf(out, "  active: own %" PRIu64 ", digest %016" PRIx64 "\n", info.data_size,
            digest(image));
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    for (size_t i = 0; i < count; i++)
        tell_snapshot(out, image, path, &list[i]);
    free(list);
    pcow_close(image);
}

/* ---- used ------------------------------------------------------------------------------------ */

static void copy(const char *from, const char *to)
{
    FILE *text = tmpfile();

    assert_non_null(text);
    golden_store(from, text);
    rewind(text);
    unlink(to);
    golden_load(text, to);
    fclose(text);
}

/* A writer can do everything with it, and takes everything back. */
static void use(FILE *out, const char *directory, const char *path)
{
    struct pcow_error why;
    uint8_t page[4096];
    pcow_image *image;

    if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, &why)) {
        fprintf(out, "  not for writing: ");
        tell_message(out, directory, why.message);
        return;
    }
    memset(page, 0x5a, sizeof page);
    MUST(pcow_snapshot_create(image, "by the test", &error));
    MUST(pcow_write(image, 8192, page, sizeof page, &error));
    MUST(pcow_write(image, pcow_size(image) - 4096, page, sizeof page, &error));
    MUST(pcow_flush(image, &error));
    MUST(pcow_snapshot_revert(image, "by the test", &error));
    MUST(pcow_snapshot_delete(image, "by the test", NULL, &error));
    pcow_close(image);
}

void golden_describe(const char *directory, const char *name, FILE *out)
{
    bool format_1 = strncmp(name, "v1", 2) == 0;
    char path[1024], writable[1024];
    struct pcow_check_result result = {0};

    snprintf(path, sizeof path, "%s/%s.pcow", directory, name);
    snprintf(writable, sizeof writable, "%s/%s-copy.pcow", directory, name);
    if (!format_1)
        result = tell_check(out, directory, path, 0, "check");
    tell_image(out, directory, path, format_1 ? PCOW_OPEN_FORMAT_1 : 0);
    if (format_1)
        return;
    copy(path, writable);
    if (result.corruptions || result.leaks) {
        tell_check(out, directory, writable, PCOW_CHECK_REPAIR, "repair");
        tell_image(out, directory, writable, 0);
    }
    fprintf(out, "after use:\n");
    use(out, directory, writable);
    tell_check(out, directory, writable, 0, "check");
    tell_image(out, directory, writable, 0);
}
