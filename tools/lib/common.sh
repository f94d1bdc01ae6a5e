# SPDX-License-Identifier: Apache-2.0
# Sourced by the commands in tools/: where things are, and how to say what happens.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$top/build
cache=${PCOW_CACHE_DIR:-/var/cache/pcow}
export PCOW_CACHE_DIR=$cache
# Of another checkout, too: compilers are told no absolute path but the one that is cut off here.
export CCACHE_DIR=$cache/ccache CCACHE_BASEDIR=$top CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=1G
# What a test or a tool run from here shall find first.
export PCOW_BIN_DIR=$build/bin
export PATH=$build/bin:$build/venv/bin:$PATH

step() { printf '== %s\n' "$*"; }
fail() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# run LOG COMMAND...: quiet while it goes well, everything when it does not.
run() {
    local log=$1
    shift
    mkdir -p "$(dirname "$log")"
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 60 "$log" >&2
        fail "failed: $* (all of it is in $log)"
    fi
}
