#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the QEMU with the pcow backend.
#
#   build-qemu.sh [--full] [--update] BUILD_PREFIX SERIES BIN
#                                            make BIN/qemu-system-x86_64 of QEMU SERIES (10.0, 10.2);
#                                            libpcow must have been built in BUILD_PREFIX/meson
#   build-qemu.sh --unpack BUILD_PREFIX SERIES TREE     the source in TREE/src, without our patches
#   build-qemu.sh --compile BUILD_PREFIX SERIES TREE    what is there, with pcow if it knows that
#   build-qemu.sh --compile --cross SYSROOT BUILD_PREFIX SERIES TREE
#                                            for aarch64, which pcow is not for, with the libraries in
#                                            SYSROOT
#
# The source is Debian's package with Debian's patches, the newest that the suite or its security
# updates have, fetched from the mirrors that this machine's own apt uses and checked with Debian's
# archive key. Onto it come qemu-backend/patches and those of the series, in the order of their
# names, and the files of qemu-backend/qemu, which lie there as in QEMU's tree. Source, patched tree
# and objects stay in ${PCOW_CACHE_DIR:-/var/cache/pcow}; the first build takes some minutes, a later
# one compiles what has changed. --update looks whether there is a newer source than the one that is
# kept. PCOW_DEBIAN_MIRROR=URL overrides the mirror.
set -euo pipefail

# Where Debian has a series
declare -A QEMU_SUITES=([10.0]=trixie [10.2]=sid)
# The versions that QEMU was released with, or newer ones of the same kind.
QEMU_PYTHON_PACKAGES=('meson>=1.5,<2' 'pycotap==1.3.1')
QEMU_CONFIGURE=(--target-list=x86_64-softmmu --prefix=/usr --disable-relocatable
    --firmwarepath=/usr/share/qemu:/usr/share/seabios:/usr/lib/ipxe/qemu
    --disable-install-blobs --disable-docs --disable-download --disable-werror --disable-debug-info --enable-pcow
    # not all warnings (--disable-werror), as newer compilers find new ones; these have been defects of ours
    '--extra-cflags=-Werror=implicit-function-declaration -Werror=int-conversion')
QEMU_SMALL=(--without-default-features
    --enable-system --enable-tcg --enable-kvm --enable-pixman --enable-vnc --enable-slirp --enable-seccomp --enable-numa
    --enable-linux-aio --enable-linux-io-uring --enable-vhost-kernel --enable-vhost-net --enable-vhost-user)
# What debian/control of the package asks for on amd64, but virtfs, which the backend refuses, and
# blkio, which Debian 12 does not have. All in one program, without modules.
QEMU_FULL=(--disable-user --disable-tools --disable-guest-agent --disable-xen --disable-xkbcommon --disable-sndio
    --disable-virtfs --audio-drv-list=pipewire,pa,alsa,jack,oss,sdl
    --enable-attr --enable-bpf --enable-brlapi --enable-cap-ng --enable-capstone --enable-curl --enable-curses --enable-fdt
    --enable-fuse --enable-glusterfs --enable-gnutls --enable-gtk --enable-kvm --enable-libiscsi --enable-libnfs
    --enable-libpmem --enable-libssh --enable-libudev --enable-libusb --enable-linux-aio --enable-linux-io-uring
    --enable-nettle --enable-numa --enable-opengl --enable-pixman --enable-png --enable-rbd --enable-rdma --enable-sdl
    --enable-seccomp --enable-slirp --enable-smartcard --enable-spice --enable-usb-redir --enable-vde --enable-vhost-kernel
    --enable-vhost-net --enable-vhost-user --enable-virglrenderer --enable-vnc --enable-vnc-jpeg --enable-vnc-sasl
    --enable-vte --enable-zstd)

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cache=${PCOW_CACHE_DIR:-/var/cache/pcow}
QEMU_FILES=$top/qemu-backend/qemu       # as in QEMU's tree
QEMU_PATCHES=$top/qemu-backend/patches
QEMU_SERIES=                            # which QEMU
QEMU_UPDATE=                            # look for a newer source
QEMU_FEATURES=small
QEMU_SYSROOT=                           # of another kind of host
QEMU_CROSS=aarch64-linux-gnu
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

# The mirror of Debian's security updates in this machine's apt configuration. None in a development
# suite, nor beside a mirror that was given, which may be of another day.
security_mirror() {
    [ "${QEMU_SUITES[$QEMU_SERIES]}" != sid ] && [ -z "${PCOW_DEBIAN_MIRROR:-}" ] || return 0
    apt-get --print-uris update 2>/dev/null |
        sed -nE "s#^'(.*/debian-security/?)/dists/[a-z]+-security/InRelease'.*#\1#p" | head -n 1
}

# fetch_from MIRROR SECURITY DIRECTORY: the newest source package of the series, verified by apt; a
# private apt state, so the machine's own is not touched. SECURITY may be empty.
fetch_from() {
    local mirror=$1 security=$2 directory=$3 state version keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    local -a options
    state=$directory/apt
    rm -rf "$state"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/etc"
    echo "deb-src [signed-by=$keyring] $mirror ${QEMU_SUITES[$QEMU_SERIES]} main" >"$state/etc/sources.list"
    [ -z "$security" ] ||
        echo "deb-src [signed-by=$keyring] $security ${QEMU_SUITES[$QEMU_SERIES]}-security main" >>"$state/etc/sources.list"
    options=(-q -o "Dir::Etc::sourcelist=$state/etc/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$state/cache" -o Acquire::Languages=none
        -o Acquire::Retries=1 -o Acquire::http::Timeout=30
        -o APT::Update::Error-Mode=any -o "APT::Sandbox::User=$(id -un)")
    apt-get "${options[@]}" update || return
    # A suite may have several, as long as something was built with an older one.
    version=$(apt-cache "${options[@]}" showsrc qemu |
        sed -nE "s/^Version: (([0-9]+:)?${QEMU_SERIES//./\\.}\..*)/\1/p" | sort -V | tail -n 1)
    if [ -z "$version" ]; then
        echo "Debian ${QEMU_SUITES[$QEMU_SERIES]} on $mirror has no QEMU $QEMU_SERIES (any more)"
        return 1
    fi
    # What is there already is not fetched anew, if apt finds it to be what the archive has.
    rm -f "$directory"/qemu_*
    cp -p "$cache/downloads/qemu_$QEMU_SERIES".* "$directory/" 2>/dev/null || true
    (cd "$directory" && apt-get "${options[@]}" source --download-only "qemu=$version")
}

# Debian's part of the newest source that is kept; with the tarball that it is for.
cached_debian() {
    local debian
    while read -r debian; do
        if [ -e "$(tarball_of "$debian")" ]; then
            echo "$debian"
            return
        fi
    done < <(find "$cache/downloads" -maxdepth 1 -name "qemu_$QEMU_SERIES.*.debian.tar.xz" 2>/dev/null | sort -rV)
}

# tarball_of DEBIAN: "qemu_10.0.13+ds-0+deb13u1.debian.tar.xz" is for "qemu_10.0.13+ds.orig.tar.xz"
tarball_of() {
    echo "${1%-*}.orig.tar.xz"
}

# remove_older DEBIAN: the source packages of the series that are not this one
remove_older() {
    find "$cache/downloads" -maxdepth 1 -name "qemu_$QEMU_SERIES.*" ! -path "$1" ! -path "$(tarball_of "$1")" -delete
}

# fetch: into WORK, from the first mirror that has it; with security updates if those can be had
fetch() {
    local mirror security sources
    security=$(security_mirror)
    while read -r mirror; do
        for sources in ${security:+"$security"} ""; do
            say "fetching the source of QEMU $QEMU_SERIES"
            if fetch_from "$mirror" "$sources" "$WORK" >"$WORK/log" 2>&1; then
                [ -n "$sources" ] || [ "${QEMU_SUITES[$QEMU_SERIES]}" = sid ] ||
                    say "without Debian's security updates, for which no mirror answers"
                return
            fi
            sed 's/^/  /' "$WORK/log" >&2
        done
    done < <(debian_mirrors)
    return 1
}

fetch_source() {
    local debian
    mkdir -p "$cache/downloads"
    exec 8>"$cache/downloads/lock"
    flock 8
    if [ -z "$(cached_debian)" ] || [ -n "$QEMU_UPDATE" ]; then
        WORK=$(mktemp -d "$cache/downloads/.fetch.XXXXXX")
        # What a fetch that has failed leaves there is not verified.
        fetch ||
            die "no Debian archive that apt is configured for gives the source of QEMU $QEMU_SERIES in" \
                "${QEMU_SUITES[$QEMU_SERIES]}; give one with PCOW_DEBIAN_MIRROR=URL (one of Debian's snapshots" \
                "for a version that is there no more), or put qemu_$QEMU_SERIES.*.orig.tar.xz and" \
                "qemu_$QEMU_SERIES.*.debian.tar.xz into $cache/downloads"
        debian=$(find "$WORK" -maxdepth 1 -name "qemu_$QEMU_SERIES.*.debian.tar.xz" | sort -V | tail -n 1)
        # The second one says that both are there.
        mv -f "$(tarball_of "$debian")" "$cache/downloads/"
        mv -f "$debian" "$cache/downloads/"
        remove_older "$cache/downloads/$(basename "$debian")"
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

# Those of all series, and those that differ in this one
patches() {
    local file
    for file in "$QEMU_PATCHES"/*.patch "$QEMU_PATCHES/$QEMU_SERIES"/*.patch; do
        [ ! -e "$file" ] || printf '%s\t%s\n' "${file##*/}" "$file"
    done | sort | cut -f 2
}

# apply PATCH DIRECTORY LOG
apply() {
    patch -d "$2" -p1 --batch --forward --fuzz=0 --no-backup-if-mismatch --silent <"$1" >"$3" 2>&1 ||
        die "${1#"$top"/} does not apply: $(cat "$3")"
}

# unpack DEBIAN DIRECTORY: Debian's package as it is built
unpack() {
    local name
    mkdir -p "$2/debian"
    tar -xf "$(tarball_of "$1")" -C "$2" --strip-components=1
    tar -xf "$1" -C "$2/debian" --strip-components=1
    while read -r name; do
        apply "$2/debian/patches/$name" "$2" "$2/debian/log"
    done < <(sed -E 's/[[:space:]]*(#.*)?$//; /^$/d; s/ .*//' "$2/debian/patches/series")
    rm -f "$2/debian/log"
}

# unpack_patched DEBIAN TREE: all or nothing
unpack_patched() {
    local patch
    WORK=$(mktemp -d "$2.XXXXXX")
    chmod 755 "$WORK"
    unpack "$1" "$WORK/src"
    while read -r patch; do
        apply "$patch" "$WORK/src" "$WORK/log"
    done < <(patches)
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

# Not before the last patch
knows_pcow() {
    grep -q "^option('pcow'" "$1/src/meson_options.txt"
}

# is_known OPTION TREE: does what is there, for the host that it is for, have that?
is_known() {
    case $1 in
    --enable-pcow) [ -z "$QEMU_SYSROOT" ] && knows_pcow "$2" ;;
    --enable-kvm) [ -z "$QEMU_SYSROOT" ] ;;
    esac
}

configure() {
    local tree=$1 cc=${CC:-cc} option
    local -a options=()
    [ ! -e "$tree/build/.configured" ] || return 0
    for option in "${QEMU_CONFIGURE[@]}"; do
        if is_known "$option" "$tree"; then
            options+=("$option")
        fi
    done
    say "configuring QEMU"
    rm -rf "$tree/venv" "$tree/build"
    quietly "$tree/log" /usr/bin/python3 -m venv "$tree/venv"
    quietly "$tree/log" "$tree/venv/bin/pip" install --quiet --disable-pip-version-check "${QEMU_PYTHON_PACKAGES[@]}"
    if [ -n "$QEMU_SYSROOT" ]; then
        options+=("--cross-prefix=$QEMU_CROSS-")
        cc="$QEMU_CROSS-gcc --sysroot=$QEMU_SYSROOT"
        export PKG_CONFIG=pkg-config PKG_CONFIG_SYSROOT_DIR=$QEMU_SYSROOT
        export PKG_CONFIG_LIBDIR=$QEMU_SYSROOT/usr/lib/$QEMU_CROSS/pkgconfig:$QEMU_SYSROOT/usr/share/pkgconfig
    fi
    if command -v ccache >/dev/null; then
        cc="ccache $cc"
    fi
    mkdir "$tree/build"
    (
        cd "$tree/build"
        export PATH=$tree/venv/bin:$PATH PKG_CONFIG_PATH=$tree/libpcow CC=$cc
        quietly "$tree/log" ../src/configure --python="$tree/venv/bin/python3" "${options[@]}"
    )
    touch "$tree/build/.configured"
}

compile() {
    local tree=$1
    if [ ! -e "$tree/build/qemu-system-x86_64" ]; then
        say "compiling QEMU (some minutes, the first time only)"
    fi
    # Another tree, after a change of a patch, finds again what was compiled in this one
    PATH=$tree/venv/bin:$PATH PKG_CONFIG_PATH=$tree/libpcow CCACHE_BASEDIR=$tree \
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
    local prefix=$1 bin=$2 debian key tree file
    local archive=$prefix/meson/qemu-backend/libpcow/libpcow.a header=$top/qemu-backend/libpcow/include/pcow.h
    [ -e "$archive" ] || die "$archive is missing: build libpcow first (tools/build does)"
    mkdir -p "$cache" || die "cannot make $cache; give another folder with PCOW_CACHE_DIR"
    fetch_source
    debian=$(cached_debian)
    key=$({
        basename "$debian"
        patches | xargs -d '\n' cat
        # A file that went away would stay in the tree.
        (cd "$QEMU_FILES" && find . -type f | sort)
        echo "${QEMU_CONFIGURE[@]}" "${QEMU_PYTHON_PACKAGES[@]}" "${CC:-cc}" "$(uname -m)"
    } | sha256sum | cut -c 1-16)
    tree=$cache/qemu-$key

    exec 9>"$tree.lock"
    flock 9
    find "$cache" -maxdepth 1 -name "qemu-$key.??????" -exec rm -rf {} +
    [ -d "$tree" ] || unpack_patched "$debian" "$tree"
    touch "$tree"
    while read -r file; do
        copy_if_changed "$QEMU_FILES/$file" "$tree/src/$file"
    done < <(cd "$QEMU_FILES" && find . -type f)
    stage_library "$archive" "$header" "$tree/libpcow"
    configure "$tree"
    compile "$tree"
    copy_if_changed "$tree/build/qemu-system-x86_64" "$bin/qemu-system-x86_64"
    exec 9>&-
    clean_cache
}

# compile_part PREFIX TREE: of a series of patches, as many as were applied
compile_part() {
    local prefix=$1 tree=$2
    stage_library "$prefix/meson/qemu-backend/libpcow/libpcow.a" "$top/qemu-backend/libpcow/include/pcow.h" "$tree/libpcow"
    configure "$tree"
    if is_known --enable-pcow "$tree"; then
        PKG_CONFIG_PATH=$tree/libpcow quietly "$tree/log" "$tree/venv/bin/meson" configure "$tree/build" -Dpcow=enabled
    fi
    compile "$tree"
}

main() {
    local mode=build
    trap remove_work EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    while [[ ${1:-} == --* ]]; do
        case $1 in
        --unpack | --compile) mode=${1#--} ;;
        --full) QEMU_FEATURES=full ;;
        --update) QEMU_UPDATE=yes ;;
        --cross)
            QEMU_SYSROOT=$2
            shift ;;
        *) break ;;
        esac
        shift
    done
    case $QEMU_FEATURES in
    small) QEMU_CONFIGURE+=("${QEMU_SMALL[@]}") ;;
    full) QEMU_CONFIGURE+=("${QEMU_FULL[@]}") ;;
    esac
    if (($# != 3)) || [ -z "${QEMU_SUITES[$2]:-}" ]; then
        die "usage: build-qemu.sh [--unpack | --compile [--cross SYSROOT] | --full | --update] BUILD_PREFIX SERIES BIN, where SERIES is" \
            "one of ${!QEMU_SUITES[*]}"
    fi
    QEMU_SERIES=$2
    mkdir -p "$1" "$3"
    case $mode in
    build) build "$(cd "$1" && pwd)" "$(cd "$3" && pwd)" ;;
    unpack)
        fetch_source
        unpack "$(cached_debian)" "$3/src" ;;
    compile) compile_part "$(cd "$1" && pwd)" "$(cd "$3" && pwd)" ;;
    esac
}

main "$@"
