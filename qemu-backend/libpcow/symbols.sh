#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# symbols.sh HEADER MAP LIBRARY ARCHIVE: the header declares what the map lists, and both libraries
# export that and nothing else.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Comments name functions too: the compiler takes them out. What is inline is the program's own.
${CC:-cc} -E -P "$1" | tr '\n' ' ' | sed 's/static inline [^{]*{[^}]*}//g' | tr ';' '\n' |
    grep -v typedef | grep -o 'pcow_[a-z0-9_]* *(' | tr -d '( ' | sort -u >"$work/header"
sed -n 's/^ *\(pcow_[a-z0-9_]*\);$/\1/p' "$2" | sort -u >"$work/map"
nm --dynamic --defined-only --extern-only --format=posix "$3" |
    awk '$2 != "A" {sub(/@.*/, "", $1); print $1}' | sort -u >"$work/library"
nm --defined-only --extern-only --format=posix "$4" | awk 'NF > 1 {print $1}' | sort -u >"$work/archive"
for exported in header library archive; do
    diff -u "$work/map" "$work/$exported"
done
