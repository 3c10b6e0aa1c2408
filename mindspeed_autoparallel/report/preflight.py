"""The report of a pre-flight: a table of the ranks that ran, the step, the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.profiles.preflight_result import PreflightResult, RankReport, RankRun
from mindspeed_autoparallel.units import MIB, US_PER_MS

_MOST_RANKS = 6


def render(result: PreflightResult) -> str:
    source = f"plan {result.plan}" if result.plan else "the script's own flags"
    lines = [
        f"pre-flight of {result.layout} on {result.world_size} devices, by {source}",
        f"device: {result.device}; each rank below ran alone, with stand-in peers; computed values are meaningless",
        f"{'rank':>5s} {'stage':>5s} {'predicted':>10s} {'measured':>10s} {'error':>8s} {'reserved':>10s} "
        f"{'forward':>9s} {'backward':>9s} {'optimizer':>9s}  peak at / stands for",
        f"{'':>5s} {'':>5s} {'MiB':>10s} {'MiB':>10s} {'':>8s} {'MiB':>10s} {'ms':>9s} {'ms':>9s} {'ms':>9s}",
    ]
    for report in result.ranks:
        lines += _rank_lines(report)
    lines.append(
        f"{len(result.ranks)} ranks ran; they stand for {result.num_ranks_covered} of {result.world_size}: ranks of a "
        "stage have equal shards and, with balanced routers, equal tokens"
    )
    if result.samples_differ:
        lines.append(
            "samples differ in length: other replicas and later steps hold more or less than the three steps above; "
            "--auto-parallel-preflight-ranks runs other replicas"
        )
    lines.append(_step_line(result))
    lines.append(f"verdict: {result.verdict_text}")
    lines += [f"  would help: {advice}" for advice in result.advice]
    return "\n".join(lines)


def _rank_lines(report: RankReport) -> list[str]:
    run = report.run
    if run.status != "ok":
        return [f"{run.rank:5d} {report.pipeline_rank:5d} {_mib(report.predicted_bytes)} {run.status}: {run.reason}"]
    error = "-"
    if report.predicted_bytes is not None and run.peak_bytes:
        error = f"{(report.predicted_bytes / run.peak_bytes - 1) * 100:+.1f} %"
    return [
        f"{run.rank:5d} {report.pipeline_rank:5d} {_mib(report.predicted_bytes)} {_mib(run.peak_bytes)} {error:>8s} "
        f"{_mib(run.reserved_bytes)} {_mean_ms(run, 'F'):9.2f} {_mean_ms(run, 'B'):9.2f} "
        f"{run.optimizer_us / US_PER_MS:9.2f}  {run.peak_place}; ranks {shown_ranks(report.stands_for)}"
    ]


def _mib(size: int | None) -> str:
    return f"{'-':>10s}" if size is None else f"{size / MIB:10.1f}"


def _mean_ms(run: RankRun, kind: str) -> float:
    times = [item.us for item in run.passes if item.kind == kind]
    return sum(times) / len(times) / US_PER_MS if times else 0.0


def _step_line(result: PreflightResult) -> str:
    predicted = "" if result.predicted_us is None else f"; the plan predicts {result.predicted_us / US_PER_MS:.1f} ms"
    if result.replay_us is None:
        return f"step: not replayed ({result.replay_note}){predicted}"
    return f"step: {result.replay_us / US_PER_MS:.1f} ms by replay ({result.replay_note}){predicted}"


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ``0-3, 8-11``; of many ranges only the first ones and the number of ranks."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if len(texts) > _MOST_RANKS:
        return f"{', '.join(texts[:_MOST_RANKS])}, ... ({len(ranks)} ranks)"
    return ", ".join(texts)
