"""Print the size of the house at commits, as the table of docs/validation/house.md.

python tests/helpers/house_sizes.py COMMIT...     # and the working tree
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNTYPED = re.compile(r"\b(?:dict|Mapping)\[str, Any\]")


def sources_at(commit: str) -> dict[str, str]:
    """Return the Python files of a commit, by path; of the working tree for an empty name."""
    listed = ["git", "ls-files", "-z"] if not commit else ["git", "ls-tree", "-rz", "--name-only", commit]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    python = [name for name in names if name.endswith(".py") or name == "tests/seconds.json"]
    if not commit:
        return {name: (ROOT / name).read_text("utf-8") for name in python if (ROOT / name).is_file()}
    asked = "".join(f"{commit}:{name}\n" for name in python).encode()
    answer = subprocess.run(
        ["git", "cat-file", "--batch"], cwd=ROOT, input=asked, capture_output=True, check=True
    ).stdout
    found, at = {}, 0
    for name in python:
        end = answer.index(b"\n", at)
        size = int(answer[at:end].split()[-1])
        found[name] = answer[end + 1 : end + 1 + size].decode()
        at = end + size + 2
    return found


def counts(files: dict[str, str]) -> dict[str, int | str]:
    """Return the rows of the table."""
    package = {name: text for name, text in files.items() if name.startswith(("mindspeed_autoparallel/", "patches/"))}
    tests = {name: text for name, text in files.items() if name.startswith("tests/")}
    trees = [ast.parse(text) for text in package.values()]
    seconds = json.loads(files.get("tests/seconds.json", "{}"))
    return {
        "lines of the package and its patches": sum(text.count("\n") for text in package.values()),
        "files in them": len(package),
        "functions and methods in them": _count(trees, lambda node: isinstance(node, ast.FunctionDef)),
        "named numeric constants in them (module level)": sum(map(_named_numbers, trees)),
        "`dict[str, Any]` and `Mapping[str, Any]` in them": sum(
            len(UNTYPED.findall(text)) for text in package.values()
        ),
        "lines of the reference model (in the package at c6b322b)": _lines(
            files, "docs/examples/reference_vlm/", "mindspeed_autoparallel/reference/"
        ),
        "lines of tests and benchmarks": sum(text.count("\n") for text in tests.values()),
        "processor seconds of all test files (`tests/seconds.json`)": round(
            sum(value for name, value in seconds.items() if "::" not in name)
        )
        if seconds
        else "not recorded",
    }


def _lines(files: dict[str, str], *folders: str) -> int:
    return sum(text.count("\n") for name, text in files.items() if name.startswith(folders))


def _count(trees: list[ast.Module], fits: Callable[[ast.AST], bool]) -> int:
    return sum(fits(node) for tree in trees for node in ast.walk(tree))


def _named_numbers(tree: ast.Module) -> int:
    values = [node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    return sum(isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) for value in values)


def main() -> None:
    """Print a column per commit and one for the working tree."""
    columns = {commit or "working tree": counts(sources_at(commit)) for commit in [*sys.argv[1:], ""]}
    print("| | " + " | ".join(columns) + " |\n| --- |" + " --- |" * len(columns))
    for row in next(iter(columns.values())):
        values = [column[row] for column in columns.values()]
        print(f"| {row} | " + " | ".join(f"{value:,}" if isinstance(value, int) else value for value in values) + " |")


if __name__ == "__main__":
    main()
