/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How the images in golden/ were made. Not run by the tests: what they check is that files of the
 * past keep opening. To add one, add it to the lists below and run
 *
 *     make_golden FOLDER NAME...
 *
 * which writes NAME.image and NAME.txt into the folder (without names: all, with new uuids and
 * dates). Read NAME.txt before it is kept.
 */
#include "check_support.h"
#include "golden.h"

#define WORD(field) offsetof(struct header, field)
#define FIELD(slot, field) record_offset(slot, offsetof(struct layer_record, field))
#define SMALL (4 * MIB)

static const char *folder;
static char **wanted;

/* A page with one word over and over: its number and which write it was. */
static void page(pcow_image *image, unsigned number, unsigned count, uint64_t write)
{
    uint64_t words[512];

    for (unsigned i = 0; i < count; i++) {
        for (unsigned w = 0; w < 512; w++)
            words[w] = (uint64_t)(number + i) << 32 | write;
        MUST(pcow_write(image, (number + i) * UINT64_C(4096), words, sizeof words, &error));
    }
}

static void state_of(pcow_image *image, const char *name, size_t size)
{
    uint8_t *bytes = malloc(size);

    assert_non_null(bytes);
    memset(bytes, 0x77, size);
    MUST(pcow_snapshot_write_state(image, name, 0, bytes, size, &error));
    MUST(pcow_snapshot_set_state_size(image, name, size, &error));
    free(bytes);
}

static pcow_image *small(const char *base)
{
    unlink(IMAGE);
    return must_create(IMAGE, SMALL, 0, base);
}

/* ---- healthy --------------------------------------------------------------------------------- */

static void make_plain(void)
{
    pcow_image *image = small(NULL);

    page(image, 3, 3, 1);
    page(image, 1023, 1, 2);
    MUST(pcow_write_zeroes(image, 4 * 4096, 4096, &error));
    pcow_close(image);
}

static void make_resized(void)
{
    pcow_image *image;

    unlink(IMAGE);
    image = must_create(IMAGE, 8 * MIB, 4 * KIB, NULL);
    page(image, 1, 1, 1);
    page(image, 1500, 2, 1);
    MUST(pcow_snapshot_create(image, "large", &error));
    MUST(pcow_resize(image, 4 * MIB, true, &error));
    MUST(pcow_resize(image, 6 * MIB, false, &error));
    page(image, 1200, 1, 2);
    pcow_close(image);
}

/* Snapshots 1 (s1) - 2 (s2) - active 3; VM state of s1 in two pieces. */
static void make_three_layers(void)
{
    pcow_image *image = small(NULL);

    page(image, 3, 3, 1);
    page(image, 600, 2, 1);
    MUST(pcow_snapshot_create(image, "s1", &error));
    page(image, 4, 1, 2);
    page(image, 700, 1, 2);
    MUST(pcow_snapshot_create(image, "s2", &error));
    page(image, 5, 1, 3);
    page(image, 9, 1, 3);
    state_of(image, "s1", PCOW_SLAB_SIZE + 5000);
    pcow_close(image);
}

static void make_tree(void)
{
    pcow_image *image;

    make_three_layers();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_create(image, "s3", &error));
    MUST(pcow_snapshot_revert(image, "s1", &error));
    page(image, 600, 1, 4);
    MUST(pcow_snapshot_create(image, "branch", &error));
    page(image, 10, 1, 5);
    MUST(pcow_snapshot_rename(image, "branch", "Zweig \xc3\xbc", &error));
    MUST(pcow_snapshot_delete(image, "s2", NULL, &error));
    pcow_close(image);
}

/* A deleted snapshot on which two branches stand. */
static void make_hidden_layer(void)
{
    pcow_image *image;

    make_tree();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(image, "s1", NULL, &error));
    pcow_close(image);
}

/* The base is the golden image of that name, which must be made in the same run. */
static void make_on(const char *name)
{
    char base[512];
    pcow_image *image;

    snprintf(base, sizeof base, "%s/%s.pcow", scratch_directory(), name);
    if (access(base, F_OK))
        fail_msg("make %s, and all images that stand on it, together", name);
    image = small(base);
    page(image, 3, 1, 7);
    page(image, 800, 1, 7);
    pcow_close(image);
}

static void make_overlay(void)
{
    make_on("v2-plain");
}

static void make_overlay_on_format_1(void)
{
    make_on("v1-snapshot");
}

static void make_sealed(void)
{
    pcow_image *image;

    make_three_layers();
    image = must_open(IMAGE, PCOW_OPEN_WRITE);
    MUST(pcow_seal(image, &error));
    pcow_close(image);
}

static void make_create_interrupted(void)
{
    make_three_layers();
    poke_word(FIELD(1, state), word_value(layer_state_word(2, LAYER_OPEN, 0, 0)));
}

/*
 * One segment of clusters of 4 KiB: two whole ones and one of which page 0 was copied; then a
 * snapshot that hides the first.
 */
static void make_format_1(void)
{
    static uint8_t file[8 * 4096];
    int fd;

    for (unsigned super = 0; super <= 5; super += 5) {
        uint32_t *head = (uint32_t *)(void *)(file + super * 4096), *meta = head + 1024,
                 clusters = super ? 1 : 3;

        head[0] = 4096;
        head[1] = 600;
        memcpy(head + 3, "NBJL", 4);
        meta[0] = clusters;
        for (uint32_t i = 0; i < clusters; i++) {
            meta[16 + i * 2] = i * 300 % 599;
            meta[17 + i * 2] = i == 2;
        }
    }
    memset(file + 2 * 4096, 1, 3 * 4096);
    memset(file + 7 * 4096, 2, 4096);
    unlink(IMAGE);
    fd = open(IMAGE, O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, file, sizeof file), sizeof file);
    close(fd);
}

/* ---- damaged --------------------------------------------------------------------------------- */

static void set_length(uint64_t length)
{
    assert_int_equal(truncate(IMAGE, (off_t)length), 0);
}

static uint64_t last_slab(enum owner_kind kind)
{
    uint64_t last = 0;

    for (uint64_t slab = 1; slab < 64; slab++) {
        uint64_t word;

        peek(owner_offset(slab), &word, sizeof word);
        if (word && owner_decode(word).kind == kind)
            last = slab;
    }
    return last;
}

static void poke_owner(uint64_t slab, struct owner owner)
{
    uint64_t word = owner_encode(owner);

    poke(owner_offset(slab), &word, sizeof word);
}

static void copy_record(uint32_t from, uint32_t to, uint64_t state, const char *name)
{
    struct layer_record record;

    peek(record_offset(from, 0), &record, sizeof record);
    record.state = state;
    if (name) {
        memset(record.name, 0, sizeof record.name);
        strcpy(record.name, name);
        record.crc = layer_record_crc(&record);
    }
    poke(record_offset(to, 0), &record, sizeof record);
    poke_word(WORD(layer_slots), to + 1);
}

#define DAMAGE(name, ...)          \
    static void name(void)         \
    {                              \
        make_three_layers();       \
        __VA_ARGS__;               \
    }

DAMAGE(length_odd, set_length(64 * PCOW_SLAB_SIZE + 1000))
DAMAGE(cut_in_data, set_length((find_slab(OWNER_DATA, 1, 1) << SLAB_BITS) + 89 * 4096))
DAMAGE(cut_before_data, set_length(last_slab(OWNER_DATA) << SLAB_BITS))
DAMAGE(cut_in_vm_state, set_length((last_slab(OWNER_STATE) << SLAB_BITS) + 4096))
DAMAGE(owner_damaged, flip(owner_offset(find_slab(OWNER_DATA, 2, 1)) + 3, 0x42))
DAMAGE(owner_impossible, poke_owner(20, (struct owner){OWNER_DATA, 1, MAX_GUEST_SLABS}))
DAMAGE(owner_unknown, poke_owner(20, (struct owner){OWNER_DATA, 1000, 1}))
DAMAGE(pages_twice, poke_owner(20, (struct owner){OWNER_DATA, 2, 1}); {
    struct page_set valid;

    peek(bitmap_offset(find_slab(OWNER_DATA, 2, 1)), &valid, sizeof valid);
    poke(bitmap_offset(20), &valid, sizeof valid);
    uint64_t word = 0xdead;

    poke((UINT64_C(20) << SLAB_BITS) + 188 * 4096, &word, sizeof word);
})
DAMAGE(vm_state_not_whole, poke_word(FIELD(0, state_size), 3 * PCOW_SLAB_SIZE))
DAMAGE(vm_state_behind_its_end, poke_word(FIELD(0, state_size), 5000))
DAMAGE(vm_state_twice, poke_owner(20, (struct owner){OWNER_STATE, 1, 0}))
DAMAGE(blocks_without_owner, poke(UINT64_C(20) << SLAB_BITS, "data", 4))
DAMAGE(slab_of_the_dead, copy_record(0, 3, layer_state_word(4, LAYER_FREE, 0, 0), NULL);
       poke_word(WORD(next_layer_id), 5); poke_owner(20, (struct owner){OWNER_DATA, 4, 0}))
DAMAGE(header_word, flip(WORD(active_layer) + 7, 1))
DAMAGE(header_fixed, flip(WORD(cluster_bits), 4))
DAMAGE(header_copy, flip(HEADER_COPY_OFFSET + WORD(uuid), 4))
DAMAGE(header_copy_word, flip(HEADER_COPY_OFFSET + WORD(generation), 4))
DAMAGE(header_copy_foreign, {
    struct header header;

    peek(0, &header, sizeof header);
    header.uuid[3] ^= 1;
    header.crc = header_crc(&header);
    poke(HEADER_COPY_OFFSET, &header, sizeof header);
})
DAMAGE(header_lost, flip(0, 1); flip(HEADER_COPY_OFFSET, 1))
DAMAGE(record_state, flip(FIELD(0, state) + 7, 1))
DAMAGE(record_of_nobody, flip(FIELD(1, state) + 7, 1); flip(FIELD(0, state) + 7, 1))
DAMAGE(record_wiped, {
    static const char zeros[LAYER_RECORD_SIZE];
    poke(record_offset(0, 0), zeros, sizeof zeros);
})
DAMAGE(record_of_active_wiped, {
    static const char zeros[LAYER_RECORD_SIZE];
    poke(record_offset(2, 0), zeros, sizeof zeros);
})
DAMAGE(record_parent, flip(FIELD(1, parent) + 7, 1))
DAMAGE(record_size, flip(FIELD(1, virtual_size) + 7, 1))
DAMAGE(record_limit, flip(FIELD(1, parent_limit) + 7, 1))
DAMAGE(record_state_size, flip(FIELD(0, state_size) + 7, 1))
DAMAGE(record_name, flip(FIELD(0, name), 1))
DAMAGE(names_twice, copy_record(1, 1, layer_state_word(2, LAYER_SNAPSHOT, 0, 0), "s1");
       poke_word(WORD(layer_slots), 3))
DAMAGE(records_twice, copy_record(0, 3, layer_state_word(1, LAYER_SNAPSHOT, 0, 0), "other"))
DAMAGE(rename_interrupted, copy_record(0, 3, layer_state_word(1, LAYER_SNAPSHOT, 0, 1), "renamed"))
DAMAGE(free_record, copy_record(0, 3, layer_state_word(4, LAYER_FREE, 0, 0), NULL);
       poke_word(WORD(next_layer_id), 5); flip(FIELD(3, parent_limit) + 7, 1))
DAMAGE(dead_record, copy_record(0, 3, layer_state_word(4, LAYER_OPEN, 0, 0), NULL);
       poke_word(WORD(next_layer_id), 5); flip(FIELD(3, virtual_size) + 7, 1))
DAMAGE(parent_deleted,
       poke_word(FIELD(1, state), word_value(layer_state_word(2, LAYER_FREE, 0, 0))))
DAMAGE(active_is_a_snapshot, poke_word(WORD(active_layer), 1))
DAMAGE(active_unknown, poke_word(WORD(active_layer), 900))
DAMAGE(next_id_low, poke_word(WORD(next_layer_id), 2))
DAMAGE(slots_low, poke_word(WORD(layer_slots), 2))
DAMAGE(delete_interrupted, copy_record(0, 3, layer_state_word(4, LAYER_HIDDEN, 0, 0), "leaf");
       poke_word(FIELD(3, parent), 1); poke_word(FIELD(3, state_size), 0);
       poke_word(WORD(next_layer_id), 5))
DAMAGE(table_missing, poke_word(WORD(layer_slots), LAYER_TABLE_0_SLOTS + 1))
DAMAGE(table_twice, poke_owner(20, (struct owner){OWNER_TABLE, 0, 1});
       poke_owner(21, (struct owner){OWNER_TABLE, 0, 1}))
/*
 * A bit of a page bitmap that flips makes a legal image: a page less, or an older one in its place.
 * Nothing can tell.
 */
DAMAGE(bitmap_flipped, flip(bitmap_offset(find_slab(OWNER_DATA, 2, 0)), 0x10))

static void base_record_damaged(void)
{
    make_overlay();
    flip(WORD(base[0].name) + 2, 0x20);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*make)(void);
} images[] = {
    {"v1-snapshot", make_format_1},
    {"v2-plain", make_plain},
    {"v2-resized", make_resized},
    {"v2-three-layers", make_three_layers},
    {"v2-tree", make_tree},
    {"v2-hidden-layer", make_hidden_layer},
    {"v2-overlay", make_overlay},
    {"v2-overlay-on-v1", make_overlay_on_format_1},
    {"v2-sealed", make_sealed},
    {"v2-create-interrupted", make_create_interrupted},
    {"damaged-length", length_odd},
    {"damaged-cut-in-data", cut_in_data},
    {"damaged-cut-before-data", cut_before_data},
    {"damaged-cut-in-vm-state", cut_in_vm_state},
    {"damaged-owner", owner_damaged},
    {"damaged-owner-impossible", owner_impossible},
    {"damaged-owner-unknown", owner_unknown},
    {"damaged-pages-twice", pages_twice},
    {"damaged-vm-state-not-whole", vm_state_not_whole},
    {"damaged-vm-state-twice", vm_state_twice},
    {"damaged-header-word", header_word},
    {"damaged-header-fixed", header_fixed},
    {"damaged-header-copy", header_copy},
    {"damaged-header-copy-word", header_copy_word},
    {"damaged-header-copy-foreign", header_copy_foreign},
    {"damaged-header-lost", header_lost},
    {"damaged-base-record", base_record_damaged},
    {"damaged-record-state", record_state},
    {"damaged-record-of-nobody", record_of_nobody},
    {"damaged-record-wiped", record_wiped},
    {"damaged-record-of-active-wiped", record_of_active_wiped},
    {"damaged-record-parent", record_parent},
    {"damaged-record-size", record_size},
    {"damaged-record-limit", record_limit},
    {"damaged-record-state-size", record_state_size},
    {"damaged-record-name", record_name},
    {"damaged-names-twice", names_twice},
    {"damaged-records-twice", records_twice},
    {"damaged-free-record", free_record},
    {"damaged-dead-record", dead_record},
    {"damaged-parent-deleted", parent_deleted},
    {"damaged-active-is-a-snapshot", active_is_a_snapshot},
    {"damaged-active-unknown", active_unknown},
    {"damaged-next-id-low", next_id_low},
    {"damaged-slots-low", slots_low},
    {"damaged-table-missing", table_missing},
    {"damaged-table-twice", table_twice},
    {"damaged-bitmap-flipped", bitmap_flipped},
    {"leak-vm-state-behind-its-end", vm_state_behind_its_end},
    {"leak-blocks-without-owner", blocks_without_owner},
    {"leak-slab-of-the-dead", slab_of_the_dead},
    {"leak-rename-interrupted", rename_interrupted},
    {"leak-delete-interrupted", delete_interrupted},
};

static bool is_wanted(const char *name)
{
    for (char **want = wanted; *want; want++)
        if (strcmp(*want, name) == 0)
            return true;
    return !*wanted;
}

static FILE *create(const char *name, const char *suffix)
{
    char path[1024];
    FILE *file;

    snprintf(path, sizeof path, "%s/%s%s", folder, name, suffix);
    file = fopen(path, "w");
    if (!file)
        fail_msg("cannot write %s", path);
    return file;
}

static void make_all(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof images / sizeof images[0]; i++) {
        char path[512];
        FILE *file;

        if (!is_wanted(images[i].name))
            continue;
        images[i].make();
        snprintf(path, sizeof path, "%s/%s.pcow", scratch_directory(), images[i].name);
        assert_int_equal(rename(IMAGE, path), 0);
        file = create(images[i].name, ".image");
        golden_store(path, file);
        fclose(file);
        file = create(images[i].name, ".txt");
        golden_describe(scratch_directory(), images[i].name, file);
        fclose(file);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(make_all, scratch_setup, scratch_teardown),
    };

    if (argc < 2)
        return 2;
    folder = argv[1];
    wanted = argv + 2;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
