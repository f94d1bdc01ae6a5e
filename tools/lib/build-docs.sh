# SPDX-License-Identifier: Apache-2.0
# Sourced: build/docs, the Python environment that makes the documentation, and its making.

build_docs_environment() {
    local venv=$build/docs inputs
    inputs=$(cat "$top"/doc/requirements.txt "$top"/tools/lib/build-docs.sh)
    if [[ -e $venv/.inputs && $(<"$venv/.inputs") == "$inputs" ]]; then
        return 0
    fi
    step "making the Python environment build/docs"
    rm -rf "$venv"
    run "$build/logs/venv-docs.log" /usr/bin/python3 -m venv "$venv"
    run "$build/logs/pip-docs.log" "$venv/bin/pip" install --disable-pip-version-check \
        -r "$top/doc/requirements.txt"
    printf '%s' "$inputs" >"$venv/.inputs"
}

# A warning is an error: a link that leads nowhere, a page that no table of contents has.
build_docs() {
    local builder
    for builder in html man; do
        "$build/docs/bin/sphinx-build" -W --keep-going -q -E -b "$builder" \
            "$top/doc/source" "$build/docs/$builder" || return 1
    done
}
