#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# archive.sh ARCHIVE MAP OUTPUT: one object of all of ARCHIVE, in which only the symbols that MAP exports
# are global. A program that links libpcow has names of its own; crc32c() is a likely one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed -n 's/^ *\(pcow_[a-z0-9_]*\);$/\1/p' "$2" >"$work/symbols"
${LD:-ld} -r --whole-archive "$1" -o "$work/all.o"
${OBJCOPY:-objcopy} --keep-global-symbols="$work/symbols" "$work/all.o" "$work/libpcow.o"
rm -f "$3"
${AR:-ar} rcsD "$3" "$work/libpcow.o"
