"""Steps of features have files of the same names: whoever has read one finds the way through the others.

What searches is request -> source -> search -> write; what trains is request -> apply; what runs ranks alone is
request -> source -> conclude -> write. A step that is not a file of its own is written in ``entry``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest
from house_rules import PACKAGE, ROOT

from mindspeed_autoparallel.runtime.flags.switches import SWITCHES

FOLDER = f"{PACKAGE}/runtime/features"
DOORS = {
    "search_and_exit": ("request", "source", "search", "write"),
    "prepare": ("request", "apply"),
    "run_and_exit": ("request", "source", "conclude", "write"),
}
"""The function that a flag's entry has, and the files it goes through, in order."""


def doors() -> dict[str, str]:
    """Return the door of every feature by its folder."""
    starts = (switch.start for switch in SWITCHES)
    paths = (path.removeprefix(f"{FOLDER.replace('/', '.')}.").partition(":") for path in starts)
    return {module.removesuffix(".entry"): door for module, _, door in paths}


@functools.cache
def tree(feature: str, name: str) -> ast.Module:
    return ast.parse((ROOT / FOLDER / feature / f"{name}.py").read_text(encoding="utf-8"))


def has_file(feature: str, name: str) -> bool:
    return (ROOT / FOLDER / feature / f"{name}.py").is_file()


def functions(feature: str, name: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree(feature, name).body if isinstance(node, ast.FunctionDef)}


def own_imports(feature: str, name: str) -> Iterator[str]:
    """Yield the files of the feature's own folder that ``name`` imports, wherever in it."""
    start = f"{FOLDER.replace('/', '.')}.{feature}."
    for node in ast.walk(tree(feature, name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(start):
            yield (node.module or "").removeprefix(start).partition(".")[0]


def reached(feature: str, name: str) -> set[str]:
    """Return the files of the folder that ``name`` imports, and those they import."""
    found: set[str] = set()
    waiting = {name}
    while waiting:
        new = set(own_imports(feature, waiting.pop())) - found
        found |= new
        waiting |= {file for file in new if has_file(feature, file)}
    return found


def test_every_folder_is_a_feature_with_a_flag() -> None:
    folders = {path.parent.name for path in (ROOT / FOLDER).glob("*/*.py")}
    assert folders == set(doors()) and set(doors().values()) == set(DOORS)


@pytest.mark.parametrize("feature", doors())
def test_the_files_and_what_each_offers(feature: str) -> None:
    door = doors()[feature]
    steps = DOORS[door]
    files = [step for step in steps if has_file(feature, step)]
    assert door in functions(feature, "entry") and set(files) <= set(own_imports(feature, "entry"))
    if "request" in files:
        read = functions(feature, "request")["read_request"]
        assert isinstance(read.returns, ast.Name) and read.returns.id.endswith("Request")
    for step in set(files) - {"request"}:
        offered = [name for name in functions(feature, step) if name == step or name.endswith(f"_{step}")]
        assert offered, f"{feature}/{step}.py has no function {step}"
    assert any(isinstance(node, ast.ClassDef) for node in tree(feature, "flags").body)


@pytest.mark.parametrize("feature", doors())
def test_a_step_imports_no_later_step(feature: str) -> None:
    steps = DOORS[doors()[feature]]
    for number, step in enumerate(steps):
        later = {"entry", *steps[number + 1 :]}
        if has_file(feature, step):
            assert not reached(feature, step) & later, f"{feature}/{step}.py"
