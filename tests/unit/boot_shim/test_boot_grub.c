/* SPDX-License-Identifier: BSD-3-Clause */
/* Configurations of GRUB as distributions write them. */
#include "place.h"

#include <errno.h>
#include <string.h>

#define DEBIAN "/boot/grub/grub.cfg"
#define DEBIAN_ENV "/boot/grub/grubenv"
#define OLD "gnulinux-6.1.0-50-cloud-amd64-advanced-" ROOT_UUID
#define SIMPLE "gnulinux-simple-" ROOT_UUID
#define ADVANCED "gnulinux-advanced-" ROOT_UUID
#define HEADER "# GRUB Environment Block\n"

static struct volume *debian(struct place *place)
{
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_data(root, DEBIAN, "debian-12.cfg");
    place_kernel(root, "/boot/vmlinuz-6.1.0-56-cloud-amd64",
                 "/boot/initrd.img-6.1.0-56-cloud-amd64");
    place_kernel(root, "/boot/vmlinuz-6.1.0-50-cloud-amd64",
                 "/boot/initrd.img-6.1.0-50-cloud-amd64");
    return root;
}

static void debian_boots_the_newest(void **state)
{
    struct place *place = *state;

    debian(place);
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/boot/vmlinuz-6.1.0-56-cloud-amd64");
    assert_int_equal(place->choice.initrds_count, 1);
    assert_string_equal(place->choice.initrds[0].path, "/boot/initrd.img-6.1.0-56-cloud-amd64");
    assert_string_equal(place->choice.options,
                        "root=UUID=" ROOT_UUID " ro console=tty0 console=ttyS0,115200");
    assert_string_equal(place->choice.id, SIMPLE);
    assert_int_equal(place->menu.count, 5);
    assert_string_equal(place->menu.items[3].title,
                        "Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux "
                        "6.1.0-50-cloud-amd64");
    assert_string_equal(place_saved(place, "next_entry"), "-");
    assert_false(place->menu.locked);
}

/* GRUB_DEFAULT=saved and grub-set-default, with names, titles and numbers. */
static void debian_boots_what_was_saved(void **state)
{
    static const char *const names[] = {
        ADVANCED ">" OLD,
        "1>2",
        "Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux 6.1.0-50-cloud-amd64",
        ADVANCED ">2",
    };
    struct place *place = *state;
    struct volume *root = debian(place);

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char block[1025];

        memset(block, '#', 1024);
        block[1024] = '\0';
        memcpy(block, HEADER, strlen(HEADER));
        memcpy(block + strlen(HEADER), "saved_entry=", 12);
        memcpy(block + strlen(HEADER) + 12, names[i], strlen(names[i]));
        block[strlen(HEADER) + 12 + strlen(names[i])] = '\n';
        place_put(root, DEBIAN_ENV, block);
        assert_int_equal(place_boot(place), 0);
        assert_string_equal(place->choice.kernel.path, "/boot/vmlinuz-6.1.0-50-cloud-amd64");
        assert_string_equal(place->choice.id, OLD);
    }
    place_put(root, DEBIAN_ENV, HEADER "saved_entry=nothing-of-that-name\n");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.id, SIMPLE);
}

/* grub-reboot: once, and that it was used is written. */
static void debian_boots_an_entry_once(void **state)
{
    struct place *place = *state;
    struct volume *root = debian(place);

    place_put(root, DEBIAN_ENV, HEADER "saved_entry=0\nnext_entry=" ADVANCED ">" OLD "\n");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.id, OLD);
    assert_string_equal(place_saved(place, "next_entry"), "");
    assert_string_equal(place->menu.saves->path, DEBIAN_ENV);
    assert_ptr_equal(place->menu.saves->volume, root);
}

static void a_kernel_that_is_gone_is_named(void **state)
{
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_data(root, DEBIAN, "debian-12.cfg");
    assert_int_equal(place_boot(place), -ENOENT);
    assert_string_equal(place->failure.text, "\"Debian GNU/Linux\" names the kernel "
                                             "/boot/vmlinuz-6.1.0-56-cloud-amd64, which is not on "
                                             "pmem0p1");
}

static struct volume *ubuntu(struct place *place)
{
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_data(root, DEBIAN, "ubuntu-22.04.cfg");
    place_kernel(root, "/boot/vmlinuz-5.15.0-100-generic", "/boot/initrd.img-5.15.0-100-generic");
    return root;
}

/* Its cloud images try without the initrd, which has the drivers here. */
static void ubuntu_boots_with_its_initrd(void **state)
{
    struct place *place = *state;

    ubuntu(place);
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/boot/vmlinuz-5.15.0-100-generic");
    assert_int_equal(place->choice.initrds_count, 1);
    assert_string_equal(place->choice.options, "root=PARTUUID=aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee "
                                               "ro console=tty1 console=ttyS0");
    assert_int_equal(place->menu.count, 2);
    assert_string_equal(place_saved(place, "recordfail"), "-");
}

static void ubuntu_records_that_it_tries(void **state)
{
    struct place *place = *state;

    place_put(ubuntu(place), DEBIAN_ENV, HEADER "####");
    assert_int_equal(place_boot(place), 0);
    assert_int_equal(place->choice.initrds_count, 1);
    assert_string_equal(place_saved(place, "recordfail"), "1");
    assert_string_equal(place_saved(place, "initrdfail"), "1");
}

#define FEDORA "/loader/entries/0123456789abcdef0123456789abcdef-"

/* /boot is a file system of its own, and the entries are files. */
static struct volume *fedora(struct place *place)
{
    struct volume *boot, *root;

    place_volume(place, "vfat", "ABCD-1234", 1);
    boot = place_volume(place, "ext4", "99999999-2222-3333-4444-555555555555", 2);
    root = place_volume(place, "btrfs", ROOT_UUID, 3);
    (void)root;
    place_data(boot, "/grub2/grub.cfg", "fedora-40.cfg");
    place_put(boot, FEDORA "6.9.0-9.fc40.x86_64.conf",
              "title Fedora Linux (6.9.0-9.fc40.x86_64) 40 (Cloud Edition)\n"
              "version 6.9.0-9.fc40.x86_64\nlinux /vmlinuz-6.9.0-9.fc40.x86_64\n"
              "initrd /initramfs-6.9.0-9.fc40.x86_64.img $tuned_initrd\n"
              "options $kernelopts $tuned_params\ngrub_users $grub_users\n"
              "grub_arg --unrestricted\ngrub_class fedora\n");
    place_put(boot, FEDORA "6.10.0-1.fc40.x86_64.conf",
              "title Fedora Linux (6.10.0-1.fc40.x86_64) 40 (Cloud Edition)\r\n"
              "version 6.10.0-1.fc40.x86_64\r\nlinux /vmlinuz-6.10.0-1.fc40.x86_64\r\n"
              "initrd /initramfs-6.10.0-1.fc40.x86_64.img\r\n"
              "options root=UUID=" ROOT_UUID
              " ro rootflags=subvol=root console=ttyS0,115200n8\r\n");
    place_put(boot, FEDORA "0-rescue.conf",
              "title Fedora Linux (0-rescue)\nversion 0-rescue\nlinux /vmlinuz-0-rescue\n");
    place_put(boot, "/loader/entries/broken.conf", "title nothing\n");
    place_kernel(boot, "/vmlinuz-6.9.0-9.fc40.x86_64", "/initramfs-6.9.0-9.fc40.x86_64.img");
    place_kernel(boot, "/vmlinuz-6.10.0-1.fc40.x86_64", "/initramfs-6.10.0-1.fc40.x86_64.img");
    return boot;
}

static void fedora_boots_the_newest(void **state)
{
    struct place *place = *state;
    struct volume *boot = fedora(place);

    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz-6.10.0-1.fc40.x86_64");
    assert_ptr_equal(place->choice.kernel.volume, boot);
    assert_string_equal(place->choice.options,
                        "root=UUID=" ROOT_UUID " ro rootflags=subvol=root console=ttyS0,115200n8");
    assert_int_equal(place->menu.count, 3);
    assert_string_equal(place->menu.items[2].title, "Fedora Linux (0-rescue)");
}

static void fedora_boots_what_was_saved(void **state)
{
    struct place *place = *state;
    struct volume *boot = fedora(place);

    place_put(boot, "/grub2/grubenv",
              HEADER "saved_entry=0123456789abcdef0123456789abcdef-6.9.0-9.fc40.x86_64\n"
                     "boot_success=0\nboot_counter=2\n####");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz-6.9.0-9.fc40.x86_64");
    assert_int_equal(place->choice.initrds_count, 1);
    assert_string_equal(place->choice.options,
                        "root=UUID=" ROOT_UUID " ro rootflags=subvol=root no_timer_check "
                        "console=tty1 console=ttyS0,115200n8  ");
    assert_string_equal(place_saved(place, "boot_counter"), "1");
    assert_string_equal(place_saved(place, "boot_success"), "0");
    assert_string_equal(place_saved(place, "boot_indeterminate"), "unset");
}

/* Who has set a password is not asked which entry. */
static void a_password_locks_the_menu(void **state)
{
    struct place *place = *state;
    struct volume *boot = fedora(place);

    place_put(boot, "/grub2/user.cfg", "GRUB2_PASSWORD=grub.pbkdf2.sha512.10000.AB.CD\n");
    assert_int_equal(place_boot(place), 0);
    assert_true(place->menu.locked);
}

static void suse_boots(void **state)
{
    struct place *place = *state;
    struct volume *root = place_volume(place, "xfs", ROOT_UUID, 3);

    place_data(root, "/boot/grub2/grub.cfg", "suse-15.cfg");
    place_kernel(root, "/boot/vmlinuz-5.14.21-150500.55.52-default",
                 "/boot/initrd-5.14.21-150500.55.52-default");
    place_kernel(root, "/boot/vmlinuz-5.14.21-150500.55.44-default",
                 "/boot/initrd-5.14.21-150500.55.44-default");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/boot/vmlinuz-5.14.21-150500.55.52-default");
    assert_string_equal(place->choice.options,
                        "root=UUID=" ROOT_UUID " console=ttyS0,115200 net.ifnames=0 splash=silent "
                        "mitigations=auto dyndbg=\"file svcsock.c +p\"");
    place_put(root, "/boot/grub2/grubenv",
              HEADER "saved_entry=Advanced options for openSUSE Leap 15.5>openSUSE Leap 15.5, with "
                     "Linux 5.14.21-150500.55.44-default\nenv_block=512+1\n");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.kernel.path, "/boot/vmlinuz-5.14.21-150500.55.44-default");
}

static void what_is_no_linux_is_named(void **state)
{
    struct place *place = *state;
    struct volume *root = place_volume(place, "xfs", ROOT_UUID, 3);

    place_data(root, "/boot/grub2/grub.cfg", "suse-15.cfg");
    place_put(root, "/boot/grub2/grubenv", HEADER "saved_entry=2\n");
    assert_int_equal(place_boot(place), -ENOEXEC);
    assert_string_equal(place->failure.text,
                        "\"openSUSE Leap 15.5, with Xen hypervisor\" runs \"multiboot2\", which "
                        "this boot shim cannot");
}

/* The configuration on the EFI system partition names another one. */
static void a_stub_is_followed(void **state)
{
    struct place *place = *state;
    struct volume *esp = place_volume(place, "vfat", "ABCD-1234", 1);
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 2);

    place_put(esp, "/EFI/debian/grub.cfg",
              "search.fs_uuid " ROOT_UUID " root hd0,gpt2\nset prefix=($root)'/elsewhere/grub'\n"
              "configfile $prefix/grub.cfg\n");
    place_data(root, "/elsewhere/grub/grub.cfg", "debian-12.cfg");
    place_kernel(root, "/boot/vmlinuz-6.1.0-56-cloud-amd64",
                 "/boot/initrd.img-6.1.0-56-cloud-amd64");
    assert_int_equal(place_boot(place), 0);
    assert_string_equal(place->choice.id, SIMPLE);
    assert_ptr_equal(place->choice.kernel.volume, root);
}

static void nothing_is_said_to_be_nothing(void **state)
{
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    assert_int_equal(place_boot(place), -ENOENT);
    assert_string_equal(place->failure.text,
                        "no file system has a configuration of GRUB, systemd-boot or extlinux");
    place_put(root, DEBIAN, "# empty\n");
    assert_int_equal(place_boot(place), -ENOEXEC);
    assert_string_equal(place->failure.text, DEBIAN " of pmem0p1 has no entry that boots");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, place_setup, place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(debian_boots_the_newest),       CASE(debian_boots_what_was_saved),
        CASE(debian_boots_an_entry_once),    CASE(a_kernel_that_is_gone_is_named),
        CASE(ubuntu_boots_with_its_initrd),  CASE(ubuntu_records_that_it_tries),
        CASE(fedora_boots_the_newest),       CASE(fedora_boots_what_was_saved),
        CASE(a_password_locks_the_menu),     CASE(suse_boots),
        CASE(what_is_no_linux_is_named),     CASE(a_stub_is_followed),
        CASE(nothing_is_said_to_be_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
