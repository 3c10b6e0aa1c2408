"""The measurements of a pre-flight, rank by rank: ``preflight_result.json``. Bytes, microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.units import MIB

PREFLIGHT_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A forward or backward of one microbatch on one model chunk of the rank."""

    kind: str
    """``F`` or ``B``."""
    chunk: int
    microbatch: int
    us: float


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The measurements of one process that ran as one rank."""

    rank: int
    status: str
    """``ok``, ``out_of_memory``, ``no_step`` (the script ended before its steps were done) or ``failed``."""
    num_steps: int = 0
    """Completed steps."""
    peak_bytes: int = 0
    """Peak of tensors (the allocator's allocated bytes)."""
    reserved_bytes: int | None = None
    """Peak of the device memory that the allocator held; ``None`` without such an allocator."""
    peak_place: str = ""
    resident_bytes: int = 0
    """Bytes held before a step begins: parameters, gradients, optimizer."""
    places: dict[str, int] = field(default_factory=dict)
    """Peak bytes by phase: forward, backward, recompute, optimizer step, between passes."""
    layer_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that a layer's forward keeps for its backward."""
    passes: tuple[PassTime, ...] = ()
    """Passes of the last timed step, in the order they ran."""
    optimizer_us: float = 0.0
    step_us: float = 0.0
    """Step time of this rank alone, without waiting for others."""
    reason: str = ""
    """Reason for a status other than ``ok``."""
    seconds: float = 0.0
    """Run time of the whole child process."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank that ran, and the ranks that it represents."""

    run: RankRun
    pipeline_rank: int
    stands_for: tuple[int, ...]
    """Ranks with the same contents, including itself."""
    why: str
    predicted_bytes: int | None
    """Peak of tensors by the plan; ``None`` without a plan."""


@dataclass(frozen=True, kw_only=True)
class PreflightResult:
    """The document ``preflight_result.json``."""

    layout: str
    world_size: int
    plan: str
    """The plan's path; empty: the script's own layout."""
    device: str
    limit_bytes: int
    limit_source: str
    ranks: tuple[RankReport, ...]
    num_ranks_covered: int
    """Number of ranks that the ranks run represent."""
    replay_us: float | None
    """Step of the layout by replay of the measured passes, without communication; ``None``: see ``replay_note``."""
    replay_note: str
    predicted_us: float | None
    verdict: str
    """``fits``, ``runs_out`` or ``unknown``."""
    verdict_text: str
    advice: tuple[str, ...]
    samples_differ: bool
    """Whether replicas get samples of other lengths, so that their peaks differ from that of the replica that ran."""
    schema_version: int = PREFLIGHT_SCHEMA_VERSION


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
