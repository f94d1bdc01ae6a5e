# SPDX-License-Identifier: Apache-2.0
# Sourced: the Python environment build/venv with pcowctl, meson and what the tests need.

build_python() {
    local venv=$build/venv stamp=$build/venv/.inputs inputs
    inputs=$(cat "$top"/{requirements,test-requirements}.txt "$top"/setup.cfg "$top"/pyproject.toml "$top"/tools/lib/build-python.sh | sha256sum)
    if [[ -e $stamp && $(<"$stamp") == "$inputs" ]]; then
        return 0
    fi
    step "making the Python environment build/venv"
    rm -rf "$venv"
    # The system's python3, not whatever comes first in PATH: its packages are the ones that apt has just installed.
    run "$build/logs/venv.log" /usr/bin/python3 -m venv "$venv"
    run "$build/logs/pip.log" "$venv/bin/pip" install --disable-pip-version-check \
        'meson>=1.5' 'pycotap==1.3.1' 'ruff==0.17.*' 'mypy>=1.11' -r "$top/test-requirements.txt"
    # pbr asks git for the version; a tree without history (an archive) has none.
    git -C "$top" rev-parse HEAD >/dev/null 2>&1 || export PBR_VERSION=${PBR_VERSION:-0.1.0}
    run "$build/logs/pip-pcow.log" "$venv/bin/pip" install --disable-pip-version-check -e "$top[libvirt,bench]"
    printf '%s' "$inputs" >"$stamp"
}
