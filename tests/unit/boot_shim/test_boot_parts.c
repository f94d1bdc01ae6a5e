/* SPDX-License-Identifier: BSD-3-Clause */
/* The parts: versions, environment blocks, command lines, modules, superblocks. */
#include "place.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config/grubenv.h"
#include "config/options.h"
#include "config/probe.h"
#include "config/version.h"
#include "machine/guest_modules.h"

static void versions(void **state)
{
    /* ascending */
    static const char *const order[] = {
        "0-rescue",
        "1~rc1",
        "1",
        "1-1",
        "1^1",
        "1.0",
        "1.0.1",
        "1.0a",
        "1.2",
        "1.10",
        "5.14.0-70.el9",
        "5.14.0-284.el9",
        "6.1.0-50-cloud-amd64",
        "6.1.0-56-cloud-amd64",
    };
    const size_t count = sizeof order / sizeof *order;

    (void)state;
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < count; j++) {
            int result = version_compare(order[i], order[j]);

            if ((result > 0) - (result < 0) != (i > j) - (i < j))
                fail_msg("%s and %s: %d", order[i], order[j], result);
        }
    assert_int_equal(version_compare("1.01", "1.1"), 0);
    assert_int_equal(version_compare("", ""), 0);
}

struct seen {
    char text[256];
};

static void see(void *context, const char *name, const char *value)
{
    struct seen *seen = context;

    strcat(strcat(strcat(strcat(seen->text, name), "="), value), ";");
}

static void environment_blocks(void **state)
{
    static const char block[] =
        "# GRUB Environment Block\n# WARNING: do not edit\nsaved_entry=a\\\\b"
        "\nnext_entry=1>2\n#######################";
    struct place *place = *state;
    struct seen seen = {.text = ""};
    size_t length = sizeof block - 1;
    char *changed;

    assert_true(grubenv_read(&place->arena, block, length, see, &seen));
    assert_string_equal(seen.text, "saved_entry=a\\b;next_entry=1>2;");
    changed = grubenv_change(&place->arena, block, length, "next_entry", "");
    assert_non_null(changed);
    assert_int_equal(strlen(changed), length);
    seen.text[0] = '\0';
    assert_true(grubenv_read(&place->arena, changed, length, see, &seen));
    assert_string_equal(seen.text, "saved_entry=a\\b;next_entry=;");
    changed = grubenv_change(&place->arena, changed, length, "saved_entry", NULL);
    seen.text[0] = '\0';
    assert_true(grubenv_read(&place->arena, changed, length, see, &seen));
    assert_string_equal(seen.text, "next_entry=;");
    /* what has no room is not half written */
    assert_null(grubenv_change(&place->arena, block, length, "x",
                               "0123456789012345678901234567890123456789"));
    assert_false(grubenv_read(&place->arena, "nothing", 7, see, &seen));
    assert_null(grubenv_change(&place->arena, "nothing", 7, "a", "b"));
}

static void command_lines(void **state)
{
    static const char *const console[] = {"console=ttyS0", NULL}, *const more[] = {"a=b", NULL};
    static const struct {
        const char *options, *dax, *rdinit, *result;
    } lines[] = {
        {"ro quiet", NULL, NULL, "ro quiet console=ttyS0 a=b"},
        {"root=/dev/vda1 ro console=tty0", "dax=always", "/pcow/init",
         "root=/dev/pmem0p1 ro console=tty0 rootflags=dax=always rdinit=/pcow/init a=b"},
        {"root=/dev/sda1 rootflags=subvol=root console=x", "dax=always", NULL,
         "root=/dev/pmem0p1 rootflags=subvol=root console=x rootflags=subvol=root,dax=always a=b"},
        {"rootflags=noatime,dax=never console=x", "dax=always", NULL,
         "rootflags=noatime,dax=never console=x a=b"},
        {"root=UUID=x console=x -- single root=/dev/vda1", NULL, "/i",
         "root=UUID=x console=x rdinit=/i a=b -- single root=/dev/vda1"},
        {"x=\"a b\" console=x", NULL, NULL, "x=\"a b\" console=x a=b"},
        {"", NULL, NULL, "console=ttyS0 a=b"},
    };
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        struct additions additions = {.root = root,
                                      .dax = lines[i].dax,
                                      .rdinit = lines[i].rdinit,
                                      .console = console,
                                      .more = more};

        assert_string_equal(options_make(&place->arena, lines[i].options, &additions),
                            lines[i].result);
    }
    assert_string_equal(options_value(&place->arena, "a=1 b=2 a=3 -- a=4", "a"), "3");
    assert_null(options_value(&place->arena, "ab=1", "a"));
}

static void roots(void **state)
{
    static const struct {
        const char *options;
        int volume;
    } lines[] = {
        {"root=UUID=" ROOT_UUID, 1},
        {"quiet root=LABEL=cloudimg-rootfs ro", 1},
        {"root=PARTUUID=AAAAAAAA-bbbb-cccc-dddd-eeeeeeeeeeee", 1},
        {"root=/dev/disk/by-uuid/" ROOT_UUID, 1},
        {"root=/dev/vda2", 1},
        {"root=/dev/nvme0n1p2", 1},
        {"root=/dev/pmem0p2", 1},
        {"root=/dev/pmem0p1", 0},
        {"root=/dev/vdb2", -1},
        {"root=/dev/mapper/vg-root", -1},
        {"root=UUID=", -1},
        {"root=LABEL=", -1},
        {"", -1},
    };
    struct place *place = *state;
    struct volume *root;

    place_volume(place, "vfat", "ABCD-1234", 1);
    root = place_volume(place, "ext4", ROOT_UUID, 2);
    strcpy(root->label, "cloudimg-rootfs");
    strcpy(root->partuuid, "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee");
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        const struct volume *found = options_root(&place->volumes, lines[i].options);

        if (found != (lines[i].volume < 0 ? NULL : &place->volumes.item[lines[i].volume]))
            fail_msg("%s: %s", lines[i].options, found ? found->device : "none");
    }
}

#define DEP \
    "kernel/drivers/acpi/nfit/nfit.ko.xz: kernel/drivers/nvdimm/libnvdimm.ko.xz\n" \
    "kernel/drivers/nvdimm/libnvdimm.ko.xz:\n" \
    "kernel/drivers/nvdimm/nd_pmem.ko.xz: kernel/drivers/nvdimm/nd_btt.ko.xz " \
    "kernel/drivers/nvdimm/libnvdimm.ko.xz\n" \
    "kernel/drivers/nvdimm/nd_btt.ko.xz: kernel/drivers/nvdimm/libnvdimm.ko.xz\n"

static void modules_of_the_guest(void **state)
{
    static const char *const order[] = {"libnvdimm", "nfit", "nd_btt", "nd_pmem"};
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);
    struct guest_modules found;

    assert_int_equal(
        guest_modules_find(&place->arena, &place->volumes, "6.1.0", false, &found, &place->failure),
        0);
    assert_null(found.directory);
    place_put(root, "/usr/lib/modules/6.1.0/modules.dep", DEP);
    place_put(root, "/usr/lib/modules/6.1.0/modules.builtin", "kernel/drivers/virtio/virtio.ko\n");
    assert_int_equal(
        guest_modules_find(&place->arena, &place->volumes, "6.1.0", false, &found, &place->failure),
        0);
    assert_int_equal(found.modules.count, 4);
    for (size_t i = 0; i < 4; i++)
        assert_non_null(strstr(found.modules.path[i], order[i]));
    assert_true(found.fs_dax);
    /* no driver, and a kernel without DAX */
    assert_int_equal(
        guest_modules_find(&place->arena, &place->volumes, "6.1.0", true, &found, &place->failure),
        -19);
    assert_string_equal(place->failure.text,
                        "the kernel 6.1.0 has no driver virtio_pci (looked for in "
                        "/usr/lib/modules/6.1.0 of pmem0p1), so it cannot boot from persistent "
                        "memory: install a kernel that has "
                        "it");
    place_put(root, "/boot/config-6.1.0", "CONFIG_A=y\n# CONFIG_FS_DAX is not set\n");
    place_put(root, "/usr/lib/modules/6.1.0/modules.builtin",
              "kernel/drivers/acpi/nfit/nfit.ko\nkernel/drivers/nvdimm/nd_pmem.ko\n");
    assert_int_equal(
        guest_modules_find(&place->arena, &place->volumes, "6.1.0", false, &found, &place->failure),
        0);
    assert_int_equal(found.modules.count, 0);
    assert_false(found.fs_dax);
}

/* Of "module\n" as the three programs compress it. */
static void compressed_modules(void **state)
{
    static const char xz[] =
        "\xfd\x37\x7a\x58\x5a\x00\x00\x01\x69\x22\xde\x36\x02\x00\x21\x01\x16\x00\x00\x00\x74\x2f"
        "\xe5\xa3\x01\x00\x06\x6d\x6f\x64\x75\x6c\x65\x0a\x00";
    char plain[] = "module\n", cut[64];
    struct place *place = *state;
    size_t length = 7;

    assert_ptr_equal(module_unpack(&place->arena, "a.ko", plain, &length), plain);
    assert_int_equal(length, 7);
    memcpy(cut, xz, sizeof xz - 1);
    length = sizeof xz - 1; /* the end is missing */
    assert_null(module_unpack(&place->arena, "a.ko.xz", cut, &length));
    for (unsigned i = 0; i < 3; i++) { /* as a crash leaves it */
        static const char *const names[] = {"a.ko.xz", "a.ko.zst", "a.ko.gz"};

        length = 0;
        module_unpack(&place->arena, names[i], cut, &length);
        assert_int_equal(length, 0);
    }
    length = 7;
    assert_null(module_unpack(&place->arena, "a.ko.zst", plain, &length));
    assert_null(module_unpack(&place->arena, "a.ko.gz", plain, &length));
}

static int memory_file(size_t size)
{
    int fd = memfd_create("disk", MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    return fd;
}

static void superblocks(void **state)
{
    static const struct {
        off_t at;
        const char *magic;
        size_t length;
        const char *type;
    } kinds[] = {
        {0x438, "\x53\xef", 2, "ext4"},    {0, "XFSB", 4, "xfs"},
        {0x10040, "_BHRfS_M", 8, "btrfs"}, {0, "LUKS\xba\xbe", 6, "LUKS"},
        {512, "LABELONE", 8, "LVM"},
    };
    struct volume volume;
    int fd;

    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        fd = memory_file(128 << 10);
        memset(&volume, 0, sizeof volume);
        assert_false(probe_volume(fd, &volume));
        assert_int_equal(pwrite(fd, kinds[i].magic, kinds[i].length, kinds[i].at), kinds[i].length);
        assert_true(probe_volume(fd, &volume));
        assert_string_equal(volume.type, kinds[i].type);
        close(fd);
    }
    fd = memory_file(16);
    assert_false(probe_volume(fd, &volume));
    close(fd);
}

static void partitions(void **state)
{
    unsigned char table[2048] = {0};
    char uuid[40];
    int fd = memory_file(1 << 20);

    (void)state;
    memcpy(table + 512, "EFI PART", 8);
    table[512 + 72] = 2; /* the entries' sector */
    table[512 + 80] = 4; /* how many */
    table[512 + 84] = 128; /* their size */
    for (unsigned i = 0; i < 16; i++)
        table[1024 + 128 + 16 + i] = (unsigned char)(i * 16 + i);
    assert_int_equal(pwrite(fd, table, sizeof table, 0), sizeof table);
    probe_partition(fd, 2, uuid);
    assert_string_equal(uuid, "33221100-5544-7766-8899-aabbccddeeff");
    probe_partition(fd, 5, uuid);
    assert_string_equal(uuid, "");
    memset(table + 512, 0, 8);
    memcpy(table + 440, "\x78\x56\x34\x12", 4);
    memcpy(table + 510, "\x55\xaa", 2);
    assert_int_equal(pwrite(fd, table, sizeof table, 0), sizeof table);
    probe_partition(fd, 1, uuid);
    assert_string_equal(uuid, "12345678-01");
    close(fd);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, place_setup, place_teardown)

static void words_for_the_guest(void **state)
{
    (void)state;
    assert_string_equal(options_behind("console=ttyS0 nopti --  a=b c=\"d e\" f"),
                        "a=b c=\"d e\" f");
    assert_string_equal(options_behind("a=\"b -- c\" -- -- d"), "-- d");
    assert_string_equal(options_behind("quiet nopti"), "");
    assert_string_equal(options_behind("quiet --"), "");
    assert_string_equal(options_behind(""), "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_for_the_guest),
        cmocka_unit_test(versions),    CASE(environment_blocks),
        CASE(command_lines),           CASE(roots),
        CASE(modules_of_the_guest),    CASE(compressed_modules),
        cmocka_unit_test(superblocks), cmocka_unit_test(partitions),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
