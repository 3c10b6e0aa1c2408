#!/usr/bin/env bash
# Sets everything up on a fresh machine (Python 3.12 somewhere, pip) and runs all checks and tests.
#   bash tests/run.sh            everything
#   bash tests/run.sh -k words   passes words on to pytest
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
export MEGATRON_CORE_0_12="$PWD/.venv/megatron-core/0.12.1" MEGATRON_CORE_0_16="$PWD/.venv/megatron-core/0.16.1"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/lint-imports
.venv/bin/python docs/generate.py --check

# Pure tests share the cores; tests that start processes of their own run one after the other.
.venv/bin/python -m pytest -n 2 -m "not distributed and not emulated" "$@"
.venv/bin/python -m pytest -m "distributed or emulated" "$@"
