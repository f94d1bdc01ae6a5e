# SPDX-License-Identifier: Apache-2.0
# Sourced: libpcow and its tools.

# build_c DIRECTORY [MESON OPTION...]
build_c() {
    local directory=$1
    shift
    if [[ ! -e $directory/build.ninja ]]; then
        rm -rf "$directory"
        run "$build/logs/meson-$(basename "$directory").log" meson setup "$directory" "$top" "$@"
    fi
    run "$build/logs/ninja-$(basename "$directory").log" ninja -C "$directory"
}

# The programs that users and tests run, in one place.
link_programs() {
    local program
    mkdir -p "$build/bin"
    for program in img/pcow-img io/pcow-io bench/pcow-bench nbd/nbdkit-pcow-plugin.so; do
        ln -sfn "$build/meson/qemu-backend/tools/$program" "$build/bin/$(basename "$program")"
    done
}
