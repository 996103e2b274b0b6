#!/bin/bash
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, in build/sanitize, and runs their tests on
# that build, over every instruction set of this machine. Ends non-zero at the first finding, whose report is shown.
#
#   bash tests/native/sanitize.sh .venv/bin/python [pytest's arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=$1
shift
tests=("$@")
if [ ${#tests[@]} -eq 0 ]; then
    tests=(tests/ops/test_adamw.py tests/ops/test_elementwise.py tests/ops/test_rounding.py tests/ops/test_reduction.py
        tests/ops/test_into.py tests/ops/test_batch.py
        tests/native/test_module.py tests/native/test_pool.py tests/offload/test_aio.py tests/offload/test_nvme.py)
fi
compiler=${CXX:-g++}
asan=$("$compiler" -print-file-name=libasan.so)
if [ ! -e "$asan" ]; then
    echo "sanitize: $compiler has no libasan.so; set CXX to a g++ that comes with it (Debian: libgcc-12-dev)" >&2
    exit 1
fi
# The linker's script for libasan.so cannot be preloaded, what it points to can; libstdc++ must be there before it.
preload="$(readlink -f "$asan") $(readlink -f "$("$compiler" -print-file-name=libstdc++.so)")"

build=build/sanitize
version=$("$python" -c 'from raydz.version import __version__; print(__version__)')
bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
export PATH="$bin:$PATH"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$compiler" -DRAYDZ_SANITIZE=ON \
    -DPython_EXECUTABLE="$bin/python" -DSKBUILD_PROJECT_VERSION="${version%%[a-z+]*}" \
    -DSKBUILD_PROJECT_VERSION_FULL="$version" >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
cmake --build "$build" >>"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }

# Leaks are not looked for: the interpreter and torch never free what they keep for the process's life. `-s`, because a
# finding ends the process, and pytest would take the captured report along.
kernels=$(ls "$PWD/$build"/_native*.so)
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
    RAYDZ_TEST_KERNELS="$kernels" OMP_NUM_THREADS=1 \
    "$python" -m pytest -p tests.native.other_kernels -p no:cacheprovider -q -s -m "native and not slow" \
    -k "not other_threads_run" "${tests[@]}"
echo "sanitize: no findings in $kernels"
