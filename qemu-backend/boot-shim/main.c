/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The init of the boot shim: find the guest's own boot configuration on its persistent memory, take
 * what would boot by default, and become it (kexec).
 *
 * Words on the shim's own command line: pcow.timeout=SECONDS for a key (1), pcow.entry=ID or number
 * instead of the default; words behind "--" go to the guest's kernel as well.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "config/dax.h"
#include "config/options.h"
#include "find.h"
#include "machine/console.h"
#include "machine/disks.h"
#include "machine/initrd.h"
#include "machine/saves.h"

#define MEMORY_LIMIT ((size_t)64 << 20)
#define STEPS_MAX 300000
#define WAIT_MILLISECONDS 5000
#define WORDS_MAX 64

struct shim {
    struct arena arena;
    struct volumes volumes;
    struct menu menu;
    struct failure failure;
    char own[4096]; /* the shim's command line */
    const char *console[WORDS_MAX + 1];
    const char *more[2];
    long timeout; /* milliseconds */
};

static void say(const char *text)
{
    printf("pcow boot: %s\n", text);
    fflush(stdout);
}

static void mount_kernel_file_systems(void)
{
    mkdir("/proc", 0555);
    mkdir("/sys", 0555);
    mkdir("/dev", 0755);
    mkdir("/volumes", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
}

static void read_own_options(struct shim *shim)
{
    FILE *file = fopen("/proc/cmdline", "re");
    size_t count = 0;
    char *rest, *word, *value;

    if (file) {
        if (!fgets(shim->own, sizeof shim->own, file))
            shim->own[0] = '\0';
        fclose(file);
    }
    shim->own[strcspn(shim->own, "\n")] = '\0';
    value = options_value(&shim->arena, shim->own, "pcow.timeout");
    shim->timeout = value ? strtol(value, NULL, 10) * 1000 : 1000;
    if (shim->timeout < 0 || shim->timeout > 600000)
        shim->timeout = 1000;
    rest = arena_text(&shim->arena, shim->own, strlen(shim->own));
    while ((word = strsep(&rest, " ")) && strcmp(word, "--") != 0)
        if (strncmp(word, "console=", 8) == 0 && count < WORDS_MAX)
            shim->console[count++] = word;
    /* Not as this program's arguments: some of those are words that the shim's kernel knows not. */
    if (*options_behind(shim->own))
        shim->more[0] = options_behind(shim->own);
}

/* Disks appear in their own time. */
static int find_configuration(struct shim *shim)
{
    static const struct timespec pause = {.tv_nsec = 10000000};
    long end = console_clock() + WAIT_MILLISECONDS;
    size_t before = 0, volumes = 0;
    int result = -ENODEV;

    for (;;) {
        size_t disks = disks_find(&shim->volumes);

        if (disks != before || shim->volumes.count != volumes) {
            before = disks;
            volumes = shim->volumes.count;
            result = find_menu(&shim->menu, &shim->failure);
            if (!result || result == -E2BIG)
                return result;
        }
        if (console_clock() >= end)
            break;
        nanosleep(&pause, NULL);
    }
    if (!before)
        return fail_with(&shim->failure, -ENODEV,
                         "the machine has no NVDIMM and no virtio-pmem device");
    return result;
}

static void choose_by_option(struct shim *shim)
{
    char *wanted = options_value(&shim->arena, shim->own, "pcow.entry");
    struct menu *menu = &shim->menu;

    if (!wanted)
        return;
    for (size_t i = 0; i < menu->count; i++) {
        if (strcmp(menu->items[i].id, wanted) == 0 || strtoul(wanted, NULL, 10) == i + 1) {
            menu->chosen = i;
            return;
        }
    }
    printf("pcow boot: there is no entry %s: the default is taken\n", wanted);
}

static int load_kernel(struct shim *shim, const struct choice *choice, const struct kernel *kernel)
{
    struct arena *arena = &shim->arena;
    struct additions additions = {.console = shim->console, .more = shim->more};
    struct guest_modules modules;
    struct dax dax;
    struct piece pieces[INITRDS_MAX + 1];
    struct first_init first = {.program = "/first-init"};
    const char *options;
    size_t count = 0;
    int result;

    result = guest_modules_find(arena, &shim->volumes, kernel->release,
                                !machine_has_nvdimm() && machine_has_virtio_pmem(), &modules,
                                &shim->failure);
    if (result)
        return result;
    if (modules.modules.count && !choice->initrds_count)
        return fail_with(&shim->failure, -ENODEV,
                         "\"%s\" has no initrd, and the kernel %s has its driver for persistent "
                         "memory as a module",
                         choice->title, kernel->release);
    if (!modules.directory)
        printf("pcow boot: no file system has the modules of the kernel %s: its own initrd must "
               "have the driver\n",
               kernel->release);
    first.next = options_value(arena, choice->options, "rdinit");
    additions.root = options_root(&shim->volumes, choice->options);
    dax = dax_choose(arena, additions.root, kernel->major * 1000 + kernel->minor, modules.fs_dax,
                     choice->initrds_count != 0);
    additions.dax = dax.option;
    first.cut = dax.cut;
    additions.rdinit = modules.modules.count || first.cut ? FIRST_INIT : NULL;
    options = options_make(arena, choice->options, &additions);
    if (choice->initrds_count)
        result = initrd_make(arena, choice, &modules, &first, pieces, &count, &shim->failure);
    if (!result)
        result = kernel_load(kernel, pieces, count, options, &shim->failure);
    if (!result && dax.why)
        say(dax.why);
    return result;
}

static int load(struct shim *shim, size_t item)
{
    struct kernel kernel;
    struct choice choice;
    struct piece file;
    jmp_buf outer;
    int result = menu_choose(&shim->menu, item, &choice, &shim->failure);

    if (!result)
        result = boot_file_map(&choice.kernel, &file, &shim->failure);
    if (!result)
        result = kernel_look(&file, choice.kernel.path, &kernel, &shim->failure);
    if (result)
        return result;
    memcpy(outer, shim->arena.out, sizeof outer);
    if (setjmp(shim->arena.out))
        result =
            fail_with(&shim->failure, -ENOMEM, "too little memory for what is read from the guest");
    else
        result = load_kernel(shim, &choice, &kernel);
    memcpy(shim->arena.out, outer, sizeof outer);
    return result;
}

/* Load the default at once, and another one if somebody wants it. */
static int boot(struct shim *shim, long started)
{
    struct menu *menu = &shim->menu;
    size_t item = menu->chosen;
    int result;

    choose_by_option(shim);
    item = menu->chosen;
    printf("pcow boot: %s%s (%s)\n", menu->items[item].title,
           menu->locked ? "" : "; a key shows the menu", menu->source);
    fflush(stdout);
    result = load(shim, item);
    if (result)
        say(shim->failure.text);
    while (!menu->locked && (result || console_key(started + shim->timeout - console_clock()))) {
        item = console_ask(menu);
        result = load(shim, item);
        if (!result)
            break;
        say(shim->failure.text);
    }
    if (result)
        return result;
    if (setjmp(shim->arena.out) == 0)
        saves_write(&shim->arena, menu->saves);
    console_close();
    fflush(stdout);
    return kernel_start(&shim->failure);
}

int main(void)
{
    struct shim *shim = calloc(1, sizeof *shim);
    long started = console_clock();
    int result;

    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    console_open();
    mount_kernel_file_systems();
    if (!shim)
        return 1;
    arena_open(&shim->arena, MEMORY_LIMIT, STEPS_MAX);
    shim->menu.arena = &shim->arena;
    shim->menu.volumes = &shim->volumes;
    if (setjmp(shim->arena.out)) {
        result = fail_with(&shim->failure, -ENOMEM, "too little memory");
    } else {
        read_own_options(shim);
        result = find_configuration(shim);
        if (!result)
            result = boot(shim, started);
    }
    if (result)
        say(shim->failure.text);
    say("nothing boots: the image must be mended, from another guest or by mounting it");
    for (;;)
        pause();
}
