/* SPDX-License-Identifier: BSD-3-Clause */
/* systemd-boot, unified kernel images, extlinux. */
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config/bls.h"
#include "config/loader.h"

#define ESP_UUID "ABCD-1234"
#define ENTRIES "/loader/entries/"
#define TOKEN "0123456789abcdef0123456789abcdef"

static void put_entry(struct volume *esp, const char *name, const char *version)
{
    char path[256], text[1024], kernel[256], initrd[256];

    snprintf(path, sizeof path, ENTRIES TOKEN "-%s.conf", name);
    snprintf(kernel, sizeof kernel, "/" TOKEN "/%s/linux", version);
    snprintf(initrd, sizeof initrd, "/" TOKEN "/%s/initrd.img-%s", version, version);
    snprintf(text, sizeof text,
             "# Boot Loader Specification type#1 entry\n# File created by kernel-install\n"
             "title      Debian GNU/Linux 13 (trixie)\nversion    %s\nmachine-id " TOKEN "\n"
             "sort-key   debian\noptions    root=UUID=" ROOT_UUID " ro console=ttyS0\n"
             "options    systemd.machine_id=" TOKEN "\nlinux      %s\ninitrd     %s\n",
             version, kernel, initrd);
    place_put(esp, path, text);
    place_kernel(esp, kernel, initrd);
}

static struct volume *systemd_boot(struct place *place)
{
    struct volume *esp = place_volume(place, "vfat", ESP_UUID, 1);

    place_volume(place, "ext4", ROOT_UUID, 2);
    place_put(esp, "/EFI/systemd/systemd-bootx64.efi", "MZ");
    place_put(esp, "/loader/loader.conf", "#timeout 3\n#console-mode keep\n");
    put_entry(esp, "6.9.0-9-cloud-amd64", "6.9.0-9-cloud-amd64");
    put_entry(esp, "6.12.0-3-cloud-amd64", "6.12.0-3-cloud-amd64");
    return esp;
}

static void systemd_boot_takes_the_newest(void **state)
{
    struct place *place = *state;

    systemd_boot(place);
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.12.0-3-cloud-amd64/linux");
    assert_string_equal(place->choice.initrds[0].path,
                        "/" TOKEN "/6.12.0-3-cloud-amd64/initrd.img-6.12.0-3-cloud-amd64");
    assert_string_equal(place->choice.options,
                        "root=UUID=" ROOT_UUID " ro console=ttyS0 systemd.machine_id=" TOKEN);
}

static void systemd_boot_takes_the_default(void **state)
{
    static const char *const patterns[] = {TOKEN "-6.9*", TOKEN "-6.9.0-9-cloud-amd64.conf",
                                           "*-6.9.?-*"};
    struct place *place = *state;
    struct volume *esp = systemd_boot(place);

    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char text[128];

        snprintf(text, sizeof text, "timeout 3\ndefault %s\r\n", patterns[i]);
        place_put(esp, "/loader/loader.conf", text);
        assert_int_equal(place_boot(place), 0);
        assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.9.0-9-cloud-amd64/linux");
    }
    place_put(esp, "/loader/loader.conf", "default nothing-*\n");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.12.0-3-cloud-amd64/linux");
}

/* Automatic boot assessment: what was tried too often comes last. */
static void systemd_boot_counts_tries(void **state)
{
    struct place *place = *state;
    struct volume *esp = systemd_boot(place);

    put_entry(esp, "6.13.0-1+0-3", "6.13.0-1");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.12.0-3-cloud-amd64/linux");
    put_entry(esp, "6.13.0-2+2-1", "6.13.0-2");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.13.0-2/linux");
}

/* With a grub.cfg that was left behind, and without systemd-boot's program. */
static void which_loader_is_meant(void **state)
{
    struct place *place = *state;
    struct volume *esp = systemd_boot(place), *root = &place->volumes.item[1];

    place_put(root, "/boot/grub/grub.cfg", "menuentry old { linux /vmlinuz\ninitrd /initrd }\n");
    place_kernel(root, "/vmlinuz", "/initrd");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.12.0-3-cloud-amd64/linux");
    place_put(esp, "/EFI/systemd/systemd-bootx64.efi", "");
    assert_int_equal(unlinkat(esp->root, "EFI/systemd/systemd-bootx64.efi", 0), 0);
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz");
}

static void foreign_architectures_are_left_out(void **state)
{
    struct place *place = *state;
    struct volume *esp = systemd_boot(place);

    place_put(esp, ENTRIES "z.conf", "title z\nsort-key a\narchitecture aa64\nlinux /vmlinuz\n");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/" TOKEN "/6.12.0-3-cloud-amd64/linux");
    assert_int_equal(place->menu.count, 2);
}

/* ---- unified kernel images */

static void put32(unsigned char *at, size_t value)
{
    for (unsigned i = 0; i < 4; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

/* A PE file with some sections; what is between them is zero. */
static size_t make_image(unsigned char *image, const char *const (*sections)[2], size_t count)
{
    size_t at = 1024;

    memset(image, 0, 4096);
    memcpy(image, "MZ", 2);
    put32(image + 60, 128);
    memcpy(image + 128, "PE\0\0", 4);
    image[128 + 6] = (unsigned char)count;
    image[128 + 20] = 16; /* of the optional header */
    for (size_t i = 0; i < count; i++) {
        unsigned char *header = image + 128 + 24 + 16 + 40 * i;
        size_t length = strlen(sections[i][1]);

        memcpy(header, sections[i][0], strlen(sections[i][0]));
        put32(header + 8, length);
        put32(header + 16, 512);
        put32(header + 20, at);
        memcpy(image + at, sections[i][1], length);
        at += 512;
    }
    return at;
}

static void a_unified_kernel_image_boots(void **state)
{
    static const char *const sections[][2] = {
        {".osrel", "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 13\"\nVERSION_ID='13'\n"},
        {".cmdline", "root=/dev/vda2 quiet\n"},
        {".ucode", "microcode"},
        {".initrd", "an initrd"},
        {".linux", "a kernel"},
    };
    struct place *place = *state;
    struct volume *esp = place_volume(place, "vfat", ESP_UUID, 1);
    unsigned char image[4096];
    size_t size = make_image(image, sections, 5);

    place_put_bytes(esp, "/EFI/Linux/debian-6.12.0.efi", image, size);
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.title, "Debian GNU/Linux 13");
    assert_string_equal(place->choice.options, "root=/dev/vda2 quiet");
    assert_string_equal(place->choice.kernel.path, "/EFI/Linux/debian-6.12.0.efi");
    assert_int_equal(place->choice.kernel.offset, 1024 + 4 * 512);
    assert_int_equal(place->choice.kernel.size, 8);
    assert_int_equal(place->choice.initrds_count, 2);
    assert_int_equal(place->choice.initrds[0].offset, 1024 + 2 * 512);
    assert_int_equal(place->choice.initrds[1].offset, 1024 + 3 * 512);
    assert_int_equal(place->choice.initrds[1].size, 9);
}

/* Cut off at any length, and with any byte of its headers changed, it is an image or it is none. */
static void damaged_images_are_none(void **state)
{
    static const char *const sections[][2] = {{".linux", "a kernel"}, {".cmdline", "x"}};
    struct place *place = *state;
    struct volume *esp = place_volume(place, "vfat", ESP_UUID, 1);
    unsigned char image[4096];
    size_t size = make_image(image, sections, 2);

    for (size_t length = 0; length < size; length += 7) {
        place_put_bytes(esp, "/EFI/Linux/a.efi", image, length);
        (void)place_boot(place);
    }
    for (size_t at = 0; at < 300; at++) {
        unsigned char kept = image[at];

        image[at] = 0xff;
        place_put_bytes(esp, "/EFI/Linux/a.efi", image, size);
        if (place_boot(place) == 0)
            assert_in_range(place->choice.kernel.offset + place->choice.kernel.size, 1, size);
        image[at] = kept;
    }
}

/* ---- extlinux */

static void extlinux_boots(void **state)
{
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_put(root, "/boot/extlinux/extlinux.conf",
              "## /boot/extlinux/extlinux.conf\nDEFAULT l0\nMENU TITLE U-Boot menu\nPROMPT 0\n"
              "TIMEOUT 50\n\nlabel l1\n\tmenu label Old\n\tlinux ../vmlinuz-old\n\tappend ro\n\n"
              "label l0\n\tmenu label Debian GNU/Linux, with kernel 6.1\n\tlinux "
              "/boot/vmlinuz-6.1.0\n\tinitrd /boot/initrd.img-6.1.0\n\n"
              "\tappend root=LABEL=root ro console=ttyS0\n");
    place_kernel(root, "/boot/vmlinuz-6.1.0", "/boot/initrd.img-6.1.0");
    place_put(root, "/boot/vmlinuz-old", "a");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.title, "Debian GNU/Linux, with kernel 6.1");
    assert_string_equal(place->choice.kernel.path, "/boot/vmlinuz-6.1.0");
    assert_string_equal(place->choice.options, "root=LABEL=root ro console=ttyS0");
    assert_int_equal(menu_choose(&place->menu, 0, &place->choice, &place->failure), 0);
    assert_string_equal(place->choice.kernel.path, "/boot/extlinux/../vmlinuz-old");
}

/* Alpine's way: paths of its own folder, the initrd in the command line's place. */
static void syslinux_boots(void **state)
{
    struct place *place = *state;
    struct volume *boot = place_volume(place, "ext4", ROOT_UUID, 1);

    place_put(boot, "/extlinux.conf",
              "TIMEOUT 10\nPROMPT 1\nLABEL virt\n  MENU DEFAULT\n  MENU LABEL Linux virt\n"
              "  LINUX vmlinuz-virt\n  INITRD initramfs-virt\n  APPEND root=UUID=x "
              "modules=ext4 console=ttyS0\n");
    place_kernel(boot, "/vmlinuz-virt", "/initramfs-virt");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz-virt");
    assert_string_equal(place->choice.initrds[0].path, "/initramfs-virt");
}

static void patterns(void **state)
{
    (void)state;
    assert_true(loader_matches("*", "a"));
    assert_true(loader_matches("a*c", "abbbc"));
    assert_true(loader_matches("*b*", "abc"));
    assert_false(loader_matches("a?", "a"));
    assert_false(loader_matches("*b", "abc"));
    assert_true(
        loader_matches("*a*a*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"));
    assert_false(
        loader_matches("*a*a*a*a*a*a*a*c", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, place_setup, place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(systemd_boot_takes_the_newest),
        CASE(systemd_boot_takes_the_default),
        CASE(systemd_boot_counts_tries),
        CASE(which_loader_is_meant),
        CASE(foreign_architectures_are_left_out),
        CASE(a_unified_kernel_image_boots),
        CASE(damaged_images_are_none),
        CASE(extlinux_boots),
        CASE(syslinux_boots),
        cmocka_unit_test(patterns),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
