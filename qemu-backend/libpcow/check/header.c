/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The header, its copy, and the record of the base. The header is newer than the copy word by word;
 * the copy is for damage.
 */
#include "check/check.h"

#include <errno.h>
#include <string.h>

#include "util/error.h"

#define FIXED_SIZE offsetof(struct header, active_layer)
/*
 * Added to a generation that is known from the copy only: more writers than can have come since the
 * copy was made.
 */
#define GENERATION_GAP (UINT64_C(1) << 20)

static const struct {
    const char *name;
    size_t offset;
    uint64_t least, most;
} header_word[] = {
    {"active_layer", offsetof(struct header, active_layer), 1, MAX_LAYER_ID},
    {"next_layer_id", offsetof(struct header, next_layer_id), 2, MAX_LAYER_ID + 1},
    {"layer_slots", offsetof(struct header, layer_slots), 1, MAX_LAYERS},
    {"generation", offsetof(struct header, generation), 1, WORD_VALUE_MASK - 2 * GENERATION_GAP},
    {"base_slot", offsetof(struct header, base_slot), 0, 2},
    {"state", offsetof(struct header, state), 0, WORD_VALUE_MASK},
    {"summed", offsetof(struct header, summed), 0, WORD_VALUE_MASK},
};

#define HEADER_WORDS (sizeof header_word / sizeof header_word[0])
#define NEVER_ZERO 4u                  /* the first ones */

static uint64_t get_word(const struct header *header, unsigned i)
{
    uint64_t word;

    memcpy(&word, (const char *)header + header_word[i].offset, sizeof word);
    return word;
}

static bool word_is_good(const struct header *header, unsigned i)
{
    uint64_t word = get_word(header, i), value = word_value(word);

    return word_is_valid(word) && value >= header_word[i].least && value <= header_word[i].most;
}

/* Of the words that cannot be 0. */
static unsigned count_good(const struct header *header)
{
    unsigned count = 0;

    for (unsigned i = 0; i < NEVER_ZERO; i++)
        count += word_is_good(header, i);
    return count;
}

bool header_fixed_is_good(const struct header *header)
{
    struct header fixed = *header;

    /* The words are looked at one by one: here they shall not matter. */
    memset((char *)&fixed + FIXED_SIZE, 0, sizeof fixed - FIXED_SIZE);
    return header_validate(&fixed, "", NULL) == 0;
}

static int refuse(struct check *check, const struct header *header, const struct header *copy)
{
    const char *path = check->file.path;
    struct pcow_error why;
    int ret = header_validate(header, path, &why);

    if (ret == -ENOTSUP || (ret = header_validate(copy, path, &why)) == -ENOTSUP)
        return error_set(check->error, ret, "%s", why.message);
    return error_set(check->error, -EMEDIUMTYPE,
                     "%s is not a pcow image: neither its header nor the copy of it can be used; "
                     "give the right file, or restore it",
                     path);
}

/* ---- base_slot when neither the header nor the copy tells it --------------------------------- */

static bool record_is_usable(const struct base_record *record)
{
    return base_record_validate(record, "", NULL) == 0;
}

static bool record_is_empty(const struct base_record *record)
{
    static const struct base_record empty;

    return memcmp(record, &empty, sizeof empty) == 0;
}

/* What the header or else its copy holds for this slot; NULL: nothing that can be used. */
static const struct base_record *find_record(const struct check *check, const struct header *copy,
                                             bool copy_is_good, unsigned slot)
{
    if (record_is_usable(&check->header.base[slot]))
        return &check->header.base[slot];
    return copy_is_good && record_is_usable(&copy->base[slot]) ? &copy->base[slot] : NULL;
}

/*
 * Which of the two records counts. Never 0 when one holds anything: that would turn what the base
 * holds into zeros, and nobody would be told. Where only the user can know, the record that is
 * named gets a wrong checksum, so that open() asks for the base.
 */
static int find_base_slot(struct check *check, const struct header *copy, bool copy_is_good)
{
    const struct base_record *record[2];
    bool empty = true;
    uint64_t slot = 1;
    int ret = 0;

    for (unsigned i = 0; i < 2; i++) {
        record[i] = find_record(check, copy, copy_is_good, i);
        if (!record_is_empty(&check->header.base[i])
            || (copy_is_good && !record_is_empty(&copy->base[i]))) {
            slot = empty ? i + 1 : slot;
            empty = false;
        }
    }
    if (empty) {
        check_corruption(
            check, true,
            "the word base_slot of the header and its copy are damaged; no base was ever set");
        return check_set_header_word(check, offsetof(struct header, base_slot), 0);
    }
    if (record[0] && record[1]) {
        check_corruption(
            check, false,
            "the word base_slot of the header and its copy are damaged; the base was '%s' or '%s', "
            "or had been "
            "taken off: say which with pcow-img rebase -u -b BASE, compared with a backup",
            record[0]->name, record[1]->name);
        check->header.base[0].crc = ~base_record_crc(&check->header.base[0]);
        ret = check_store(check, offsetof(struct header, base), &check->header.base[0],
                          sizeof check->header.base[0]);
    } else if (record[0] || record[1]) {
        slot = record[0] ? 1 : 2;
        check_corruption(
            check, true,
            "the word base_slot of the header and its copy are damaged; the only record of a base "
            "names '%s', which is "
            "taken. If the base had been taken off since, say so with pcow-img rebase -u -b ''",
            record[slot - 1]->name);
        if (memcmp(&check->header.base[slot - 1], record[slot - 1], sizeof *record[0])) {
            check->header.base[slot - 1] = *record[slot - 1];
            ret = check_store(check, offsetof(struct header, base) + (slot - 1) * sizeof *record[0],
                              record[slot - 1], sizeof *record[0]);
        }
    } else {
        check_corruption(
            check, true,
            "the word base_slot of the header and its copy are damaged; there was a base");
    }
    return ret ? ret : check_set_header_word(check, offsetof(struct header, base_slot), slot);
}

static int check_words(struct check *check, const struct header *copy, bool copy_is_good,
                       bool all_from_copy)
{
    for (unsigned i = 0; i < HEADER_WORDS; i++) {
        size_t offset = header_word[i].offset;
        bool from_copy = copy_is_good && count_good(copy) > 0 && word_is_good(copy, i);
        uint64_t value;
        int ret;

        if (word_is_good(&check->header, i) && !all_from_copy)
            continue;
        if (offset == offsetof(struct header, base_slot) && !from_copy) {
            ret = find_base_slot(check, copy, copy_is_good);
            if (ret)
                return ret;
            continue;
        }
        /*
         * Lost in both places: later steps raise the ids and the slots as far as what they find
         * needs it.
         */
        value = from_copy ? word_value(get_word(copy, i)) : header_word[i].least;
        if (offset == offsetof(struct header, generation))
            value += GENERATION_GAP;
        if (offset == offsetof(struct header, next_layer_id))
            check->ids_uncertain = true;
        if (offset == offsetof(struct header, layer_slots))
            check->slots_uncertain = true;
        check_corruption(check, true, "the word %s of the header is damaged; its copy %s",
                         header_word[i].name,
                         from_copy ? "can be used" : "is damaged too, so it is worked out again");
        ret = check_set_header_word(check, offset, value);
        if (ret)
            return ret;
    }
    return 0;
}

/*
 * 0 is a word that says something, and what is left of one that is lost. Who takes the base off
 * stores it to the copy first: so where the copy names a base there is one.
 */
static int check_no_base(struct check *check, const struct header *copy)
{
    uint64_t slot = word_value(copy->base_slot);

    if (!word_is_valid(copy->base_slot) || slot == 0 || slot > 2
        || !record_is_usable(&check->header.base[slot - 1]) || check_is_proven(check, 0))
        return 0;
    check_corruption(check, true,
                     "the word base_slot of the header is 0, as if there were no base; its copy "
                     "names '%s'",
                     check->header.base[slot - 1].name);
    return check_set_header_word(check, offsetof(struct header, base_slot), slot);
}

static int check_base(struct check *check, const struct header *copy, bool copy_is_good)
{
    uint64_t slot = word_value(check->header.base_slot);
    struct base_record *record;
    struct pcow_error why;

    if (slot == 0)
        return copy_is_good ? check_no_base(check, copy) : 0;
    record = &check->header.base[slot - 1];
    if (base_record_validate(record, check->file.path, &why) == 0)
        return 0;
    if (copy_is_good && copy->base_slot == check->header.base_slot
        && base_record_validate(&copy->base[slot - 1], "", NULL) == 0) {
        check_corruption(check, true, "the record of the base is damaged; its copy names '%s'",
                         copy->base[slot - 1].name);
        *record = copy->base[slot - 1];
        return check_store(check, offsetof(struct header, base) + (slot - 1) * sizeof *record,
                           record, sizeof *record);
    }
    /*
     * To stand on nothing would silently turn the base's data into zeros: only the user knows which
     * file it was.
     */
    check_corruption(check, false, "%s; check cannot know which file it was", why.message);
    return 0;
}

int check_header(struct check *check)
{
    struct header copy;
    bool good, copy_is_good, all_from_copy;
    uint64_t read_only;
    int ret = check_read(check, 0, &check->header, sizeof check->header);

    if (!ret)
        ret = check_read(check, HEADER_COPY_OFFSET, &copy, sizeof copy);
    if (ret)
        return ret;
    good = header_fixed_is_good(&check->header);
    copy_is_good = header_fixed_is_good(&copy);
    if (!good && !copy_is_good)
        return refuse(check, &check->header, &copy);
    if (!good && check->header.crc == header_crc(&check->header)
        && header_validate(&check->header, check->file.path, check->error) == -ENOTSUP)
        return -ENOTSUP;
    read_only =
        good ? check->header.read_only_compatible_features : copy.read_only_compatible_features;
    if (check->intended && read_only & ~FEATURES_KNOWN)
        return error_set(check->error, -ENOTSUP,
                         "%s uses features (0x%llx) that this program can read but not repair; "
                         "use a newer pcow",
                         check->file.path, (unsigned long long)read_only);
    /*
     * A header that was wiped has words that look right (0): if those that cannot be 0 are gone,
     * all are.
     */
    all_from_copy = count_good(&check->header) < (good ? 1 : NEVER_ZERO);
    if (!good) {
        check_corruption(check, true,
                         "the fixed part of the header is damaged; its copy can be used");
        memcpy(&check->header, &copy, FIXED_SIZE);
        if (all_from_copy)
            memcpy(check->header.base, copy.base, sizeof copy.base);
        ret = check_store(check, 0, &copy, FIXED_SIZE);
        if (!ret && all_from_copy)
            ret = check_store(check, offsetof(struct header, base), copy.base, sizeof copy.base);
    } else if (check_is_amending(check)
               && (!copy_is_good
                   || memcmp(check->header.uuid, copy.uuid, sizeof copy.uuid) == 0)) {
        /* The copy gets the feature first, and a crash may have left half of that. */
        check_note(check, "giving it a mirror of its metadata was interrupted: pcow-img amend -o "
                          "mirror=on finishes it");
    } else if (copy_is_good && memcmp(&check->header, &copy, FIXED_SIZE)) {
        check_corruption(check, true, "the copy of the header belongs to another image");
        copy_is_good = false;
    } else if (!copy_is_good) {
        check_corruption(check, true,
                         "the copy of the header is damaged; the header itself is whole");
    }
    if (!ret)
        ret = check_words(check, &copy, copy_is_good, all_from_copy);
    for (unsigned i = 0; i < HEADER_WORDS && copy_is_good && good; i++)
        if (!word_is_valid(get_word(&copy, i)))
            check_corruption(
                check, true,
                "the word %s in the copy of the header is damaged; the header itself is whole",
                header_word[i].name);
    return ret ? ret : check_base(check, &copy, copy_is_good);
}

int check_header_copy(struct check *check)
{
    struct header copy;
    int ret;

    if (!check->repair)
        return 0;
    /*
     * A crash may have come between a change and its copy; bringing the copy up to date is no
     * finding.
     */
    ret = check_read(check, HEADER_COPY_OFFSET, &copy, sizeof copy);
    if (ret || memcmp(&copy, &check->header, sizeof copy) == 0)
        return ret;
    return check_store(check, HEADER_COPY_OFFSET, &check->header, sizeof check->header);
}
