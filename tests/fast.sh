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
export LEAVE_OUT_FROM_S="${LEAVE_OUT_FROM_S:-0.2}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

part() { # 1 or 2, words for pytest: a process for half of the files
    PART_OF_FILES="$1/2" .venv/bin/python -m pytest \
        -m "not distributed and not emulated and not slow and not megatron and not long" tests/unit tests/golden tests/packaging "${@:2}"
}
other="$(mktemp)"
trap 'rm -f "$other"' EXIT
part 2 "$@" > "$other" 2>&1 &
first=0 second=0
part 1 "$@" || first=$?
wait $! || second=$?
cat "$other"
# 5: a part in which -k chose nothing.
if [ "$first" = 5 ]; then first="$second"; elif [ "$second" = 5 ]; then second=0; fi
exit "$((first ? first : second))"
