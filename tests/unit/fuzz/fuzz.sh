#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzz the image parser: fuzz.sh [SECONDS] (default 600). Needs clang with libFuzzer (Debian: clang, libclang-rt-14-dev).
# New inputs are kept in a work folder; what crashes is named there. At the end the corpus is reduced to what adds coverage.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
library=$here/../../../qemu-backend/libpcow
work=${PCOW_FUZZ_DIR:-${TMPDIR:-/tmp}/pcow-fuzz}
seconds=${1:-600}

[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: '$seconds' is not a number of seconds" >&2; exit 2; }
command -v clang >/dev/null || { echo "fuzz.sh: clang is missing; apt-get install clang libclang-rt-14-dev" >&2; exit 2; }
mkdir -p "$work/corpus" "$work/found"
scratch=$(mktemp -d "$([[ -d /dev/shm ]] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/pcow-fuzz.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
clang -std=gnu11 -g -O1 -D_GNU_SOURCE '-DPCOW_VERSION="fuzz"' -I"$library" -I"$library/include" \
    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    "$library"/*/*.c "$here/fuzz_image.c" "$here/description.c" -lpthread -o "$work/fuzz_image"
export TMPDIR=$scratch
"$work/fuzz_image" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=400 -len_control=0 \
    -artifact_prefix="$work/found/" "$work/corpus" "$here/corpus"
mkdir -p "$work/reduced"
"$work/fuzz_image" -merge=1 -timeout=20 -rss_limit_mb=3000 "$work/reduced" "$here/corpus" "$work/corpus"
echo "fuzz.sh: nothing was found; the reduced corpus is in $work/reduced"
