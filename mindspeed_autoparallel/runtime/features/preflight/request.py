"""The flags of a pre-flight, checked before anything starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.runtime.devices import current_device
from mindspeed_autoparallel.runtime.devices.cpu.adapter import MEMORY_VARIABLE
from mindspeed_autoparallel.runtime.features.apply_plan.request import check_model
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.flags import AutoParallelFlags
from mindspeed_autoparallel.runtime.features.measuring import check_memory_limit, needed, refuse_launcher
from mindspeed_autoparallel.runtime.features.preflight.flags import SCRIPT, PreflightFlags, check_imbalance
from mindspeed_autoparallel.runtime.features.preflight.ranks import RankKind, kinds_of_ranks, selected
from mindspeed_autoparallel.runtime.features.preflight.script_layout import HETERO_SWITCHES, layout_of_script
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.launch.work_dir import private_work_dir
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.profiling.measure.sampling import samples_differ
from mindspeed_autoparallel.spec.layout import Layout
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import MIB

_FEATURE = "--auto-parallel-preflight"


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """What to run."""

    layout: Layout
    plan: Plan | None
    plan_path: Path | None
    num_microbatches: int
    kinds: tuple[RankKind, ...]
    """Of all ranks."""
    selected: tuple[RankKind, ...]
    num_steps: int
    imbalance: float
    timeout_s: float
    limit_bytes: int
    limit_source: str
    work_dir: Path
    output_dir: Path
    samples_differ: bool
    """Whether replicas see samples of other lengths, so that their peaks differ."""
    switches: tuple[str, ...]
    """Destinations of the user's other switches that the children need as well."""


def read_request(arguments: argparse.Namespace) -> PreflightRequest:
    """Check ``arguments`` and the plan; ``ConfigError`` or ``PlanError`` names what is wrong and what to do."""
    refuse_launcher(_FEATURE)
    flags, shared = read_flags(PreflightFlags, arguments), read_flags(AutoParallelFlags, arguments)
    check_imbalance(flags.auto_parallel_preflight_imbalance)
    path = plan = None
    if flags.auto_parallel_preflight != SCRIPT:
        path = Path(str(flags.auto_parallel_preflight)).resolve()
        plan = Plan.read(path)
        check_model(plan, describe(arguments), path)
        layout = plan.layout
    else:
        layout = layout_of_script(arguments, shared, _FEATURE)
    batch = plan.global_batch_size if plan is not None else needed(arguments, _FEATURE, "global_batch_size")
    kinds = kinds_of_ranks(layout, bool(getattr(arguments, "use_tp_pp_dp_mapping", False)))
    limit_bytes, source = _limit(plan, shared)
    return PreflightRequest(
        layout=layout,
        plan=plan,
        plan_path=path,
        num_microbatches=plan.num_microbatches if plan is not None else layout.num_microbatches(batch),
        kinds=kinds,
        selected=selected(kinds, flags.auto_parallel_preflight_ranks, plan, layout),
        num_steps=flags.auto_parallel_preflight_steps,
        imbalance=flags.auto_parallel_preflight_imbalance,
        timeout_s=float(flags.auto_parallel_preflight_timeout_s),
        limit_bytes=limit_bytes,
        limit_source=source,
        work_dir=private_work_dir(shared.auto_parallel_work_dir, "--auto-parallel-work-dir"),
        output_dir=Path(shared.auto_parallel_output_dir).resolve(),
        samples_differ=samples_differ(arguments),
        switches=tuple(name for name in HETERO_SWITCHES if getattr(arguments, name, False)),
    )


def _limit(plan: Plan | None, shared: AutoParallelFlags) -> tuple[int, str]:
    """Return the memory that a rank may use, and where the figure is from."""
    limit = shared.auto_parallel_memory_limit_mib
    if limit is not None:
        check_memory_limit(limit)
        return int(limit * MIB), "--auto-parallel-memory-limit-mib"
    if plan is not None and plan.memory:
        return min(memory.limit_bytes for memory in plan.memory), "the plan"
    device = current_device()
    source = MEMORY_VARIABLE if device.name == "cpu" and os.environ.get(MEMORY_VARIABLE) else "this device"
    return device.total_memory_bytes(), source
