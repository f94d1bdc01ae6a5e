/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "chain/chain.h"
#include "chain/reclaim.h"
#include "check/check.h"
#include "format1/format1.h"
#include "image/datasum.h"
#include "image/known.h"
#include "image/lock.h"
#include "image/mirror.h"
#include "operations/operations.h"
#include "snapshot/change.h"
#include "snapshot/tree.h"
#include "util/error.h"

static int load_header(struct pcow_image *image, struct pcow_error *error)
{
    const char *path = image->file.path;
    const struct base_record *record;
    int ret = file_read(&image->file, 0, &image->header, sizeof image->header);

    if (ret == -ENODATA)
        return error_set(error, -EMEDIUMTYPE, "%s is too short to be a pcow image (%llu bytes)",
                         path, (unsigned long long)image->file.size);
    if (ret)
        return error_set_errno(error, ret, "cannot read the header of %s", path);
    ret = header_validate(&image->header, path, error);
    if (ret)
        return ret;
    if (image->file.size < (uint64_t)header_heads(&image->header) << SLAB_BITS
        || image->file.size % PCOW_SLAB_SIZE)
        return error_set(error, -EBADMSG,
                         "%s: its length (%llu bytes) is not a multiple of 2 MiB, so it was cut "
                         "short or extended; "
                         "see pcow-img check",
                         path, (unsigned long long)image->file.size);
    if (image->file.writable && image->header.read_only_compatible_features & ~FEATURES_KNOWN)
        return error_set(
            error, -ENOTSUP,
            "%s uses features (0x%llx) that this program can read but not write; use a newer pcow",
            path, (unsigned long long)image->header.read_only_compatible_features);
    if (image->file.writable && word_value(image->header.state) & HEADER_SEALED)
        return error_set(error, -EROFS,
                         "%s is sealed (a template): make an image on it with pcow-img create -b, "
                         "or unseal it with pcow-img unseal",
                         path);
    if (image->file.writable && word_value(image->header.state) & HEADER_AMENDING
        && !(image->open_flags & OPEN_AMENDING))
        return error_set(error, -EROFS,
                         "%s: giving it a mirror of its metadata was interrupted; run pcow-img "
                         "amend -o mirror=on once more, which finishes it",
                         path);
    record = image_base_record(image);
    /*
     * A record that is being replaced (rebase -u -b, with NO_BASE) may be damaged: that is the way
     * out.
     */
    return record && !(image->open_flags & PCOW_OPEN_NO_BASE)
               ? base_record_validate(record, path, error)
               : 0;
}

/* What is known of an image while it is loaded. */
enum held {
    HELD_NOT,                          /* nothing can be said of what somebody may be changing */
    HELD_IMAGE,                        /* nobody writes to it */
    HELD_TREE,                         /* a writer marks what it changes */
};

static int load_image(struct pcow_image *image, const char *snapshot, enum held held,
                      struct pcow_error *error)
{
    struct layer *layer;
    int ret = load_header(image, error);

    if (!ret && mirror_attach(&image->file, &image->header))
        ret = error_set(error, -ENOMEM, "out of memory for the tables of %s", image->file.path);
    if (!ret && held == HELD_IMAGE)
        ret = mirror_verify(&image->file, error);
    else if (!ret && held == HELD_TREE)
        ret = mirror_verify_held(&image->file, NULL, error);
    if (!ret && (ret = datasum_attach(&image->file)))
        error_set_errno(error, ret, "%s: cannot read the checksums of its data",
                        image->file.path);
    if (!ret)
        ret = slabs_load(image, error);
    if (!ret)
        ret = layers_load(image, error);
    if (ret)
        return ret;
    image->view = image_active(image);
    if (snapshot) {
        layer = layer_find_name(image, snapshot);
        if (!layer)
            return layer_name_unknown(image, snapshot, error);
        image->view = layer->id;
    }
    image->size = layer_find(image, image->view)->virtual_size;
    return 0;
}

/*
 * The tree stays as it is from here on. So is, now, the length of the file that holds the
 * snapshots.
 */
static int hold_tree(struct pcow_image *image, struct pcow_error *error)
{
    struct stat st;
    int ret = lock_tree(&image->file, false, error);

    if (ret)
        return ret;
    if (fstat(image->file.fd, &st))
        return error_set_errno(error, -errno, "cannot stat %s", image->file.path);
    image->file.size = (uint64_t)st.st_size < MAX_FILE_SLABS << SLAB_BITS
                           ? (uint64_t)st.st_size
                           : MAX_FILE_SLABS << SLAB_BITS;
    return 0;
}

/*
 * As file_open(), with the lock on the tree for that on the file: who replaces a file holds both.
 */
static int open_and_hold_tree(struct pcow_image *image, int directory, const char *name,
                              const char *shown_path, unsigned file_flags,
                              struct observer *observer, struct pcow_error *error)
{
    for (unsigned i = 0; i < MAX_REPLACED; i++) {
        int ret = file_open(&image->file, directory, name, shown_path, file_flags, observer, error);

        if (!ret)
            ret = hold_tree(image, error);
        if (ret || !file_is_replaced(&image->file, directory, name, file_flags))
            return ret;
        file_close(&image->file);
    }
    return error_set(error, -EBUSY, "%s is replaced again and again; try when that is over",
                     shown_path);
}

/* The view is a snapshot: it stays, however the tree changes. */
static int hold_view(struct pcow_image *image, struct pcow_error *error)
{
    int ret = lock_snapshot(&image->file, image->view, false);

    unlock_tree(&image->file);
    return ret ? error_set_errno(error, ret, "cannot lock snapshot '%s' of %s",
                                 layer_find(image, image->view)->name, image->file.path)
               : 0;
}

/*
 * of_snapshot: the view is, or will be, a snapshot: a writer is no obstacle. The tree is locked on
 * return.
 */
static int load(struct pcow_image *image, int directory, const char *name, const char *shown_path,
                unsigned flags, bool of_snapshot, const char *snapshot, struct observer *observer,
                struct pcow_error *error)
{
    unsigned file_flags = (flags & PCOW_OPEN_WRITE ? FILE_WRITE : 0)
                          | (flags & PCOW_OPEN_FORCE_SHARE || of_snapshot ? FILE_FORCE_SHARE : 0)
                          | (directory == AT_FDCWD ? 0 : FILE_NO_FOLLOW);
    enum held held = of_snapshot                     ? HELD_TREE
                     : file_flags & FILE_FORCE_SHARE ? HELD_NOT
                                                     : HELD_IMAGE;
    int ret;

    image->open_flags = flags;
    ret = of_snapshot
              ? open_and_hold_tree(image, directory, name, shown_path, file_flags, observer, error)
              : file_open(&image->file, directory, name, shown_path, file_flags, observer, error);
    if (ret)
        return ret;
    if (directory == AT_FDCWD)
        ret = image_open_directory(image, error);
    else if ((image->directory = fcntl(directory, F_DUPFD_CLOEXEC, 0)) < 0)
        ret = error_set(error, -EMFILE, "cannot keep the directory of %s open", shown_path);
    if (ret)
        return ret;
    return flags & PCOW_OPEN_FORMAT_1 ? format1_load(image, error)
                                      : load_image(image, snapshot, held, error);
}

static struct pcow_image *new_image(void)
{
    struct pcow_image *image = calloc(1, sizeof *image);

    if (image) {
        image->process = getpid();
        image->file.fd = -1;
        image->directory = -1;
    }
    return image;
}

/* Find the snapshot an image stands on by its id and take it as the view of the base. */
static int view_layer(struct pcow_image *base, const struct base_record *record, const char *path,
                      struct pcow_error *error)
{
    const struct layer *layer;

    if (record->layer == 0)
        return 0;
    layer = record->layer <= MAX_LAYER_ID ? layer_find(base, (uint32_t)record->layer) : NULL;
    if (!layer || layer->state != LAYER_SNAPSHOT)
        return error_set(
            error, -ESTALE,
            "%s stands on snapshot %llu of %s, which is gone; rebase it to another base", path,
            (unsigned long long)record->layer, base->file.path);
    base->view = layer->id;
    base->size = layer->virtual_size;
    return hold_view(base, error);
}

static int check_identity(const struct pcow_image *base, const struct base_record *record,
                          const char *path, struct pcow_error *error)
{
    static const uint8_t unknown[PCOW_UUID_SIZE];
    uint64_t generation = base->format1 ? base->file.size : word_value(base->header.generation);

    /*
     * A guest's QEMU may write to this record. What it does not know is the uuid of an image that
     * is none of its own: without that a name would open any image of the directory, to whoever
     * opens this one.
     */
    if (record->flags & BASE_UNCHECKED
        && (record->format == 1 || memcmp(record->uuid, unknown, PCOW_UUID_SIZE) == 0))
        return error_set(error, -ESTALE,
                         "%s: nobody has looked at its base %s since it was recorded; accept it "
                         "with pcow-img rebase -u -b",
                         path, base->file.path);
    if (record->format == 2 && memcmp(record->uuid, base->header.uuid, PCOW_UUID_SIZE))
        return error_set(
            error, -ESTALE,
            "%s: the file %s is another image than the base it was made on (uuid differs); "
            "put the right one back, or accept it with pcow-img rebase -u -b",
            path, base->file.path);
    /* A commit was cut off, see rebase.c: what has changed the image holds itself. */
    if (record->flags & BASE_UNCHECKED)
        return 0;
    if (record->layer == 0 && record->generation != generation)
        return error_set(error, -ESTALE,
                         "%s: its base %s was changed since (generation %llu, was %llu); "
                         "put the right one back, or accept it with pcow-img rebase -u -b",
                         path, base->file.path, (unsigned long long)generation,
                         (unsigned long long)record->generation);
    return 0;
}

static int open_one_base(struct pcow_image *image, unsigned depth, struct pcow_error *error)
{
    char name_1[PCOW_BASE_NAME_SIZE], *shown, *slash;
    const struct base_record *record = image_base_record(image);
    const char *name = record ? record->name : format1_base_name(image, name_1);
    unsigned flags = image->open_flags & PCOW_OPEN_FORCE_SHARE;
    struct pcow_image *base;
    int ret;

    if (!name)
        return 0;
    if (depth >= PCOW_MAX_CHAIN_DEPTH)
        return error_set(error, -ELOOP,
                         "%s: its chain is deeper than %d files or leads back to itself; flatten "
                         "it with pcow-img convert",
                         image->file.path, PCOW_MAX_CHAIN_DEPTH);
    if (!record || record->format == 1)
        flags |= PCOW_OPEN_FORMAT_1;
    shown = malloc(strlen(image->file.path) + sizeof name_1 + 2);
    base = new_image();
    if (!shown || !base) {
        free(shown);
        free(base);
        return error_set(error, -ENOMEM, "out of memory");
    }
    strcpy(shown, image->file.path);
    slash = strrchr(shown, '/');
    strcpy(slash ? slash + 1 : shown, name);
    ret = load(base, image->directory, name, shown, flags, record && record->layer, NULL,
               image->file.persist.observer, error);
    free(shown);
    if (ret == -ENOENT)
        error_set(error, ret,
                  "%s: its base %s is missing from the directory; put it back, or set another with "
                  "pcow-img rebase -u -b",
                  image->file.path, name);
    else if (ret == -ELOOP)
        error_set(error, ret, "%s: its base %s is a symbolic link; refused", image->file.path,
                  name);
    if (!ret && record)
        ret = check_identity(base, record, image->file.path, error);
    if (!ret && record)
        ret = view_layer(base, record, image->file.path, error);
    if (ret) {
        pcow_close(base);
        return ret;
    }
    image->base = base;
    return 0;
}

int image_open_base(struct pcow_image *image, struct pcow_error *error)
{
    /* A loop and not a recursion: the depth comes from the files. */
    for (unsigned depth = 1; image; depth++, image = image->base) {
        int ret = open_one_base(image, depth, error);

        if (ret)
            return ret;
    }
    return 0;
}

/*
 * What a killed writer had changed has no checksum. If that is damaged since, this one would take
 * it for right, and give back what nothing tells of any more.
 */
static int check_after_kill(const struct pcow_image *image, struct pcow_error *error)
{
    struct pcow_check_result result;
    uint64_t gone = 0;
    char link[64];
    int ret;

    if (!mirror_has_marked(&image->file))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", image->file.fd);
    ret = check_file(&(struct check_request){.path = image->file.path,
                                             .held = link,
                                             .result = &result,
                                             .error = error,
                                             .gone = &gone});
    /* Who was given the file, and may not open it himself, or has no /proc, goes on as ever. */
    if (ret == -EACCES || ret == -EPERM || ret == -ENOENT || ret == -ELOOP)
        return 0;
    if (ret || !gone)
        return ret;
    return error_set(error, -EBADMSG,
                     "%s: its last writer was killed, and it was damaged since: of %llu slabs the "
                     "mirror has more than the metadata; pcow-img check tells what is lost; copy "
                     "the file, then pcow-img check -r all repairs it",
                     image->file.path, (unsigned long long)gone);
}

int image_open(const char *path, unsigned flags, const char *snapshot, struct observer *observer,
               pcow_image **result, struct pcow_error *error)
{
    struct pcow_image *image;
    int ret;

    *result = NULL;
    if (flags & PCOW_OPEN_WRITE
        && (snapshot || flags & (PCOW_OPEN_FORCE_SHARE | PCOW_OPEN_FORMAT_1)))
        return error_set(error, -EINVAL,
                         "%s: a snapshot or a format 1 image cannot be opened for writing, nor one "
                         "without its lock",
                         path);
    if (snapshot && flags & PCOW_OPEN_FORMAT_1)
        return error_set(error, -EINVAL,
                         "%s: snapshots of format 1 have no names; convert the image first", path);
    image = new_image();
    if (!image)
        return error_set(error, -ENOMEM, "out of memory");
    /* What is asked for can always be had in whole, so no half of anything is given. */
    if (snapshot)
        flags &= ~(unsigned)PCOW_OPEN_FORCE_SHARE;
    ret = load(image, AT_FDCWD, path, path, flags, snapshot, snapshot, observer, error);
    if (!ret && snapshot)
        ret = hold_view(image, error);
    if (!ret && !(flags & PCOW_OPEN_NO_BASE))
        ret = image_open_base(image, error);
    if (!ret && image->file.writable)
        ret = check_after_kill(image, error);
    if (!ret && image->file.writable)
        ret = tree_finish_interrupted(image, error);
    if (ret) {
        pcow_close(image);
        return ret;
    }
    image->complete = image->file.writable;
    *result = image;
    return 0;
}

int pcow_open(const char *path, unsigned flags, const char *snapshot, pcow_image **image,
              struct pcow_error *error)
{
    return image_open(path, flags, snapshot, NULL, image, error);
}

void pcow_adopt(pcow_image *image)
{
    for (; image; image = image->base)
        image->process = getpid();
}

static int finish(pcow_image *image, struct pcow_error *error)
{
    if (!image->complete || image->finished || image_is_inherited(image))
        return 0;
    image->finished = true;
    snapshot_close(image);
    reclaim_all(image);
    /* What the pool has no space for, or a lock keeps from it, is left to the next writer. */
    mirror_sync(&image->file, &(struct mirror_known){known_page, image});
    return mirror_tell(&image->file, error);
}

int pcow_finish(pcow_image *image, struct pcow_error *error)
{
    return finish(image, error);
}

void pcow_close(pcow_image *image)
{
    while (image) {
        struct pcow_image *base = image->base;

        finish(image, NULL);
        chain_free(image);
        format1_unload(image);
        slabs_unload(image);
        free(image->layers);
        layer_names_free(image);
        state_forget(image);
        if (image->directory >= 0)
            close(image->directory);
        if (image->file.path || image->file.fd >= 0)
            file_close(&image->file);
        free(image);
        image = base;
    }
}
