# SPDX-License-Identifier: Apache-2.0
# Sourced: Debian packages that a step needs. Installs only what is missing.

# For libpcow, its tools and QEMU.
packages_build=(build-essential ccache pkg-config ninja-build git ca-certificates xz-utils dpkg-dev flex bison
    python3 python3-venv python3-dev
    libglib2.0-dev libpixman-1-dev zlib1g-dev liblzma-dev libzstd-dev libfdt-dev libseccomp-dev libslirp-dev libnuma-dev
    liburing-dev libaio-dev libjson-c-dev libnbd-dev nbdkit-plugin-dev libcmocka-dev libvirt-dev libxxhash-dev)
# For tools/build --full: what Debian's QEMU is built with.
packages_qemu_full=(libattr1-dev libasound2-dev libbpf-dev libbrlapi-dev libcacard-dev libcap-ng-dev libcapstone-dev
    libcurl4-gnutls-dev libdrm-dev libepoxy-dev libfuse3-dev libgbm-dev libglusterfs-dev libgnutls28-dev libgtk-3-dev
    libibumad-dev libibverbs-dev libiscsi-dev libjack-jackd2-dev libjpeg-dev libncurses-dev libnfs-dev libpipewire-0.3-dev
    libpmem-dev libpng-dev libpulse-dev librbd-dev librdmacm-dev libsasl2-dev libsdl2-dev libspice-protocol-dev
    libspice-server-dev libssh-dev libudev-dev libusb-1.0-0-dev libusbredirparser-dev libvdeplug-dev libvirglrenderer-dev
    libvte-2.91-dev nettle-dev)
# For tools/qemu-series cross, and what it unpacks of aarch64.
packages_cross=(mmdebstrap gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
packages_sysroot=(libc6-dev libglib2.0-dev libpixman-1-dev zlib1g-dev libfdt-dev libseccomp-dev libslirp-dev libnuma-dev
    liburing-dev libaio-dev)
# For the boot shim's kernel.
packages_kernel=(bc libelf-dev lz4)
# To run images and virtual machines.
packages_run=(qemu-utils qemu-system-data seabios ipxe-qemu libvirt-daemon libvirt-daemon-system libvirt-clients
    debootstrap e2fsprogs util-linux cpio busybox-static acl nbdkit libnbd-bin fuse3)
# For tools/openstack-aio.
packages_openstack=(mariadb-server mariadb-client rabbitmq-server erlang-base genisoimage
    openssh-client openssh-server)
# For the tests only.
packages_test=(mmdebstrap genisoimage ovmf clang libclang-rt-14-dev ndctl xfsprogs fdisk apparmor openssh-client checkpolicy semodule-utils)

packages_missing() {
    local package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
    done
}

# Without systemd (a container, a chroot) nothing must be started by the installation: nobody would ever stop it.
packages_hold_services() {
    [[ -d /run/systemd/system || -e /usr/sbin/policy-rc.d ]] && return 1
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
}

packages_install() {
    local missing
    mapfile -t missing < <(packages_missing "$@")
    ((${#missing[@]})) || return 0
    ((EUID == 0)) || fail "these packages are missing, and installing them needs root: ${missing[*]}"
    step "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # A subshell, whose end, whatever it is, lets services start again.
    (
        if packages_hold_services; then
            trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        fi
        if ! apt-get install -y --no-install-recommends "${missing[@]}" >"$build/logs/apt.log" 2>&1 </dev/null; then
            # The lists may be missing or old.
            run "$build/logs/apt-update.log" apt-get update
            apt-get install -y --no-install-recommends "${missing[@]}" >"$build/logs/apt.log" 2>&1 </dev/null || {
                tail -n 40 "$build/logs/apt.log" >&2
                fail "apt-get could not install: ${missing[*]}"
            }
        fi
    ) || exit 1
    return 0
}
