/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/guest_modules.h"

#include <errno.h>
#include <string.h>

#define LIST_MAX ((size_t)4 << 20)

static const char *const places[] = {"/lib/modules",          "/usr/lib/modules",
                                     "/@/lib/modules",        "/@/usr/lib/modules",
                                     "/root/usr/lib/modules", "/modules"};

static char *read_list(struct arena *arena, const struct guest_modules *found, const char *name)
{
    size_t length;

    return volume_read(arena, found->volume, arena_format(arena, "%s/%s", found->directory, name),
                       LIST_MAX, &length);
}

static bool find_directory(struct arena *arena, const struct volumes *volumes, const char *release,
                           struct guest_modules *found)
{
    for (size_t i = 0; i < volumes->count; i++) {
        for (size_t j = 0; j < sizeof places / sizeof *places; j++) {
            const char *path = arena_format(arena, "%s/%s", places[j], release);

            if (!volume_has(&volumes->item[i], path, KIND_DIRECTORY))
                continue;
            found->volume = &volumes->item[i];
            found->directory = path;
            return true;
        }
    }
    return false;
}

/* The kernel's configuration as distributions keep it; NULL if they do not. */
static const char *read_config(struct arena *arena, const struct volumes *volumes,
                               const char *release, const struct guest_modules *found)
{
    const char *text = found->directory ? read_list(arena, found, "config") : NULL;

    for (size_t i = 0; i < volumes->count && !text; i++) {
        static const char *const formats[] = {"/boot/config-", "/config-"};
        size_t length;

        for (size_t j = 0; j < 2 && !text; j++)
            text = volume_read(arena, &volumes->item[i],
                               arena_format(arena, "%s%s", formats[j], release), LIST_MAX, &length);
    }
    return text;
}

static bool add(struct arena *arena, struct guest_modules *found, const char *dependencies,
                const char *builtin, const char *name)
{
    return modules_listed(builtin, name) || modules_add(arena, &found->modules, dependencies, name);
}

int guest_modules_find(struct arena *arena, const struct volumes *volumes, const char *release,
                       bool virtio, struct guest_modules *found, struct failure *failure)
{
    static const char *const nvdimm[] = {"nfit", "nd_pmem", NULL};
    static const char *const virtio_pmem[] = {"virtio_pci", "virtio_pmem", "nd_pmem", NULL};
    const char *dependencies, *builtin, *config;

    memset(found, 0, sizeof *found);
    find_directory(arena, volumes, release, found);
    config = read_config(arena, volumes, release, found);
    found->fs_dax = !config || strstr(config, "\nCONFIG_FS_DAX=y\n");
    if (!found->directory)
        return 0;
    dependencies = read_list(arena, found, "modules.dep");
    builtin = read_list(arena, found, "modules.builtin");
    for (const char *const *name = virtio ? virtio_pmem : nvdimm; *name; name++)
        if (!add(arena, found, dependencies ? dependencies : "", builtin ? builtin : "", *name))
            return fail_with(
                failure, -ENODEV,
                "the kernel %s has no driver %s (looked for in %s of %s), so it cannot "
                "boot from persistent memory: install a kernel that has it",
                release, *name, found->directory, found->volume->device);
    return 0;
}
