#!/bin/bash
# Compiles the kernels for this machine and for 64-bit ARM, runs both (ARM under qemu) on the same inputs, and ends
# non-zero unless every table of both gives the same bits. Needs g++ on x86-64, g++-aarch64-linux-gnu and qemu-user.
#
#   bash tests/native/arm.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for tool in g++ aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$tool" >/dev/null || { echo "arm: $tool is missing (Debian: g++-aarch64-linux-gnu qemu-user)" >&2; exit 1; }
done

# The flags stand in CMakeLists.txt alone.
flags_of() { sed -nE "s/^ *set\(RAYDZ_$1 (.*)\)$/\1/p" CMakeLists.txt | head -1; }
arithmetic=$(flags_of ARITHMETIC)
build=build/arm
mkdir -p "$build"

# binary COMPILER DEFINITION ISA...
binary() {
    local compiler=$1 definition=$2 objects=()
    shift 2
    for isa in "$@"; do
        local own=""
        [ "$definition $isa" = "RAYDZ_X86 baseline" ] || own=$(flags_of "FLAGS_$isa")
        # shellcheck disable=SC2086
        "$compiler" -std=c++17 $arithmetic $own -Wall -Wextra -Werror -DRAYDZ_ISA="$isa" -c native/kernels.cpp \
            -o "$build/$definition-$isa.o"
        objects+=("$build/$definition-$isa.o")
    done
    "$compiler" -std=c++17 -O2 -static -Wall -Wextra -D"$definition" tests/native/digest.cpp native/dispatch.cpp \
        "${objects[@]}" -o "$build/digest-$definition"
}
binary g++ RAYDZ_X86 baseline avx2 avx512
binary aarch64-linux-gnu-g++ RAYDZ_ARM baseline neon

[ "$(aarch64-linux-gnu-objdump -d "$build/RAYDZ_ARM-neon.o" | grep -cE 'fsqrt\s+v[0-9]+\.4s')" -gt 0 ] ||
    { echo "arm: the compiler did not vectorise for NEON" >&2; exit 1; }
digests=$({ "$build/digest-RAYDZ_X86" | sed 's/^/x86-64 /'; qemu-aarch64 "$build/digest-RAYDZ_ARM" | sed 's/^/arm64 /'; })
echo "$digests"
[ "$(awk '{print $3}' <<<"$digests" | sort -u | wc -l)" = 1 ] || { echo "arm: the bits differ" >&2; exit 1; }
grep -q "arm64 neon" <<<"$digests" && echo "arm: all tables have the same bits"
