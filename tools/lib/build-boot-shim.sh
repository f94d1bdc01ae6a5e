# SPDX-License-Identifier: Apache-2.0
# Sourced: the small Linux from which guests boot that bring no kernel beside their image.

# After build_c: its programs, Debian's cloud kernel as this machine's apt has it, some of the kernel's modules.
build_boot_shim() {
    (cd "$top" && run "$build/logs/boot-shim.log" "$build/venv/bin/python" -m tools.lib.boot_shim \
        "$build/meson/qemu-backend/boot-shim" "$build/share/pcow-boot-shim")
}
