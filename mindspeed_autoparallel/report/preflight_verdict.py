"""The verdict whether every rank that ran stays below a memory limit."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.report.preflight_result import RankReport
from mindspeed_autoparallel.units import MIB

EXIT_CODES = {"fits": 0, "runs_out": 3, "unknown": 1}
"""Exit codes of the commands, by verdict."""


def judge(ranks: Sequence[RankReport], limit_bytes: int, limit_source: str, num_devices: int) -> tuple[str, str]:
    """Return ``fits``, ``runs_out`` or ``unknown``, and the sentence to print.

    ``num_devices``: devices of the whole layout; ``ranks`` may represent a part of it.
    """
    limit = f"{limit_bytes / MIB:.1f} MiB ({limit_source})"
    out = [one for one in ranks if one.run.status == "out_of_memory" or one.run.peak_bytes > limit_bytes]
    if out:
        return "runs_out", _shortage(out, limit_bytes, limit)
    failed = [report for report in ranks if report.run.status != "ok"]
    if failed:
        run = failed[0].run
        return "unknown", f"rank {run.rank} ({failed[0].why}) was not run to its end: {run.reason}"
    fullest = max(ranks, key=lambda report: report.run.peak_bytes)
    spare = limit_bytes - fullest.run.peak_bytes
    covered = num_covered(ranks)
    scope = "" if covered == num_devices else f" (for the {covered} ranks that the ranks run represent)"
    text = (
        f"fits with {spare / MIB:.1f} MiB to spare on the fullest rank, {fullest.run.rank} ({fullest.why}): "
        f"{fullest.run.peak_bytes / MIB:.1f} of {limit}{scope}"
    )
    reserved = max((report.run.reserved_bytes or 0 for report in ranks), default=0)
    if reserved > limit_bytes:
        text += f"; the allocator held {reserved / MIB:.1f} MiB, so it would have to release cached blocks"
    return "fits", text


def num_covered(ranks: Sequence[RankReport]) -> int:
    """Return the number of ranks represented by those that finished."""
    return len({rank for report in ranks if report.run.status == "ok" for rank in report.stands_for})


def _shortage(out: Sequence[RankReport], limit_bytes: int, limit: str) -> str:
    """Return which rank runs out, where, and by how much."""
    worst = max(out, key=lambda report: (report.run.status == "out_of_memory", report.run.peak_bytes))
    run = worst.run
    if run.status == "out_of_memory":
        how = f"at {run.peak_place}: {run.reason}"
    else:
        over = (run.peak_bytes - limit_bytes) / MIB
        how = f"by {over:.1f} MiB: its peak is {run.peak_bytes / MIB:.1f} MiB of {limit}, at {run.peak_place}"
    others = f"; {len(out) - 1} other kinds of ranks run out, too" if len(out) > 1 else ""
    return f"rank {run.rank} ({worst.why}) runs out of memory {how}{others}"
