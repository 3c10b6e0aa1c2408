#!/usr/bin/env bash
# Sets everything up on a fresh machine (Python 3.12 somewhere, pip) and runs all checks and tests.
#   bash tests/run.sh            everything
#   bash tests/run.sh -k words   passes words on to pytest
#   LONG=1 bash tests/run.sh     also what takes minutes and varies what another test shows
set -euo pipefail
cd "$(dirname "$0")/.."

. docs/examples/python312.sh
install_into_venv "dev"

# Older releases of megatron.core for the contract tests, beside the environment's own.
for release in 0.12.1 0.16.1; do
    folder=".venv/megatron-core/$release"
    if [ ! -d "$folder/megatron" ]; then
        .venv/bin/python -m pip install -q --no-deps --target "$folder" "megatron-core==$release"
    fi
done
# The NPU adapter's names are read out of torch_npu's wheel, which needs no NPU and is never installed.
export TORCH_NPU_WHEELS="$PWD/.venv/wheels"
if ! ls "$TORCH_NPU_WHEELS"/torch_npu-*.whl >/dev/null 2>&1; then
    .venv/bin/python -m pip download -q --no-deps -d "$TORCH_NPU_WHEELS" "torch-npu==2.13.0" ||
        echo "torch-npu 2.13.0 cannot be downloaded here: the contract test of the NPU names is skipped"
fi
export MEGATRON_CORE_0_12="$PWD/.venv/megatron-core/0.12.1" MEGATRON_CORE_0_16="$PWD/.venv/megatron-core/0.16.1"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Beside the tests: alone it takes a minute of one core.
linted="$(mktemp)"
trap 'rm -f "$linted"' EXIT
bash tests/lint.sh > "$linted" 2>&1 &
lint=$!

# Files compiled by one process are there for the next, where the environment does not keep them beside the sources.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="$PWD/.venv/compiled"
fi
# What takes minutes and varies what another test shows waits for LONG=1.
chosen="not long"
if [ -n "${LONG:-}" ]; then chosen="long or not long"; fi
# Every worker imports all tests, and would compile them first where nobody has.
if [ -z "$(find tests .venv/compiled -name 'test_house*.pyc' -print -quit 2>/dev/null)" ]; then
    .venv/bin/python -m pytest --collect-only -q -m "$chosen" "$@" > /dev/null 2>&1 || true
fi
# Four files at a time (WORKERS): ranks wait for each other, so two leave a third of two cores idle. The longest files are
# first (tests/seconds.json); tests of a file share launches.
tested=0 failed=0
.venv/bin/python -m pytest -n "${WORKERS:-4}" --dist loadfile --no-loadscope-reorder -m "$chosen" "$@" || tested=$?
wait "$lint" || failed=$?
cat "$linted"
exit "$((tested ? tested : failed))"
