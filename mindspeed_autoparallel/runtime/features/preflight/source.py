"""Runs one child process per selected rank, one after the other because there is one device."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles.preflight_result import RankReport, RankRun
from mindspeed_autoparallel.profiles.records import json_of, record_of
from mindspeed_autoparallel.runtime.features.preflight.ranks import TASK_KIND, PreflightTask, RankKind
from mindspeed_autoparallel.runtime.features.preflight.request import PreflightRequest
from mindspeed_autoparallel.runtime.launch.orders import own_command
from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from mindspeed_autoparallel.runtime.profiling.alone import MISSING

_LOGGER = logging.getLogger(__name__)


def run_source(request: PreflightRequest) -> tuple[RankReport, ...]:
    """Run the selected ranks and return their results."""
    task = PreflightTask(
        rank=0,
        world_size=request.layout.num_devices,
        plan=str(request.plan_path or ""),
        num_steps=request.num_steps,
        imbalance=request.imbalance,
        switches=request.switches,
        result="",
    )
    memory = request.plan.memory if request.plan is not None else ()
    predicted = {item.pipeline_rank: item.peak_bytes - item.runtime_overhead_bytes for item in memory}
    return run_ranks(request.selected, task, predicted, request.work_dir, request.timeout_s)


def run_ranks(
    kinds: Sequence[RankKind], task: PreflightTask, predicted: Mapping[int, int], work_dir: Path, timeout_s: float
) -> tuple[RankReport, ...]:
    """Run a rank of each of ``kinds`` by ``task``, with its own number and result file, and return the results.

    ``predicted``: peak bytes by pipeline rank, where a plan has them.
    """
    reports = []
    for number, kind in enumerate(kinds, start=1):
        result = str(work_dir / "preflight" / f"rank{kind.rank}.json")
        run = run_rank(replace(task, rank=kind.rank, result=result), work_dir, timeout_s)
        _LOGGER.info(f"rank {kind.rank} ({number} of {len(kinds)}, {kind.why}): {_shown(run)}")
        reports.append(
            RankReport(
                run=run,
                pipeline_rank=kind.pipeline_rank,
                stands_for=kind.members,
                why=kind.why,
                predicted_bytes=predicted.get(kind.pipeline_rank),
            )
        )
    return tuple(reports)


def _shown(run: RankRun) -> str:
    """Return the outcome of a rank in a few words."""
    if run.status == "ok":
        return f"peak {run.peak_bytes / 2**20:.1f} MiB, {run.seconds:.0f} s"
    return f"{run.status.replace('_', ' ')}: {run.reason}"


def run_rank(task: PreflightTask, work_dir: Path, timeout_s: float) -> RankRun:
    """Run this process's own command as one rank alone and return its result, or the reason why there is none.

    Raises ``ConfigError`` if Megatron refuses the flags, as it then does on every rank.
    """
    result, world = Path(task.result), task.world_size
    result.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    result.unlink(missing_ok=True)
    spec = LaunchSpec(
        launch_id=f"preflight-rank{task.rank}",
        argv=own_command(),
        environment={ALONE_VARIABLE: str(world)},
        task={"kind": TASK_KIND, "preflight": json_of(task)},
        timeout_s=timeout_s,
    )
    started = time.monotonic()
    # Each rank is a node of its own: the child gets its global rank, local rank 0 and this device.
    outcome = run_local_processes(spec, LocalRanks(node_rank=task.rank, num_nodes=world), log_dir=work_dir / "logs")
    seconds = time.monotonic() - started
    if result.exists():
        return replace(_read(result), seconds=seconds)
    if outcome.is_refused:
        raise ConfigError(
            f"Megatron refuses these flags, so no rank can run: {outcome.last_lines[-1].strip()}. Change the layout or "
            f"the model (log: {outcome.log})."
        )
    status, reason = "failed", outcome.summary()
    if outcome.status is LaunchStatus.OK:
        status, reason = "no_step", "the script ended by itself before any step was done"
    elif outcome.status is LaunchStatus.OUT_OF_MEMORY:
        status = "out_of_memory"
    log = outcome.log or str(work_dir / "logs" / f"{spec.launch_id}.rank{task.rank}.log")
    if missing := _missing_object(Path(log)):
        reason = f"{reason}; {missing}"
    return RankRun(rank=task.rank, status=status, reason=f"{reason} (log: {log})", seconds=seconds)


def _missing_object(log: Path) -> str:
    """Return the object of an absent rank that the script waited for, if any."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix(MISSING) for line in lines if line.startswith(MISSING)), "")


def _read(path: Path) -> RankRun:
    return record_of(read_json(path, "result of a rank"), str(path), RankRun)
