/* SPDX-License-Identifier: BSD-3-Clause */
#include "place.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "find.h"

#define MEMORY ((size_t)32 << 20)
#define STEPS 300000

int place_setup(void **state)
{
    struct place *place = calloc(1, sizeof *place);
    const char *top = getenv("TMPDIR");

    assert_non_null(place);
    snprintf(place->directory, sizeof place->directory, "%s/pcow-boot.XXXXXX", top ? top : "/tmp");
    assert_non_null(mkdtemp(place->directory));
    arena_open(&place->arena, MEMORY, STEPS);
    place->menu.arena = &place->arena;
    place->menu.volumes = &place->volumes;
    *state = place;
    return 0;
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where)
{
    (void)status, (void)kind, (void)where;
    return remove(path);
}

int place_teardown(void **state)
{
    struct place *place = *state;

    for (size_t i = 0; i < place->volumes.count; i++)
        close(place->volumes.item[i].root);
    arena_close(&place->arena);
    nftw(place->directory, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(place);
    return 0;
}

struct volume *place_volume(struct place *place, const char *type, const char *uuid,
                            unsigned partition)
{
    struct volume *volume = &place->volumes.item[place->volumes.count++];
    char path[sizeof place->directory + 64];

    snprintf(volume->device, sizeof volume->device, partition ? "pmem0p%u" : "pmem0", partition);
    snprintf(path, sizeof path, "%s/%s", place->directory, volume->device);
    assert_int_equal(mkdir(path, 0755), 0);
    volume->root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    assert_true(volume->root >= 0);
    volume->partition = partition;
    snprintf(volume->type, sizeof volume->type, "%s", type);
    snprintf(volume->uuid, sizeof volume->uuid, "%s", uuid);
    return volume;
}

void place_put_bytes(const struct volume *volume, const char *path, const void *data, size_t size)
{
    char name[512];
    int fd;

    path += *path == '/';
    snprintf(name, sizeof name, "%s", path);
    for (char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdirat(volume->root, name, 0755);
        *slash = '/';
    }
    fd = openat(volume->root, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, size), size);
    close(fd);
}

void place_put(const struct volume *volume, const char *path, const char *content)
{
    place_put_bytes(volume, path, content, strlen(content));
}

void place_data(const struct volume *volume, const char *path, const char *name)
{
    static char data[64 << 10];
    char source[512];
    ssize_t size;
    int fd;

    snprintf(source, sizeof source, "%s/%s", getenv("PCOW_BOOT_DATA"), name);
    fd = open(source, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    size = read(fd, data, sizeof data);
    assert_true(size > 0 && size < (ssize_t)sizeof data);
    close(fd);
    place_put_bytes(volume, path, data, (size_t)size);
}

void place_kernel(const struct volume *volume, const char *kernel, const char *initrd)
{
    place_put(volume, kernel, "kernel");
    if (initrd)
        place_put(volume, initrd, "initrd");
}

int place_boot(struct place *place)
{
    int result;

    place->menu.count = 0;
    place->menu.chosen = 0;
    result = find_menu(&place->menu, &place->failure);
    if (!result)
        result = menu_choose(&place->menu, place->menu.chosen, &place->choice, &place->failure);
    return result;
}

const char *place_saved(const struct place *place, const char *name)
{
    for (const struct save *save = place->menu.saves; save; save = save->next)
        if (strcmp(save->name, name) == 0)
            return save->value ? save->value : "unset";
    return "-";
}
