"""Knowledge base entries: operators that a calibrating launch replayed, and single figures."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_autoparallel.profiles.calibration_records import OperatorRow
from mindspeed_autoparallel.profiles.knowledge import Operator, Sample


def operator_samples(rows: Iterable[OperatorRow], source: str) -> tuple[list[tuple[Operator, Sample]], list[str]]:
    """Return the measurements, and a line for each operator that could not be measured."""
    measured, failed = [], []
    for row in rows:
        if row.reason:
            failed.append(f"{row.name} {list(row.sizes)}: {row.reason}")
        else:
            measured.append((row.operator, row.sample(source)))
    return measured, failed


def single(value_us: float, source: str) -> Sample:
    """Return a sample of one figure without a spread."""
    return Sample(median_us=value_us, p10_us=value_us, p90_us=value_us, num_runs=1, source=source)
