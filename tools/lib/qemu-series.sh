# SPDX-License-Identifier: Apache-2.0
# Sourced: the QEMU that is built and tested every day, and the others that the same files fit.

qemu_default=10.0
qemu_all=(10.0 10.2)

# qemu_bin SERIES: the folder for PCOW_BIN_DIR.
qemu_bin() {
    if [[ $1 == "$qemu_default" ]]; then
        echo "$build/bin"
    else
        echo "$build/qemu-$1"
    fi
}

# build_qemu SERIES: everything else has been built.
build_qemu() {
    local bin file
    bin=$(qemu_bin "$1")
    run "$build/logs/qemu-$1.log" "$top/tools/lib/build-qemu.sh" "$build" "$1" "$bin"
    [[ $bin != "$build/bin" ]] || return 0
    for file in "$build"/bin/*; do
        [[ $file == */qemu-system-x86_64 ]] || ln -sf "$file" "$bin/"
    done
}
