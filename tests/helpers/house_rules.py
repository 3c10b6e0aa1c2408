"""What every file of the package, and of the reference model, keeps to, and the lists of places that do not yet.

python tests/helpers/house_rules.py    drops what is no longer needed from the lists; nothing is ever added
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "tests" / "house"
PACKAGE = "mindspeed_autoparallel"

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 300, 60, 8


@dataclass(frozen=True)
class Function:
    """A function or method, by the qualified name that people write."""

    path: str
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def key(self) -> str:
        return f"{self.path}:{self.name}"


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the package, by path from the root."""
    folders = (PACKAGE, "patches", "docs/examples/reference_vlm")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths = sorted(path for path in files if not path.is_relative_to(ROOT / PACKAGE / "patches"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def functions(path: str, tree: ast.AST, prefix: str = "") -> Iterator[Function]:
    """Yield all functions of a file, also those inside others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Function(path, prefix + node.name, node)
        inside = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        yield from functions(path, node, f"{prefix}{node.name}." if inside else prefix)  # type: ignore[attr-defined]


@cache
def all_functions() -> list[Function]:
    """Return the functions of all files."""
    return [function for path, tree in sources().items() for function in functions(path, tree)]


def long_files() -> set[str]:
    """Return the files of more than 300 lines."""
    return {path for path in sources() if len((ROOT / path).read_text("utf-8").splitlines()) > MAX_FILE_LINES}


def long_functions() -> set[str]:
    """Return the functions of more than 60 lines, docstring and decorators included."""
    return {
        function.key
        for function in all_functions()
        if (function.node.end_lineno or 0) - function.node.lineno >= MAX_FUNCTION_LINES
    }


def many_parameters() -> set[str]:
    """Return the functions of more than 8 parameters; ``self`` does not count."""
    found = set()
    for function in all_functions():
        given = function.node.args
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if len([name for name in names if name not in ("self", "cls")]) > MAX_PARAMETERS:
            found.add(function.key)
    return found


def untyped_between_packages() -> set[str]:
    """Return what another folder imports and whose signature has a ``dict[str, Any]``."""
    shared = _names_imported_from_elsewhere()
    found = set()
    for function in all_functions():
        head, _, method = function.name.partition(".")
        private = method.startswith("_") and method != "__init__"
        if (function.path, head) in shared and "." not in method and not private and _is_untyped(function.node):
            found.add(function.key)
    return found


def _names_imported_from_elsewhere() -> set[tuple[str, str]]:
    found = set()
    for path, tree in sources().items():
        for node in _statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
                defined = node.module.replace(".", "/")
                for file in (f"{defined}.py", f"{defined}/__init__.py"):
                    if file in sources() and Path(file).parent != Path(path).parent:
                        found |= {(file, name.name) for name in node.names}
    return found


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from _statements(node)


def _is_untyped(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = node.args
    notes = [argument.annotation for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return any(note and re.search(r"(dict|Mapping)\[str, Any\]", ast.unparse(note)) for note in (*notes, node.returns))


def names_missing_from_maps() -> set[str]:
    """Return ``package: name`` for every name in a package docstring's map that is no file or folder there.

    A package of folders with the same files may describe these: what at least two of them have is there.
    """
    found = set()
    for path, tree in sources().items():
        if path.endswith("__init__.py"):
            folder = (ROOT / path).parent
            for name in names_in_map(ast.get_docstring(tree) or ""):
                files = (f"{name}.py", f"{name}/__init__.py", name)
                if not any((folder / file).exists() for file in files) and len(list(folder.glob(f"*/{name}.py"))) < 2:
                    found.add(f"{path}: {name}")
    return found


def names_in_map(docstring: str) -> list[str]:
    """Return the names in the first column of a docstring's map: ``name, other   what they are``, quoted or not."""
    docstring = docstring.replace("``", "")
    rows = re.findall(r"^ *((?:[\w.]+, )*[\w.]+,?)(?: {2,}\S|$)", docstring, flags=re.MULTILINE)
    is_map = re.search(r"^ *[\w.]+(?:, [\w.]+)* {2,}\S", docstring, flags=re.MULTILINE)
    return [name.strip() for row in rows for name in row.split(",") if name.strip()] if is_map else []


RULES: dict[str, Callable[[], set[str]]] = {
    "files_over_300_lines": long_files,
    "functions_over_60_lines": long_functions,
    "functions_over_8_parameters": many_parameters,
    "untyped_between_packages": untyped_between_packages,
    "names_missing_from_maps": names_missing_from_maps,
}


def allowed(rule: str) -> list[str]:
    """Return the places where a rule does not hold yet."""
    path = LISTS / f"{rule}.txt"
    return path.read_text("utf-8").splitlines() if path.exists() else []


def shrink() -> None:
    """Drop from the lists what keeps to the rules by now, and lists that are empty."""
    for rule, check in RULES.items():
        found, path = check(), LISTS / f"{rule}.txt"
        left = [entry for entry in allowed(rule) if entry in found]
        if left:
            path.write_text("".join(f"{entry}\n" for entry in left), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    shrink()
