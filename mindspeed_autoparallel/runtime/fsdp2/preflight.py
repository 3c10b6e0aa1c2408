"""``--auto-parallel-preflight`` in the native trainer: single ranks of a plan, or of the YAML, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import shard_sizes
from mindspeed_autoparallel.profiles.preflight_result import PreflightResult, judge, num_covered
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.preflight.entry import report_and_exit
from mindspeed_autoparallel.runtime.features.preflight.ranks import PreflightTask, RankKind, rank_numbers
from mindspeed_autoparallel.runtime.features.preflight.request import check_devices, limit_of_rank
from mindspeed_autoparallel.runtime.features.preflight.source import run_ranks
from mindspeed_autoparallel.runtime.fsdp2.apply import read_plan
from mindspeed_autoparallel.runtime.fsdp2.flags import NativeRequest
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer, world_size
from mindspeed_autoparallel.runtime.launch.work_dir import private_work_dir
from mindspeed_autoparallel.spec.sharded import ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan


@dataclass(frozen=True, kw_only=True)
class _Job:
    plan: ShardedPlan | None
    sizes: ShardSizes
    limit_bytes: int
    limit_source: str
    kinds: tuple[RankKind, ...]
    work_dir: Path


def run_and_exit(native: NativeTrainer, request: NativeRequest) -> None:
    """Run the ranks, write the report, and end the process: training does not start."""
    show_progress("pre-flight")
    job = _read(native, request)
    output_dir = Path(request.search.auto_parallel_output_dir).resolve()
    report_and_exit(job.work_dir, output_dir, lambda: _result(job, request))


def _read(native: NativeTrainer, request: NativeRequest) -> _Job:
    """Return the checked job of ``request``; ``ConfigError`` or ``PlanError`` for an invalid one."""
    if world_size() > 1:
        raise ConfigError(
            f"--auto-parallel-preflight starts its own processes, and {world_size()} processes run: start one."
        )
    plan = None
    if request.plan is not None:
        plan = read_plan(native, request.plan)
        sizes = plan.decisions.sizes
        check_devices(request.plan, sizes.num_devices, request.search)
    else:
        sizes = shard_sizes(native.config, request.num_nodes * request.devices_per_node, current_device().name == "npu")
    limit_bytes, source = limit_of_rank(
        request.search.auto_parallel_memory_limit_mib, [] if plan is None else [plan.memory.limit_bytes]
    )
    return _Job(
        plan=plan,
        sizes=sizes,
        limit_bytes=limit_bytes,
        limit_source=source,
        kinds=_kinds(request.preflight.auto_parallel_preflight_ranks, sizes.num_devices),
        work_dir=private_work_dir(request.search.auto_parallel_work_dir, "--auto-parallel-work-dir"),
    )


def _kinds(wanted: str, num_devices: int) -> tuple[RankKind, ...]:
    """Return the ranks to run. Shards are cut from the front, so no rank holds more than rank 0."""
    if wanted == "distinct":
        ranks = [0]
    else:
        ranks = [0, num_devices - 1] if wanted == "ends" else rank_numbers(wanted, num_devices)
    ranks = list(dict.fromkeys(ranks))
    every = tuple(range(num_devices))
    return tuple(
        RankKind(rank=rank, pipeline_rank=0, members=every if len(ranks) == 1 else (rank,), why="a shard of every unit")
        for rank in ranks
    )


def _result(job: _Job, request: NativeRequest) -> PreflightResult:
    task = PreflightTask(
        rank=0,
        world_size=job.sizes.num_devices,
        plan="" if request.plan is None else str(request.plan.resolve()),
        num_steps=request.preflight.auto_parallel_preflight_steps,
        imbalance=request.preflight.auto_parallel_preflight_imbalance,
        switches=(),
        result="",
    )
    predicted = {} if job.plan is None else {0: job.plan.memory.peak_bytes}
    timeout_s = float(request.preflight.auto_parallel_preflight_timeout_s)
    ranks = run_ranks(job.kinds, task, predicted, job.work_dir, timeout_s)
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
