"""``--auto-parallel-preflight`` in the native trainer: single ranks of a plan, or of the YAML, on one device."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import shard_sizes
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.report.preflight_result import EXIT_CODES, PreflightResult, RankReport, judge, num_covered
from mindspeed_autoparallel.runtime.devices import current_device
from mindspeed_autoparallel.runtime.features.preflight.entry import write
from mindspeed_autoparallel.runtime.features.preflight.ranks import PreflightTask, rank_numbers
from mindspeed_autoparallel.runtime.features.preflight.source import result_file, run_rank, shown_run
from mindspeed_autoparallel.runtime.fsdp2.apply import read_plan
from mindspeed_autoparallel.runtime.fsdp2.flags import NativeRequest
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer, world_size
from mindspeed_autoparallel.runtime.launch.work_dir import only_one, private_work_dir
from mindspeed_autoparallel.spec.sharded import ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan
from mindspeed_autoparallel.units import MIB

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Job:
    plan: ShardedPlan | None
    sizes: ShardSizes
    limit_bytes: int
    limit_source: str
    ranks: tuple[int, ...]
    work_dir: Path


def run_and_exit(native: NativeTrainer, request: NativeRequest) -> None:
    """Run the ranks, write the report, and end the process: training does not start."""
    show_progress("pre-flight")
    job = _read(native, request)
    with leaving_kept(f"results of finished ranks are in {job.work_dir}"):
        with only_one(job.work_dir, "--auto-parallel-work-dir"):
            reports = tuple(_report(job, request, rank) for rank in job.ranks)
        result = _concluded(job, request, reports)
        write(request.output_dir.resolve(), result)
    sys.exit(EXIT_CODES[result.verdict])


def _read(native: NativeTrainer, request: NativeRequest) -> _Job:
    """Return the checked job of ``request``; ``ConfigError`` or ``PlanError`` for an invalid one."""
    if world_size() > 1:
        raise ConfigError(
            f"--auto-parallel-preflight starts its own processes, and {world_size()} processes run: start one."
        )
    plan = None if request.plan is None else read_plan(native, request.plan)
    if plan is not None:
        sizes = plan.decisions.sizes
    else:
        sizes = shard_sizes(native.config, request.num_nodes * request.devices_per_node, current_device().name == "npu")
    limit_bytes, source = _limit(plan, request)
    return _Job(
        plan=plan,
        sizes=sizes,
        limit_bytes=limit_bytes,
        limit_source=source,
        ranks=_ranks(request.preflight_ranks, sizes.num_devices),
        work_dir=private_work_dir(str(request.work_dir), "--auto-parallel-work-dir"),
    )


def _limit(plan: ShardedPlan | None, request: NativeRequest) -> tuple[int, str]:
    if request.memory_limit_mib:
        return request.memory_limit_mib * MIB, "--auto-parallel-memory-limit-mib"
    if plan is not None:
        return plan.memory.limit_bytes, "the plan"
    return current_device().total_memory_bytes(), "this device"


def _ranks(wanted: str, num_devices: int) -> tuple[int, ...]:
    """Return the ranks to run. Shards are cut from the front, so no rank holds more than rank 0."""
    if wanted == "distinct":
        return (0,)
    if wanted == "ends":
        return tuple(dict.fromkeys((0, num_devices - 1)))
    return tuple(dict.fromkeys(rank_numbers(wanted, num_devices)))


def _report(job: _Job, request: NativeRequest, rank: int) -> RankReport:
    task = PreflightTask(
        rank=rank,
        world_size=job.sizes.num_devices,
        plan="" if request.plan is None else str(request.plan.resolve()),
        num_steps=request.preflight_steps,
        imbalance=request.preflight_imbalance,
        switches=(),
        result=str(result_file(job.work_dir, rank).resolve()),
    )
    run = run_rank(task, job.work_dir, float(request.preflight_timeout_s))
    _LOGGER.info(f"rank {rank}: {shown_run(run)}")
    everyone = rank == job.ranks[0] and len(job.ranks) == 1
    return RankReport(
        run=run,
        pipeline_rank=0,
        stands_for=tuple(range(job.sizes.num_devices)) if everyone else (rank,),
        why="a shard of every unit",
        predicted_bytes=None if job.plan is None else job.plan.memory.peak_bytes,
    )


def _concluded(job: _Job, request: NativeRequest, ranks: tuple[RankReport, ...]) -> PreflightResult:
    verdict, text = judge(ranks, job.limit_bytes, job.limit_source, job.sizes.num_devices)
    return PreflightResult(
        layout=job.sizes.label(),
        world_size=job.sizes.num_devices,
        plan="" if request.plan is None else str(request.plan),
        device=current_device().fingerprint()["device"],
        limit_bytes=job.limit_bytes,
        limit_source=job.limit_source,
        ranks=ranks,
        num_ranks_covered=num_covered(ranks),
        replay_us=None,
        replay_note="gathers and reductions return at once here; the plan has the step with them",
        predicted_us=None if job.plan is None else job.plan.step.total_us,
        verdict=verdict,
        verdict_text=text,
        advice=_advice(job.sizes) if verdict == "runs_out" else (),
        samples_differ=False,
    )


def _advice(sizes: ShardSizes) -> tuple[str, ...]:
    lines = ["features.recompute with more layers in recompute_plan; --auto-parallel-mm searches for a plan that fits"]
    if sizes.micro_batch_size > 1:
        lines.append(f"training.micro_batch_size {sizes.micro_batch_size // 2} in place of {sizes.micro_batch_size}")
    if sizes.fully_shard_size < sizes.num_devices:
        lines.append(
            f"parallel.fully_shard_parallel_size above {sizes.fully_shard_size}, up to {sizes.num_devices}: a rank "
            "holds less of the model"
        )
    return tuple(lines)
