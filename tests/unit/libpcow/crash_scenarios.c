/* SPDX-License-Identifier: BSD-3-Clause */
#include "crash_mapped.h"
#include "crash_steps.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "image/image.h"
#include "operations/operations.h"

#define OTHER_NAME "other.pcow"

/* ---- images to begin with -------------------------------------------------------------------- */

static void nothing(struct crash *c)
{
    (void)c;
}

static void some_pages(struct crash *c)
{
    step_put(c, 3, 6);
    step_put(c, 600, 20);
}

/*
 * The next slabs are so far from those that are there that no line or sector of the tables holds
 * words of both: these may reach the medium in any order.
 */
static void keep_apart(struct crash *c)
{
    uint64_t unused;

    for (unsigned i = 0; i < 8; i++)
        MUST(slab_take(c->image, &unused));
}

/* s1 - s2 - active, with pages that the younger ones hide and some that they do not. */
void crash_two_snapshots(struct crash *c)
{
    some_pages(c);
    step_snapshot(c, "s1");
    step_put(c, 5, 6);
    step_put(c, 700, 4);
    step_snapshot(c, "s2");
    keep_apart(c);
    step_put(c, 8, 6);
}

/* s1 with the branches s2 and s3 - active. */
static void two_branches(struct crash *c)
{
    crash_two_snapshots(c);
    step_revert(c, "s1");
    step_put(c, 4, 2);
    step_put(c, 900, 2);
    step_snapshot(c, "s3");
    step_put(c, 6, 1);
}

/* Space of the file that was in use once: what is in it must never be seen again. */
static void used_space(struct crash *c)
{
    step_put(c, 0, 64);
    step_put(c, 512, 64);
    step_snapshot(c, "s1");
    step_put(c, 0, 64);
    step_put(c, 512, 64);
    step_revert(c, "s1");
    step_delete(c, "s1");
}

void crash_on_a_base(struct crash *c)
{
    step_put(c, 4, 3);
    step_put(c, 610, 2);
}

static void copy_file(const char *from, const char *to)
{
    int in = open(from, O_RDONLY | O_CLOEXEC),
        out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    char bytes[4096];
    ssize_t length;

    assert_true(in >= 0 && out >= 0);
    while ((length = read(in, bytes, sizeof bytes)) > 0)
        assert_int_equal(write(out, bytes, (size_t)length), length);
    assert_int_equal(length, 0);
    close(in);
    close(out);
}

/*
 * Another base, which stays as it is: of what the present one holds it has a page that is the same,
 * one that is another, and not the rest; and pages that are in neither. States of the image may
 * stand on it, so it lies beside them as well.
 */
void crash_beside_another_base(struct crash *c)
{
    static const unsigned held[] = {103, 104, 5, 300, 1000};
    pcow_image *other = must_create(scratch(OTHER_NAME), CRASH_SIZE, 16 * KIB, NULL);
    uint64_t words[512];
    char copy[600];

    crash_on_a_base(c);
    for (unsigned i = 0; i < sizeof held / sizeof held[0]; i++) {
        page_fill(words, held[i], held[i] == 103 ? c->now.active.page[103].generation[0] : 900);
        MUST(pcow_write(other, (uint64_t)held[i] * 4096, words, sizeof words, &error));
    }
    pcow_close(other);
    snprintf(copy, sizeof copy, "%s/%s", c->states, OTHER_NAME);
    copy_file(scratch(OTHER_NAME), copy);
}

/* ---- scenarios ------------------------------------------------------------------------------- */

static void first_touch(struct crash *c)
{
    step_put(c, 10, 2);
    step_put(c, 520, 1);
    step_flush(c);
    step_put(c, 10, 1);
    step_put(c, 14, 3);
    step_flush(c);
    step_put(c, 1000, 2);
}

static void copy_on_write(struct crash *c)
{
    step_put(c, 4, 1);
    step_put(c, 601, 3);
    step_flush(c);
    step_put(c, 4, 4);
    step_put(c, 30, 1);
    step_flush(c);
}

static void create_snapshots(struct crash *c)
{
    step_put(c, 20, 1);
    step_snapshot(c, "a");
    step_put(c, 3, 1);
    step_put(c, 900, 1);
    step_snapshot(c, "b");
    step_snapshot(c, "c");
    step_put(c, 3, 1);
    step_flush(c);
}

static void revert_to_snapshots(struct crash *c)
{
    step_revert(c, "s2");
    step_put(c, 3, 2);
    step_revert(c, "s1");
    step_put(c, 800, 2);
    step_snapshot(c, "a");
    step_flush(c);
    step_revert(c, "s2");
    step_revert(c, "s2");
}

static void revert_to_base(struct crash *c)
{
    step_revert_to_base(c);
    step_put(c, 4, 2);
    step_revert_to_base(c);
    step_put(c, 800, 2);
    step_snapshot(c, "a");
    step_put(c, 4, 1);
    step_flush(c);
    step_delete(c, "a");
    step_revert_to_base(c);
}

static void delete_the_first(struct crash *c)
{
    step_delete(c, "s1");
    step_put(c, 1010, 2);
    step_flush(c);
    step_delete(c, "s2");
}

static void delete_in_the_middle(struct crash *c)
{
    step_delete(c, "s2");
    step_put(c, 3, 1);
    step_snapshot(c, "s2");
    step_delete(c, "s1");
    step_flush(c);
}

/* A layer with two children stays hidden until one of them goes. */
static void delete_branches(struct crash *c)
{
    step_delete(c, "s1");
    step_delete(c, "s2");
    step_put(c, 1000, 1);
    step_delete(c, "s3");
    step_flush(c);
}

static void rename_snapshots(struct crash *c)
{
    step_rename(c, "s1", "x");
    step_rename(c, "s2", "s1");
    step_rename(c, "x", "y");
    step_snapshot(c, "z");
    step_delete(c, "y");
}

static void grow(struct crash *c)
{
    step_resize(c, 6 * MIB);
    step_put(c, 1200, 2);
    step_flush(c);
    step_snapshot(c, "a");
}

static void shrink_and_grow(struct crash *c)
{
    step_resize(c, 2 * MIB);
    step_put(c, 40, 1);
    step_flush(c);
    step_resize(c, 6 * MIB);
    step_put(c, 601, 1);
    step_flush(c);
}

static void write_zeroes(struct crash *c)
{
    step_zero(c, 8, 3);
    step_zero(c, 600, 2);
    step_flush(c);
    step_put(c, 9, 1);
    step_zero(c, 3, 10);
    step_flush(c);
    step_zero(c, 40, 20);
    step_flush(c);
}

static void keep_state(struct crash *c)
{
    step_vm_state(c, "s1", 40 * KIB);
    step_vm_state(c, "s2", 2 * MIB + 8 * KIB);
    step_put(c, 20, 1);
    step_delete(c, "s1");
    step_delete(c, "s2");
}

static void reuse(struct crash *c)
{
    step_put(c, 5, 1);
    step_put(c, 530, 1);
    step_flush(c);
    step_put(c, 1, 1);
    step_snapshot(c, "a");
    step_put(c, 1, 4);
    step_flush(c);
    step_revert(c, "a");
    step_put(c, 530, 1);
    step_flush(c);
}

/*
 * Dropped blocks that stay in the file for a while: some are given back, some are taken again
 * before they could be.
 */
static void leave_and_reclaim(struct crash *c)
{
    step_put(c, 300, 3);
    step_flush(c);
    step_revert(c, "s2");
    step_put(c, 301, 1);
    step_reclaim(c);
    step_delete(c, "s1");
    step_reclaim(c);
    step_revert(c, "s2");
    step_put(c, 760, 2);
    step_flush(c);
    step_delete(c, "s2");
    step_reclaim(c);
}

static void seal(struct crash *c)
{
    step_put(c, 30, 1);
    /* It flushes first. */
    if (c->persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        step_flush(c);
    OPERATION(c, c->now.sealed = true, pcow_seal(c->image, &error));
    pcow_close(c->image);
    OPERATION(c, c->now.sealed = false, image_unseal(c->top, &c->recorder.observer, &error));
    MUST(image_open(c->top, PCOW_OPEN_WRITE, NULL, &c->recorder.observer, &c->image, &error));
    step_put(c, 30, 1);
}

/* What lies where the mirror is to be is moved. */
static void without_mirror(struct crash *c)
{
    pcow_close(c->image);
    unlink(c->top);
    c->image = must_create_without_mirror(c->top, CRASH_SIZE);
    crash_two_snapshots(c);
}

/* Nothing that the guest reads changes, nor does the generation. */
static void amend(struct crash *c)
{
    pcow_close(c->image);
    c->now.amending = true;
    step_expect(c, NULL);
    MUST(image_add_mirror(c->top, &c->recorder.observer, &error));
    c->now.amending = false;
    step_expect(c, NULL);
    MUST(image_open(c->top, PCOW_OPEN_WRITE, NULL, &c->recorder.observer, &c->image, &error));
    step_put(c, 30, 1);
}

/* It flushes first. */
static void make_checksums(struct crash *c)
{
    if (c->persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        step_flush(c);
    OPERATION(c, (void)0,
              pcow_checksum(c->image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
}

static void with_checksums(struct crash *c)
{
    crash_two_snapshots(c);
    MUST(pcow_checksum(c->image, NULL, PCOW_CHECKSUM_ACTIVE, NULL, NULL, NULL, &error));
}

static void checksums(struct crash *c)
{
    step_put(c, 30, 1);
    make_checksums(c);
    step_put(c, 8, 2);
    step_flush(c);
    make_checksums(c);
}

/* Those of snapshots are made by another process, which the writer does not know of. */
static void make_checksums_beside(struct crash *c, const char *snapshot)
{
    pcow_image *reader;

    MUST(image_open(c->top, PCOW_OPEN_NO_BASE, snapshot, &c->recorder.observer, &reader, &error));
    MUST(pcow_checksum_beside_writer(reader, 0, NULL, NULL, NULL, &error));
    pcow_close(reader);
}

static void checksums_beside_writer(struct crash *c)
{
    make_checksums_beside(c, "s2");
    step_put(c, 30, 1);
    step_delete(c, "s1");
    step_put(c, 1010, 2);
    make_checksums_beside(c, "s2");
    step_revert(c, "s2");
    step_snapshot(c, "s3");
    step_delete(c, "s2");
    step_put(c, 8, 2);
    step_flush(c);
}

/* Whoever changes a slab drops its checksum first. */
static void change_with_checksums(struct crash *c)
{
    step_put(c, 8, 2);
    step_put(c, 31, 1);
    step_zero(c, 9, 1);
    step_flush(c);
}

static void delete_with_checksums(struct crash *c)
{
    step_delete(c, "s1");
    step_delete(c, "s2");
    step_put(c, 1010, 2);
    step_flush(c);
}

static void revert_with_checksums(struct crash *c)
{
    step_revert(c, "s1");
    step_put(c, 4, 1);
    step_put(c, 900, 1);
    step_flush(c);
}

static void write_over_base(struct crash *c)
{
    step_put(c, 100, 3);
    step_put(c, 4, 1);
    step_flush(c);
    step_snapshot(c, "a");
    step_put(c, 101, 1);
    step_flush(c);
}

/* Nothing that the guest reads changes; durable when it returns. */
static void rebase_to_nothing(struct crash *c)
{
    step_expect(c, NULL);
    MUST(pcow_rebase(c->image, NULL, NULL, false, NULL, NULL, &error));
    step_put(c, 4, 1);
    step_flush(c);
}

static void rebase_to_another(struct crash *c)
{
    step_expect(c, NULL);
    MUST(pcow_rebase(c->image, scratch(OTHER_NAME), NULL, false, NULL, NULL, &error));
    step_put(c, 4, 1);
    step_put(c, 300, 1);
    step_flush(c);
}

static void commit(struct crash *c)
{
    step_expect(c, NULL);
    MUST(pcow_commit(c->image, NULL, NULL, &error));
    /* From here on the base alone tells what there is. */
    c->now.base = c->now.active;
    c->now.has_base_view = true;
    step_expect(c, NULL);
    step_put(c, 4, 1);
    step_flush(c);
}

/*
 * What a crash between writing the record of a new layer and its commit point leaves: a record that
 * is not free, only dead.
 */
static void dead_record(struct crash *c)
{
    struct layer dead = {
        .parent = 2, .state = LAYER_OPEN, .virtual_size = CRASH_SIZE, .parent_limit = CRASH_SIZE};

    crash_two_snapshots(c);
    MUST(layer_reserve(c->image, false, false, &dead.id, &dead.slot, &error));
    MUST(layer_write_record(c->image, &dead, false, &error));
}

/* Any image may be in the middle of anything. */
void crash_go_on(struct crash *c)
{
    char first[16], second[16];

    snprintf(first, sizeof first, "a%u", c->generation);
    snprintf(second, sizeof second, "b%u", c->generation);
    step_put(c, 20, 1);
    /*
     * The record that it frees is used before the one that an interrupted operation may have left.
     */
    if (c->now.snapshots > 1)
        step_delete(c, c->now.saved[0].name);
    while (c->now.snapshots > 2)
        step_delete(c, c->now.saved[0].name);
    step_snapshot(c, first);
    step_put(c, 20, 1);
    step_snapshot(c, second);
    step_delete(c, c->now.saved[0].name);
    step_rename(c, second, "renamed");
    step_revert(c, "renamed");
    step_put(c, 21, 1);
    step_rename(c, "renamed", second);
}

void crash_prepare_base(struct crash *c)
{
    step_put(c, 3, 3);
    step_put(c, 100, 10);
    step_put(c, 600, 4);
}

const struct scenario scenarios[] = {
    {"first touch", nothing, first_touch},
    {"first touch, mapped", nothing, scenario_first_touch_mapped},
    {"mirror follows", crash_two_snapshots, scenario_mirror_follows},
    {"copy-on-write", crash_two_snapshots, copy_on_write},
    {"copy-on-write, mapped", crash_two_snapshots, scenario_copy_on_write_mapped},
    {"snapshot create", some_pages, create_snapshots},
    {"snapshot create, mapped", some_pages, scenario_create_mapped},
    {"snapshot create, in steps", some_pages, scenario_create_in_steps},
    {"snapshot create, abandoned", some_pages, scenario_abandon},
    {"revert", crash_two_snapshots, revert_to_snapshots},
    {"revert, mapped", crash_two_snapshots, scenario_revert_mapped},
    {"revert to nothing", some_pages, revert_to_base},
    {"revert to the base", crash_on_a_base, revert_to_base},
    {"delete the first", crash_two_snapshots, delete_the_first},
    {"delete in the middle", crash_two_snapshots, delete_in_the_middle},
    {"delete while copying", crash_two_snapshots, scenario_delete_while_copying},
    {"delete branches", two_branches, delete_branches},
    {"rename", crash_two_snapshots, rename_snapshots},
    {"grow", crash_two_snapshots, grow},
    {"shrink and grow", crash_two_snapshots, shrink_and_grow},
    {"write zeroes", crash_two_snapshots, write_zeroes},
    {"VM state", crash_two_snapshots, keep_state},
    {"reuse of space", used_space, reuse},
    {"reuse of space, mapped", used_space, scenario_reuse_mapped},
    {"left and reclaimed", crash_two_snapshots, leave_and_reclaim},
    {"left, mapped", crash_two_snapshots, scenario_leave_mapped},
    {"prepared slabs", nothing, scenario_prepared},
    {"prepared slabs, over snapshots", crash_two_snapshots, scenario_prepared},
    {"prepared slabs, reuse", used_space, scenario_prepared},
    {"last snapshot", some_pages, scenario_last_snapshot},
    {"last snapshot, reuse", used_space, scenario_last_snapshot},
    {"after a crash", dead_record, crash_go_on},
    {"seal", some_pages, seal},
    {"amend", without_mirror, amend},
    {"checksums", some_pages, checksums},
    {"checksums beside a writer", crash_two_snapshots, checksums_beside_writer},
    {"checksums, change", with_checksums, change_with_checksums},
    {"checksums, delete", with_checksums, delete_with_checksums},
    {"checksums, revert", with_checksums, revert_with_checksums},
    {"write over a base", crash_on_a_base, write_over_base},
    {"rebase", crash_on_a_base, rebase_to_nothing},
    {"rebase to another base", crash_beside_another_base, rebase_to_another},
    {"commit", crash_on_a_base, commit},
};
const size_t scenario_count = sizeof scenarios / sizeof scenarios[0];
