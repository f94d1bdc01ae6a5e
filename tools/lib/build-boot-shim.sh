# SPDX-License-Identifier: Apache-2.0
# Sourced: the small Linux from which guests boot that bring no kernel beside their image.

# build_boot_shim [--update]: after build_c, its programs and a kernel. --update looks for a newer source of that.
build_boot_shim() {
    (cd "$top" && run "$build/logs/boot-shim.log" "$build/venv/bin/python" -m tools.lib.boot_shim "$@" \
        "$build/meson/qemu-backend/boot-shim" "$build/share/pcow-boot-shim")
}
