"""Where the suite's time goes: processor seconds of every test, the slowest in the summary, long files first.

Seconds are the test's own and those of all processes it started and waited for, those forked by ``forked_python``
included; on a busy machine they say more than the clock does. ``tests/seconds.json`` holds those of every file, by
which workers (``-n``) get the long files first, and of every test of a fifth of a second and more.
``SECONDS_TO=tests/seconds.json pytest ...`` writes what ran again. ``LEAVE_OUT_FROM_S=0.2`` leaves out tests of so many
seconds, and files that import torch, Megatron or transformers, which takes longer than their short tests.
``PART_OF_FILES=1/2`` leaves out the files of the other parts: workers of xdist would import all of them each.
"""

from __future__ import annotations

import functools
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_python import server_seconds

KEPT = Path(__file__).parents[1] / "seconds.json"
NUM_SHOWN = 30
_NAMED_FROM_S = 0.2
"""Tests of this many seconds and more stand in ``seconds.json`` by themselves."""
_KEY = "processor_seconds"
_measured: dict[str, float] = defaultdict(float)
"""In the process that prints the summary, by test."""


def _now() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system + server_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGUN] = _now()
    return (yield)


_BEGUN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if call.when == "teardown":
        report.user_properties = [*report.user_properties, (_KEY, _now() - item.stash[_BEGUN])]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == _KEY:
            _measured[report.nodeid] += float(str(value))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files with slow imports, where ``LEAVE_OUT_FROM_S`` is set, and those of other parts."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    if "LEAVE_OUT_FROM_S" in os.environ and _SLOW_IMPORT.search(collection_path.read_text("utf-8")):
        return True
    if "PART_OF_FILES" in os.environ:
        part, _, num_parts = os.environ["PART_OF_FILES"].partition("/")
        return True if _part_of(collection_path, int(num_parts)) != int(part) - 1 else None
    return None


def _part_of(file: Path, num_parts: int) -> int:
    """Return the part of ``file``; a file without recorded seconds goes where its name's checksum sends it."""
    name = file.relative_to(KEPT.parents[1]).as_posix()
    return _parts(num_parts).get(name, zlib.crc32(name.encode()) % num_parts)


@functools.cache
def _parts(num_parts: int) -> dict[str, int]:
    """Return the part of every file with recorded seconds: the longest first, each to the part with the least of its folder.

    By folder of ``tests``, as a run may take some of these alone.
    """
    seconds = _known_seconds()
    most = float(os.environ.get("LEAVE_OUT_FROM_S", "inf"))
    left: dict[str, float] = {
        name: value + _COLLECTED_S + _A_TEST_S * _text(name).count("def test_")
        for name, value in seconds.items()
        if "::" not in name
    }
    for name, value in seconds.items():
        if "::" in name and value >= most:
            left[_file_of(name)] -= value
    every: dict[str, list[float]] = defaultdict(lambda: [0.0] * num_parts)
    found: dict[str, int] = {}
    for name in sorted(left, key=lambda name: (-left[name], name)):
        if _SLOW_IMPORT.search(_text(name)):
            continue
        loads = every[name.split("/")[1]]
        found[name] = loads.index(min(loads))
        loads[found[name]] += left[name]
    return found


_COLLECTED_S = 0.05
_A_TEST_S = 0.006
"""What importing a test file takes, and collecting and reporting a test with its parameters."""


def _text(name: str) -> str:
    file = KEPT.parents[1] / name
    return file.read_text("utf-8") if file.exists() else ""


def _known_seconds() -> dict[str, float]:
    return json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}


_SLOW_IMPORT = re.compile(
    r"^(?:(?:import|from) |(?:\w+ = )?pytest\.importorskip\(\")(?:torch|megatron|mbridge|transformers)\b", re.MULTILINE
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, where ``LEAVE_OUT_FROM_S`` says so.

    Under xdist, put files of many seconds first: two workers then end at nearly the same time.
    """
    seconds = _known_seconds()
    most = float(os.environ.get("LEAVE_OUT_FROM_S", "inf"))
    long = [item for item in items if seconds.get(item.nodeid, 0.0) >= most]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if seconds.get(item.nodeid, 0.0) < most]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (-seconds.get(_file_of(item.nodeid), 0.0), _file_of(item.nodeid)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(_measured) > NUM_SHOWN:
        total = sum(_measured.values())
        terminalreporter.section(
            f"{NUM_SHOWN} most expensive of {len(_measured)} tests, {total:.0f} processor seconds in all"
        )
        for test, seconds in sorted(_measured.items(), key=lambda pair: -pair[1])[:NUM_SHOWN]:
            terminalreporter.write_line(f"{seconds:8.1f}  {test}")
    target = os.environ.get("SECONDS_TO")
    if target and _measured:
        _write(Path(target))


def _write(target: Path) -> None:
    """Replace the seconds of the files that ran, and of their tests."""
    ran: dict[str, float] = defaultdict(float)
    for test, seconds in _measured.items():
        ran[_file_of(test)] += seconds
    before = json.loads(target.read_text("utf-8")) if target.exists() else {}
    kept = {name: value for name, value in before.items() if (KEPT.parents[1] / _file_of(name)).exists()}
    # Of a file of which a part ran, the tests that did not run keep their seconds.
    kept |= {name: round(value, 1) for name, value in ran.items()}
    kept = {name: value for name, value in kept.items() if name not in _measured}
    kept |= {name: round(value, 1) for name, value in _measured.items() if value >= _NAMED_FROM_S}
    target.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", "utf-8")


def _file_of(test: str) -> str:
    return test.split("::")[0]
