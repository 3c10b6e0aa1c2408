"""What a step logged on a machine teaches about the machine's other runs, where all of them are scaled by one factor.

    python tests/benchmarks/prediction/recipe_rows.py ROWS.jsonl --json RATIOS.json
    python tests/benchmarks/prediction/shrunk_logs.py ROWS.jsonl RATIOS.json

Runs of one device and model (or one device and kind of model, four at least) are one machine. One or three of them are
logs: the mean of their errors' logarithms, shrunk, corrects the others. ``posterior``: the mean given the spreads
between and within the other machines; ``beyond``: the part above a threshold, where all logs err to one side.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recipe_rows import family_of

_DRAWS = 200
"""Choices of three logs from a machine with more than this many."""
Shrink = Callable[[np.ndarray, Sequence[np.ndarray]], float]
"""Correction of a logarithm by logs' errors and those of other machines."""


def _posterior(logs: np.ndarray, others: Sequence[np.ndarray]) -> float:
    within = float(np.mean([errors.var(ddof=1) for errors in others]))
    between = max(1e-6, float(np.mean([errors.mean() ** 2 - errors.var(ddof=1) / len(errors) for errors in others])))
    return float(logs.mean()) * between / (between + within / len(logs))


def _beyond(threshold: float) -> Shrink:
    def correction(logs: np.ndarray, others: Sequence[np.ndarray]) -> float:
        if abs(np.sign(logs).sum()) < len(logs):
            return 0.0
        return float(np.sign(logs.mean()) * max(0.0, abs(logs.mean()) - threshold))

    return correction


WAYS: Mapping[str, Shrink] = {
    "none": lambda logs, others: 0.0,
    "whole": lambda logs, others: float(logs.mean()),
    "half": lambda logs, others: float(logs.mean()) / 2,
    "posterior": _posterior,
    **{f"beyond {threshold}": _beyond(threshold) for threshold in (0.05, 0.08, 0.12)},
}


def errors_of(machine: np.ndarray, others: Sequence[np.ndarray], number: int, way: Shrink) -> float:
    """Return the mean error of a machine's other runs, over choices of ``number`` logs."""
    choices = list(itertools.combinations(range(len(machine)), number))
    if len(choices) > _DRAWS:
        kept = np.random.default_rng(29).choice(len(choices), _DRAWS, replace=False)
        choices = [choices[index] for index in kept]
    found = []
    for choice in choices:
        rest = np.delete(machine, choice)
        found.append(np.abs(np.exp(rest - way(machine[list(choice)], others)) - 1).mean())
    return float(np.mean(found))


def main() -> None:
    """Print the error of each way to learn, and how many machines are worse off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("ratios", type=Path)
    arguments = parser.parse_args()
    rows = {row["id"]: row for row in map(json.loads, arguments.rows.read_text().splitlines())}
    ratios = json.loads(arguments.ratios.read_text())

    def model_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row["model"].get(key, 0) for key in ("num_layers", "hidden", "num_experts"))

    for name, of in (("kind of model", lambda row: ()), ("model", model_of)):
        held: dict[Any, list[float]] = collections.defaultdict(list)
        for key, ratio in ratios.items():
            held[rows[key]["hw"]["gpu"], family_of(rows[key]), of(rows[key])].append(float(np.log(ratio)))
        machines = [np.array(errors) for errors in held.values() if len(errors) >= 4]
        for number in (1, 3):
            none = None
            for way, shrink in WAYS.items():
                mean = [
                    errors_of(machine, machines[:index] + machines[index + 1 :], number, shrink)
                    for index, machine in enumerate(machines)
                ]
                none = mean if none is None else none
                more = [new - old for new, old in zip(mean, none, strict=True)]
                print(
                    f"device and {name}, {number} logged, {way:12s} {np.mean(mean):6.1%}  worse in "
                    f"{sum(gain > 1e-3 for gain in more)} of {len(machines)}, by at most {max(more):.1%}"
                )


if __name__ == "__main__":
    main()
