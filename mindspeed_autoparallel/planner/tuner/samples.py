"""Knowledge base entries of what a calibrating launch wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles.knowledge import Operator, Sample


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file the launch wrote; none where it did not come to that."""
    return list(read_json(path, "calibration")["rows"]) if path.exists() else []


def operator_samples(rows: Iterable[Mapping[str, Any]], source: str) -> tuple[list[tuple[Operator, Sample]], list[str]]:
    """What was measured, and a line for each operator that could not be."""
    measured, failed = [], []
    for row in rows:
        if "reason" in row:
            failed.append(f"{row['name']} {row['sizes']}: {row['reason']}")
            continue
        operator = Operator(name=row["name"], signature=row["signature"], sizes=tuple(row["sizes"]))
        measured.append((operator, sample_of(row, source)))
    return measured, failed


def sample_of(row: Mapping[str, Any], source: str) -> Sample:
    """Median, percentiles and number of runs."""
    return Sample(
        median_us=row["median_us"], p10_us=row["p10_us"], p90_us=row["p90_us"], num_runs=row["num_runs"], source=source
    )


def single(value_us: float, source: str) -> Sample:
    """One figure without a spread."""
    return Sample(median_us=value_us, p10_us=value_us, p90_us=value_us, num_runs=1, source=source)
