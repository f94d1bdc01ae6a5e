# SPDX-License-Identifier: Apache-2.0
# Sourced: the QEMU that is built and tested every day, and the others that the same files fit.

qemu_default=10.0
qemu_all=(10.0 10.2)

# qemu_bin SERIES [OPTION...]: the folder for PCOW_BIN_DIR.
qemu_bin() {
    if [[ " $* " == *" --full "* ]]; then
        echo "$build/qemu-$1-full"
    elif [[ $1 == "$qemu_default" ]]; then
        echo "$build/bin"
    else
        echo "$build/qemu-$1"
    fi
}

# build_qemu SERIES [--full] [--update]: everything else has been built.
build_qemu() {
    local series=$1 bin file
    shift
    bin=$(qemu_bin "$series" "$@")
    run "$build/logs/qemu-$series.log" "$top/tools/lib/build-qemu.sh" "$@" "$build" "$series" "$bin"
    [[ $bin != "$build/bin" ]] || return 0
    for file in "$build"/bin/*; do
        [[ $file == */qemu-system-x86_64 ]] || ln -sf "$file" "$bin/"
    done
}
