# Sourced by the set-up scripts: finds a Python 3.12 that really runs and installs the package into .venv.

find_python312() {
    local candidate
    # A pyenv shim can be on PATH and only print "command not found": every candidate is tried before it is trusted.
    for candidate in "${PYTHON312:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
        /usr/bin/python3.12 /usr/local/bin/python3.12 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    echo "Python 3.12 was not found (megatron.training comes in megatron-core's wheel for 3.12 only)." >&2
    echo "Install it (for example: pyenv install 3.12) or name it: PYTHON312=/path/to/python3.12" >&2
    return 1
}

install_into_venv() { # extras, separated by commas
    local python
    if [ ! -x .venv/bin/python ]; then
        python="$(find_python312)" || exit 1
        "$python" -m venv .venv
    fi
    # The stamp holds what was installed for: another pyproject, other releases or other extras install again.
    local stamp=".venv/installed-$1" releases="docs/examples/constraints.txt" wanted
    wanted="$(cat pyproject.toml setup.py "$releases" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        .venv/bin/python -m pip install -q --disable-pip-version-check -c "$releases" -e ".[megatron,$1]"
        echo "$wanted" > "$stamp"
    fi
}
