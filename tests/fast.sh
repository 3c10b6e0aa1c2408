#!/usr/bin/env bash
# The tests that need neither processes of their own, nor torch, nor a fifth of a second by tests/seconds.json.
#   bash tests/fast.sh            all of them
#   bash tests/fast.sh -k words   passes words on to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. docs/examples/python312.sh
install_into_venv "dev"
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then # see run.sh
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="$PWD/.venv/compiled"
fi
LEAVE_OUT_FROM_S="${LEAVE_OUT_FROM_S:-0.2}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    -m "not distributed and not emulated and not slow and not megatron and not long" tests/unit tests/golden tests/packaging "$@"
