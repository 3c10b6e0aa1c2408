#!/usr/bin/env bash
# Every check that runs no feature: style, types, who may import whom, generated pages, the house's rules.
set -euo pipefail
cd "$(dirname "$0")/.."
. docs/examples/python312.sh
install_into_venv "dev"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python tests/helpers/stale_names.py
PYTHONPATH=docs/examples .venv/bin/lint-imports
.venv/bin/python docs/generate.py --check
