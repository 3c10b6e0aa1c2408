"""A release: two builds are equal, its dependencies have bounds and a licence on the page, both ends of them run."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def _listed(name: str) -> list[Requirement]:
    """Return the requirements of a list in pyproject.toml."""
    (text,) = re.findall(rf"^{name} = \[(.*?)^\]$", PROJECT, re.MULTILINE | re.DOTALL)
    return [Requirement(one) for one in re.findall(r'"([^"]+)"', text)]


DEPENDENCIES, DEVELOPMENT = _listed("dependencies"), _listed("dev")
EXTRAS = [
    Requirement(text)
    for line in re.findall(r"^(?:megatron|npu|weights|yaml|tables|completion) = \[([^]]*)\]", PROJECT, re.MULTILINE)
    for text in re.findall(r'"([^"]+)"', line)
]
LOWEST = (
    *("msgspec==0.18.0", "numpy==1.24.0", "ortools==9.10.4067", "packaging==22.0", "wrapt==1.16.0"),
    "threadpoolctl==3.1.0",
    *("pyyaml==6.0", "pyarrow==15.0.0", "shtab==1.7.0"),
)
RELEASES = [
    Requirement(line)
    for line in (ROOT / "docs" / "examples" / "constraints.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
NEWEST = (*(one.name for one in DEPENDENCIES), "pyyaml", "pyarrow", "shtab")


BUILD = """
import sys
from setuptools import build_meta
target = sys.argv[1]  # the hooks set arguments of their own
build_meta.build_wheel(target)
build_meta.build_sdist(target)
"""
"""As pip and build call the project's build system, in one process for both."""


def digests(source: Path, target: Path) -> dict[str, str]:
    """Build wheel and source archive of ``source``; SHA-256 by file name."""
    own = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    target.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, env=own, check=True, capture_output=True)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.iterdir()}


def test_two_builds_are_equal_and_hold_no_tests(tmp_path: Path):
    left_out = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "tests", "out", ".*_cache", "build")
    built = []
    for name, moment in (("one", 1), ("other", 1_000_000_000)):
        shutil.copytree(ROOT, tmp_path / name, ignore=left_out, symlinks=True)
        for path in (tmp_path / name).rglob("*"):
            os.utime(path, (moment, moment), follow_symlinks=False)
        built.append(digests(tmp_path / name, tmp_path / f"{name}-built"))
    assert built[0] == built[1]
    assert sorted(name.rpartition(".")[2] for name in built[0]) == ["gz", "whl"]
    archive = next((tmp_path / "one-built").glob("*.tar.gz"))
    with zipfile.ZipFile(next((tmp_path / "one-built").glob("*.whl"))) as wheel:
        assert not [name for name in wheel.namelist() if "reference_vlm" in name]
    with tarfile.open(archive) as content:
        names = content.getnames()
        assert any(name.endswith("patches/__init__.py") for name in names)
        assert {member.mtime for member in content} == {1_700_000_000}


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=lambda one: one.name)
def test_a_dependency_has_two_bounds_and_its_licence_is_on_the_page(requirement: Requirement):
    bounds = {specifier.operator: specifier.version for specifier in requirement.specifier}
    assert set(bounds) == {">=", "<"}
    assert f"| {requirement.name} | {bounds['>=']} to {bounds['<']} |" in PAGE
    installed = importlib.metadata.metadata(requirement.name)
    assert requirement.specifier.contains(installed["Version"])
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {requirement.name} "))
    licence = next(installed[name] for name in ("License-Expression", "License") if name in installed)
    assert re.split(r"[ -]", licence)[0] in row


@pytest.mark.parametrize("requirement", EXTRAS, ids=str)
def test_an_extra_has_two_bounds_that_hold_what_the_tests_run_with(requirement: Requirement):
    assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{requirement.name} is not installed here")
    assert requirement.specifier.contains(installed)


@pytest.mark.parametrize("requirement", [*DEPENDENCIES, *EXTRAS, *DEVELOPMENT], ids=str)
def test_the_scripts_install_one_release_of_every_package_that_the_project_names(requirement: Requirement):
    if requirement.name == "torch-npu":
        pytest.skip("torch-npu is not installed for the tests")
    (named,) = [one for one in RELEASES if one.name.lower() == requirement.name.lower()]
    ((version, operator),) = [(one.version, one.operator) for one in named.specifier]
    assert operator == "=="
    assert requirement.specifier.contains(version)


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the environment is not the one that the scripts make")
def test_the_tests_run_with_the_releases_that_the_scripts_install():
    differ = []
    for one in RELEASES:
        try:
            installed = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a package of another platform
        if not one.specifier.contains(installed):
            differ.append(f"{one}: {installed} is installed")
    assert differ == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("python", "packages"), [("python3.10", LOWEST), ("python3.12", NEWEST)])
def test_plans_are_the_same_with_the_lowest_and_the_newest_dependencies(
    python: str, packages: tuple[str, ...], tmp_path: Path
):
    version = python.removeprefix("python")
    found = next(iter(sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))), shutil.which(python))
    if found is None:
        pytest.skip(f"no {python} on this machine")
    subprocess.run([found, "-m", "venv", str(tmp_path / "venv")], check=True)
    own = str(tmp_path / "venv" / "bin" / "python")
    installed = subprocess.run([own, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the packages cannot be installed here: {installed.stderr[-200:]}")
    words = [
        "--num-workers",
        "1",
        "--virtual-sizes",
        "1",
        "--model",
        "docs/examples/llama3_70b.json",
        "--device",
        "H100",
        "--nnodes",
        "8",
    ]
    size = [
        "--nproc-per-node",
        "8",
        "--global-batch-size",
        "128",
        "--seq-length",
        "4096",
        "--profile-source",
        "analytic",
    ]
    (tmp_path / "own.yaml").write_text("parallel_config: {mem_coeff: 0.1}\n")
    table = tmp_path / "lengths.parquet"
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(importlib.import_module("pyarrow").Table.from_pylist([{"tokens": 7}, {"tokens": 9}]), table)
    extras = (
        ["operators", "--layers", "1", "--devices", "2", "--config", str(tmp_path / "own.yaml"), "--json"],
        ["data", "describe", "--table", str(table), "--json"],
        ["--print-completion", "bash"],
    )
    lines = []
    for interpreter in (own, sys.executable):
        run = subprocess.run(
            [interpreter, "-m", "mindspeed_autoparallel", "plan", *size, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        lines.append(next(line for line in run.stdout.splitlines() if line.startswith("flags of")))
        for extra in extras:
            run = subprocess.run(
                [interpreter, "-m", "mindspeed_autoparallel", *extra],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0 and run.stdout, run.stderr[-2000:]
    assert lines[0] == lines[1]
