#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzz what the boot shim reads of a guest: fuzz.sh [SECONDS] (default 600). Needs clang with libFuzzer (Debian: clang, libclang-rt-14-dev).
# New inputs are kept in a work folder; what crashes is named there.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
shim=$here/../../../../qemu-backend/boot-shim
work=${PCOW_FUZZ_DIR:-${TMPDIR:-/tmp}/pcow-fuzz-boot}
seconds=${1:-600}

[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: '$seconds' is not a number of seconds" >&2; exit 2; }
command -v clang >/dev/null || { echo "fuzz.sh: clang is missing; apt-get install clang libclang-rt-14-dev" >&2; exit 2; }
mkdir -p "$work/corpus" "$work/found"
scratch=$(mktemp -d "$([[ -d /dev/shm ]] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/pcow-fuzz-boot.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
clang -std=gnu11 -g -O1 -D_GNU_SOURCE -I"$shim" -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    "$shim"/config/*.c "$shim"/script/*.c "$shim"/find.c "$here/fuzz_boot.c" -o "$work/fuzz_boot"
export TMPDIR=$scratch
"$work/fuzz_boot" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2000 -max_len=8000 \
    -artifact_prefix="$work/found/" "$work/corpus" "$here/corpus"
echo "fuzz.sh: nothing was found"
