"""Starts the ranks of cases and puts their halves together."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranks import run_ranks

from emulated_device.cases import Case, Outcome
from emulated_device.hetero_cases import HeteroCase

_PROGRAM = """
import json, sys
from emulated_device.worker import run_cases
print("\\nRESULT " + json.dumps(run_cases(sys.argv[1])))
"""
_HETERO_PROGRAM = _PROGRAM.replace("emulated_device.worker", "emulated_device.hetero_worker")


def run_on_emulated_device(
    cases: Sequence[Case], *, megatron: Sequence[Path] = (), timeout_s: float = 300.0
) -> list[Outcome]:
    """Outcomes in the order of ``cases``. ``megatron``: folders of another release.

    One launch of as many ranks as the longest pipeline; pipelines that do not divide it get a launch of their own.
    """
    outcomes: dict[int, Outcome] = {}
    left = list(range(len(cases)))
    while left:
        size = max(cases[index].pipeline_size for index in left)
        chosen = [index for index in left if size % cases[index].pipeline_size == 0]
        left = [index for index in left if index not in chosen]
        with tempfile.TemporaryDirectory(prefix="emulated-") as scratch:
            file = Path(scratch) / "cases.json"
            file.write_text(json.dumps([cases[index].to_json() for index in chosen]), encoding="utf-8")
            ranks = run_ranks(size, _PROGRAM, file, python_path=megatron, timeout_s=timeout_s)
        for position, index in enumerate(chosen):
            parts = [rank.result[position] for rank in ranks if rank.result[position]["replica"] == 0]
            outcomes[index] = _joined(sorted(parts, key=lambda part: part["pipeline_rank"]))
    return [outcomes[index] for index in range(len(cases))]


def run_hetero(cases: Sequence[HeteroCase], *, timeout_s: float = 300.0) -> list[float]:
    """Step times in nanoseconds, in the order of ``cases``, which are for equally many ranks."""
    (world,) = {case.world for case in cases}
    with tempfile.TemporaryDirectory(prefix="emulated-") as scratch:
        file = Path(scratch) / "cases.json"
        file.write_text(json.dumps([case.to_json() for case in cases]), encoding="utf-8")
        ranks = run_ranks(world, _HETERO_PROGRAM, file, timeout_s=timeout_s)
    return [max(rank.result[position]["step_ns"] for rank in ranks) for position in range(len(cases))]


def _joined(parts: list[dict[str, Any]]) -> Outcome:
    return Outcome(
        step_ns=max(part["step_ns"] for part in parts),
        pipeline_ns=max(part["pipeline_ns"] for part in parts),
        busy_ns=[part["busy_ns"] for part in parts],
        orders=[[tuple(item) for item in part["order"]] for part in parts],
        peak_bytes=[part["peak_bytes"] for part in parts],
        held_bytes=[part["held_bytes"] for part in parts],
        release=parts[0]["release"],
    )
