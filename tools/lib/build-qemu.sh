#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the QEMU with the pcow backend.
#
#   build-qemu.sh BUILD_PREFIX    make BUILD_PREFIX/bin/qemu-system-x86_64; libpcow must have been built in BUILD_PREFIX/meson
#
# The source is Debian trixie's package, fetched from the mirror that this machine's own apt uses and checked with Debian's
# archive key. Source, patched tree and objects stay in ${PCOW_CACHE_DIR:-/var/cache/pcow}; the first build takes some
# minutes, a later one compiles what has changed. PCOW_DEBIAN_MIRROR=URL overrides the mirror.
set -euo pipefail

QEMU_SERIES=10.0
QEMU_SUITE=trixie
# The versions that QEMU 10.0 was released with, or newer ones of the same kind.
QEMU_PYTHON_PACKAGES=('meson>=1.5,<2' 'pycotap==1.3.1')
QEMU_CONFIGURE=(--target-list=x86_64-softmmu --prefix=/usr --disable-relocatable
    --firmwarepath=/usr/share/qemu:/usr/share/seabios:/usr/lib/ipxe/qemu
    --without-default-features --disable-install-blobs --disable-docs --disable-download --disable-werror --disable-debug-info
    --enable-system --enable-tcg --enable-kvm --enable-pixman --enable-vnc --enable-slirp --enable-seccomp --enable-numa
    --enable-linux-aio --enable-linux-io-uring --enable-vhost-kernel --enable-vhost-net --enable-vhost-user
    # not all warnings (--disable-werror), as newer compilers find new ones; these have been defects of ours
    '--extra-cflags=-Werror=implicit-function-declaration -Werror=int-conversion')
# Files that the series adds as a whole: FILE IN-QEMU-TREE
QEMU_FILES=(
    hostmem-pcow.c backends/hostmem-pcow.c
    hostmem-pcow-access.c backends/hostmem-pcow-access.c
    hostmem-pcow-carrier.c backends/hostmem-pcow-carrier.c
    hostmem-pcow-cover.c backends/hostmem-pcow-cover.c
    hostmem-pcow-difference.c backends/hostmem-pcow-difference.c
    hostmem-pcow-error.c backends/hostmem-pcow-error.c
    hostmem-pcow-flush.c backends/hostmem-pcow-flush.c
    hostmem-pcow-hold.c backends/hostmem-pcow-hold.c
    hostmem-pcow-identity.c backends/hostmem-pcow-identity.c
    hostmem-pcow-incoming.c backends/hostmem-pcow-incoming.c
    hostmem-pcow-loadvm.c backends/hostmem-pcow-loadvm.c
    hostmem-pcow-mce.c backends/hostmem-pcow-mce.c
    hostmem-pcow-outgoing.c backends/hostmem-pcow-outgoing.c
    hostmem-pcow-places.c backends/hostmem-pcow-places.c
    hostmem-pcow-qmp.c backends/hostmem-pcow-qmp.c
    hostmem-pcow-report.c backends/hostmem-pcow-report.c
    hostmem-pcow-report.h backends/hostmem-pcow-report.h
    hostmem-pcow-savevm.c backends/hostmem-pcow-savevm.c
    hostmem-pcow-snapshot.c backends/hostmem-pcow-snapshot.c
    hostmem-pcow-space.c backends/hostmem-pcow-space.c
    hostmem-pcow-tcg.c backends/hostmem-pcow-tcg.c
    hostmem-pcow-tell.c backends/hostmem-pcow-tell.c
    hostmem-pcow-kvm-find.c target/i386/kvm/hostmem-pcow-kvm-find.c
    hostmem-pcow-kvm.c target/i386/kvm/hostmem-pcow-kvm.c
    hostmem-pcow-kvm-shared.c target/i386/kvm/hostmem-pcow-kvm-shared.c
    hostmem-pcow-kvm-store.c target/i386/kvm/hostmem-pcow-kvm-store.c
    hostmem-pcow-kvm.h target/i386/kvm/hostmem-pcow-kvm.h
    hostmem-pcow-x86.c target/i386/kvm/hostmem-pcow-x86.c
    hostmem-pcow-x86-address.c target/i386/kvm/hostmem-pcow-x86-address.c
    hostmem-pcow-x86-opcode.c target/i386/kvm/hostmem-pcow-x86-opcode.c
    hostmem-pcow-x86-decoder.h target/i386/kvm/hostmem-pcow-x86-decoder.h
    hostmem-pcow-x86.h target/i386/kvm/hostmem-pcow-x86.h
    hostmem-pcow-migration.h include/system/hostmem-pcow-migration.h
    hostmem-pcow.h include/system/hostmem-pcow.h
    vhost-pcow.c hw/virtio/vhost-pcow.c
    vhost-pcow-answer.c hw/virtio/vhost-pcow-answer.c
    vhost-pcow.h include/hw/virtio/vhost-pcow.h
    nvdimm-media.c hw/mem/nvdimm-media.c
    nvdimm-media.h include/hw/mem/nvdimm-media.h
    pcow.json qapi/pcow.json)

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cache=${PCOW_CACHE_DIR:-/var/cache/pcow}
QEMU_PART=$top/qemu-backend/qemu
WORK=                                   # what an exit has to remove

say() {
    printf 'build-qemu: %s\n' "$*"
}

die() {
    printf 'build-qemu: error: %s\n' "$*" >&2
    exit 1
}

# quietly LOG COMMAND...: says nothing unless the command fails
quietly() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 </dev/null || {
        tail -n 40 "$log" >&2
        die "'$1' failed; all of its output is in $log"
    }
}

# copy_if_changed FROM TO: keeps the time stamp of what is the same, for ninja
copy_if_changed() {
    cmp -s "$1" "$2" && return
    mkdir -p "$(dirname "$2")"
    cp "$1" "$2.new"
    mv "$2.new" "$2"
}

# The Debian archives in this machine's apt configuration, the likeliest first. apt itself reads its .list and .sources files.
debian_mirrors() {
    if [ -n "${PCOW_DEBIAN_MIRROR:-}" ]; then
        echo "$PCOW_DEBIAN_MIRROR"
        return
    fi
    apt-get --print-uris update 2>/dev/null |
        sed -nE "s#^'(.*)/dists/(bullseye|bookworm|trixie|forky|sid|oldstable|stable|testing|unstable)/InRelease'.*#\1#p" |
        awk '!seen[$0]++ { if ($0 ~ /\/debian\/?$/) print; else rest = rest $0 "\n" } END { printf "%s", rest }'
}

# fetch_from MIRROR DIRECTORY: the orig tarball, verified by apt; a private apt state, so the machine's own is not touched
fetch_from() {
    local mirror=$1 directory=$2 state keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    local -a apt
    state=$directory/apt
    rm -rf "$state"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/etc"
    echo "deb-src [signed-by=$keyring] $mirror $QEMU_SUITE main" >"$state/etc/sources.list"
    apt=(apt-get -q -o "Dir::Etc::sourcelist=$state/etc/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$state/cache" -o Acquire::Languages=none
        -o APT::Update::Error-Mode=any -o "APT::Sandbox::User=$(id -un)")
    "${apt[@]}" update && (cd "$directory" && "${apt[@]}" source --download-only --tar-only qemu)
}

cached_tarball() {
    find "$cache/downloads" -maxdepth 1 -name "qemu_$QEMU_SERIES.*.orig.tar.xz" 2>/dev/null | sort -V | tail -n 1
}

fetch_source() {
    local mirror tarball
    mkdir -p "$cache/downloads"
    exec 8>"$cache/downloads/lock"
    flock 8
    if [ -z "$(cached_tarball)" ]; then
        WORK=$(mktemp -d "$cache/downloads/.fetch.XXXXXX")
        while read -r mirror; do
            say "fetching the QEMU source of Debian $QEMU_SUITE"
            fetch_from "$mirror" "$WORK" >"$WORK/log" 2>&1 && break
            sed 's/^/  /' "$WORK/log" >&2
        done < <(debian_mirrors)
        tarball=$(find "$WORK" -maxdepth 1 -name 'qemu_*.orig.tar.xz')
        [ -n "$tarball" ] || die "no Debian archive that apt is configured for has the source of qemu in $QEMU_SUITE;" \
            "give one with PCOW_DEBIAN_MIRROR=URL, or put qemu_$QEMU_SERIES.*.orig.tar.xz into $cache/downloads"
        case $tarball in
        */qemu_"$QEMU_SERIES".*) mv "$tarball" "$cache/downloads/" ;;
        *) die "Debian $QEMU_SUITE has $(basename "$tarball") now, but the patches are for QEMU $QEMU_SERIES;" \
            "put qemu_$QEMU_SERIES.*.orig.tar.xz into $cache/downloads" ;;
        esac
        remove_work
    fi
    exec 8>&-
}

remove_work() {
    if [ -n "$WORK" ]; then
        rm -rf "$WORK"
    fi
    WORK=
}

# unpack TARBALL TREE: all or nothing
unpack() {
    local patch
    WORK=$(mktemp -d "$2.XXXXXX")
    chmod 755 "$WORK"
    mkdir "$WORK/src"
    tar -xf "$1" -C "$WORK/src" --strip-components=1
    for patch in "$QEMU_PART"/patches/*.patch; do
        patch -d "$WORK/src" -p1 --batch --forward --fuzz=0 --silent <"$patch" >"$WORK/log" 2>&1 ||
            die "$(basename "$patch") does not apply to $(basename "$1"): $(cat "$WORK/log")"
    done
    mv "$WORK" "$2"
    WORK=
}

# The archive with only the public symbols: libpcow and QEMU both have a crc32c(), for one.
stage_library() {
    local archive=$1 header=$2 stage=$3
    copy_if_changed "$archive" "$stage/libpcow.a"
    copy_if_changed "$header" "$stage/include/pcow.h"
    [ -e "$stage/libpcow.pc" ] || cat >"$stage/libpcow.pc" <<END
Name: libpcow
Description: virtual machine images for byte-addressable storage
Version: 0
Cflags: -I$stage/include
Libs: -L$stage -lpcow -pthread
END
}

configure() {
    local tree=$1 cc=${CC:-cc}
    [ ! -e "$tree/build/.configured" ] || return 0
    say "configuring QEMU"
    rm -rf "$tree/venv" "$tree/build"
    quietly "$tree/log" /usr/bin/python3 -m venv "$tree/venv"
    quietly "$tree/log" "$tree/venv/bin/pip" install --quiet --disable-pip-version-check "${QEMU_PYTHON_PACKAGES[@]}"
    if command -v ccache >/dev/null; then
        cc="ccache $cc"
    fi
    mkdir "$tree/build"
    (
        cd "$tree/build"
        export PATH=$tree/venv/bin:$PATH PKG_CONFIG_PATH=$tree/libpcow CC=$cc
        quietly "$tree/log" ../src/configure --python="$tree/venv/bin/python3" "${QEMU_CONFIGURE[@]}"
    )
    touch "$tree/build/.configured"
}

compile() {
    local tree=$1
    if [ ! -e "$tree/build/qemu-system-x86_64" ]; then
        say "compiling QEMU (some minutes, the first time only)"
    fi
    PATH=$tree/venv/bin:$PATH PKG_CONFIG_PATH=$tree/libpcow \
        quietly "$tree/log" ninja -C "$tree/build" qemu-system-x86_64
}

# Trees that nobody has used for a month.
clean_cache() {
    local tree
    for tree in "$cache"/qemu-*/; do
        tree=${tree%/}
        if [ -n "$(find "$tree" -maxdepth 0 -mtime +30)" ]; then
            (flock -n 9 && rm -rf "$tree") 9>>"$tree.lock" || true
        fi
    done
}

build() {
    local prefix=$1 tarball key tree i
    local archive=$prefix/meson/qemu-backend/libpcow/libpcow.a header=$top/qemu-backend/libpcow/include/pcow.h
    [ -e "$archive" ] || die "$archive is missing: build libpcow first (tools/build does)"
    mkdir -p "$cache" || die "cannot make $cache; give another folder with PCOW_CACHE_DIR"
    fetch_source
    tarball=$(cached_tarball)
    key=$({
        basename "$tarball"
        cat "$QEMU_PART"/patches/*.patch
        echo "${QEMU_CONFIGURE[@]}" "${QEMU_PYTHON_PACKAGES[@]}" "${CC:-cc}" "$(uname -m)"
    } | sha256sum | cut -c 1-16)
    tree=$cache/qemu-$key

    exec 9>"$tree.lock"
    flock 9
    find "$cache" -maxdepth 1 -name "qemu-$key.??????" -exec rm -rf {} +
    [ -d "$tree" ] || unpack "$tarball" "$tree"
    touch "$tree"
    for ((i = 0; i < ${#QEMU_FILES[@]}; i += 2)); do
        copy_if_changed "$QEMU_PART/${QEMU_FILES[i]}" "$tree/src/${QEMU_FILES[i + 1]}"
    done
    stage_library "$archive" "$header" "$tree/libpcow"
    configure "$tree"
    compile "$tree"
    copy_if_changed "$tree/build/qemu-system-x86_64" "$prefix/bin/qemu-system-x86_64"
    exec 9>&-
    clean_cache
}

main() {
    trap remove_work EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    case ${1:-} in
    '' | -*) die "usage: build-qemu.sh BUILD_PREFIX" ;;
    *)
        mkdir -p "$1"
        build "$(cd "$1" && pwd)"
        ;;
    esac
}

main "$@"
