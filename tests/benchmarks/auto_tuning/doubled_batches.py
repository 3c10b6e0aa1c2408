"""How measured steps change when micro batch and batch double and nothing else, by layer shape.

    python tests/benchmarks/auto_tuning/doubled_batches.py DATA.json --group vtrain-single

Twice the work in the same number of microbatches on the same ranks cannot take less time by any formula of the work.
Prints mean, least and most of the change over all such pairs of rows, shortest first.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from pathlib import Path

from fitting import measured_workload

from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms


def main() -> None:
    """Pairs, groups, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--group", required=True)
    arguments = parser.parse_args()
    measured: dict[Workload, float] = {}
    for row in json.loads(arguments.data.read_text())["rows"]:
        step, work = measured_step_ms(row), measured_workload(row)
        if row["group"] == arguments.group and step and work:
            measured[work] = step
    changes = collections.defaultdict(list)
    for work, step in measured.items():
        double = dataclasses.replace(work, micro_batch=2 * work.micro_batch, global_batch=2 * work.global_batch)
        if double in measured:
            changes[work.model.hidden, work.tensor_size, work.micro_batch].append(measured[double] / step - 1)
    for (hidden, tensor, micro), found in sorted(changes.items(), key=lambda item: sum(item[1]) / len(item[1])):
        print(
            f"hidden {hidden:5d} tensor {tensor} micro batch {micro} to {2 * micro}: {len(found):3d} pairs, "
            f"{sum(found) / len(found):+6.1%} ({min(found):+.0%} to {max(found):+.0%})"
        )


if __name__ == "__main__":
    main()
