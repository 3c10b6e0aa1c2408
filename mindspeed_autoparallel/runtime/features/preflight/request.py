"""The flags of a pre-flight, checked before anything starts, and the layout of the script's flags or model.json."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.adapter import MEMORY_VARIABLE
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.apply_plan.request import check_model
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.flags import AutoParallelFlags
from mindspeed_autoparallel.runtime.features.measuring import check_memory_limit, needed
from mindspeed_autoparallel.runtime.features.preflight.flags import SCRIPT, PreflightFlags, check_imbalance
from mindspeed_autoparallel.runtime.features.preflight.ranks import RankKind, kinds_of_ranks, selected
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.flags.switches import hetero_switches
from mindspeed_autoparallel.runtime.hetero.layouts import read_layout, read_model
from mindspeed_autoparallel.runtime.launch.work_dir import private_work_dir
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.profiling.measure.sampling import samples_differ
from mindspeed_autoparallel.spec.layout import Layout, ModuleLayout
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import MIB

_ANY_DEVICES = math.factorial(20) * 2**10
"""Provisional device count, which sizes divide as a rule; the real one is computed from the sizes."""

_FEATURE = "--auto-parallel-preflight"


def layout_of_script(arguments: argparse.Namespace, shared: AutoParallelFlags, feature: str) -> Layout:
    """Return the layout of the script's own flags on ``--simulated-nnodes`` nodes, or on as few devices as hold it.

    With ``--hetero-parallel`` model.json has the sizes of the backbone and of every encoder. ``ConfigError`` if the
    layout does not divide the devices.
    """

    def size(name: str) -> int:
        return int(getattr(arguments, name, 1) or 1)

    devices = (shared.simulated_nnodes or 1) * (shared.simulated_nproc_per_node or 1)
    is_given = bool(shared.simulated_nnodes or shared.simulated_nproc_per_node)
    if hetero_switches(arguments):
        return _hetero_layout(arguments, devices if is_given else None)
    tensor, pipeline = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    context, expert = size("context_parallel_size"), size("expert_model_parallel_size")
    inner = tensor * pipeline * context
    shared_by = size("expert_tensor_parallel_size") if getattr(arguments, "expert_tensor_parallel_size", 0) else tensor
    world = devices if is_given else inner
    if not is_given:
        while world // pipeline % (expert * shared_by):
            world += inner
    if world % inner or world // pipeline % (expert * shared_by):
        raise ConfigError(
            f"{feature}: TP{tensor} x CP{context} x PP{pipeline} with EP{expert} does not divide the {world} devices "
            "of --simulated-nnodes x --simulated-nproc-per-node. Give a multiple."
        )
    virtual = size("num_virtual_stages_per_pipeline_rank")
    if getattr(arguments, "num_layers_per_virtual_pipeline_stage", None):
        virtual = arguments.num_layers // pipeline // arguments.num_layers_per_virtual_pipeline_stage
    given = getattr(arguments, "pipeline_model_parallel_layout", None)
    if given and pipeline > 1:
        virtual = max(1, _num_stages(str(given)) // pipeline)
    return Layout(
        pipeline_size=pipeline,
        tensor_size=tensor,
        data_size=world // inner,
        context_size=context,
        expert_size=expert,
        expert_tensor_size=0 if shared_by == tensor else shared_by,
        virtual_size=virtual,
        micro_batch_size=size("micro_batch_size"),
        sequence_parallel=bool(arguments.sequence_parallel),
        distributed_optimizer=bool(arguments.use_distributed_optimizer),
        schedule="interleaved" if virtual > 1 else "1f1b",
        microbatch_group_size=int(getattr(arguments, "microbatch_group_size_per_vp_stage", 0) or 0)
        if virtual > 1
        else 0,
    )


def _hetero_layout(arguments: argparse.Namespace, devices: int | None) -> Layout:
    """Return the layout of model.json's modules on ``devices``; ``None``: on the fewest that all their sizes divide."""
    path, model = read_model(arguments)
    found = read_layout(model, world_size=devices or _ANY_DEVICES, source=str(path))
    backbone = found.backbone
    if devices is None:
        devices = math.lcm(
            *(one.tensor_size * one.pipeline_size * one.context_size for one in (backbone, *found.others))
        )
    return Layout(
        pipeline_size=backbone.pipeline_size,
        tensor_size=backbone.tensor_size,
        data_size=backbone.data_parallel_size(devices),
        context_size=backbone.context_size,
        micro_batch_size=backbone.micro_batch_size or int(arguments.micro_batch_size or 1),
        sequence_parallel=bool(arguments.sequence_parallel),
        distributed_optimizer=bool(arguments.use_distributed_optimizer),
        modules={
            one.name: ModuleLayout(
                tensor_size=one.tensor_size,
                pipeline_size=one.pipeline_size,
                context_size=one.context_size,
                data_size=one.data_parallel_size(devices),
            )
            for one in found.others
        },
    )


def _num_stages(text: str) -> int:
    """Return the number of stages in a layout string of Megatron, such as ``Et*3|(tt|)*2L``."""
    import re

    while repeated := re.search(r"\(([^()]*)\)\*(\d+)", text):
        text = text[: repeated.start()] + repeated[1] * int(repeated[2]) + text[repeated.end() :]
    return text.count("|") + 1


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """The plan or layout, and the ranks to run."""

    layout: Layout
    plan: Plan | None
    plan_path: Path | None
    num_microbatches: int
    kinds: tuple[RankKind, ...]
    """Kinds of all ranks."""
    selected: tuple[RankKind, ...]
    num_steps: int
    imbalance: float
    timeout_s: float
    limit_bytes: int
    limit_source: str
    work_dir: Path
    output_dir: Path
    samples_differ: bool
    """Whether replicas get samples of different lengths, so that their peaks differ."""
    switches: tuple[str, ...]
    """Destinations of the user's other switches that the children need."""


def read_request(arguments: argparse.Namespace) -> PreflightRequest:
    """Check ``arguments`` and the plan; ``ConfigError`` or ``PlanError`` names what is wrong and what to do."""
    flags, shared = read_flags(PreflightFlags, arguments), read_flags(AutoParallelFlags, arguments)
    check_imbalance(flags.auto_parallel_preflight_imbalance)
    path = plan = None
    if flags.auto_parallel_preflight != SCRIPT:
        path = Path(str(flags.auto_parallel_preflight)).resolve()
        plan = Plan.read(path)
        check_model(plan, describe(arguments), path)
        layout = plan.layout
        check_devices(path, layout.num_devices, shared)
    else:
        layout = layout_of_script(arguments, shared, _FEATURE)
    batch = plan.global_batch_size if plan is not None else needed(arguments, _FEATURE, "global_batch_size")
    kinds = kinds_of_ranks(layout, bool(getattr(arguments, "use_tp_pp_dp_mapping", False)))
    planned_bytes = [memory.limit_bytes for memory in plan.memory] if plan is not None else []
    limit_bytes, source = limit_of_rank(shared.auto_parallel_memory_limit_mib, planned_bytes)
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
        switches=hetero_switches(arguments),
    )


def check_devices(path: Path, num_devices: int, shared: AutoParallelFlags) -> None:
    """Raise ``ConfigError`` if the flags of the cluster give another number of devices than the plan's."""
    nodes, per_node = shared.simulated_nnodes, shared.simulated_nproc_per_node
    given = (nodes or 1) * (per_node or 1)
    if (nodes or per_node) and given != num_devices:
        raise ConfigError(
            f"--simulated-nnodes x --simulated-nproc-per-node is {given} devices, and {path} is for {num_devices}: "
            f"drop these flags, or search for a plan for {given} devices."
        )


def limit_of_rank(limit_mib: float | None, planned_bytes: Iterable[int]) -> tuple[int, str]:
    """Return the memory that a rank may use, and the source of the figure.

    ``planned_bytes``: the limits of the plan's ranks; empty without a plan.
    """
    if limit_mib is not None:
        check_memory_limit(limit_mib)
        return int(limit_mib * MIB), "--auto-parallel-memory-limit-mib"
    if planned := list(planned_bytes):
        return min(planned), "the plan"
    device = current_device()
    source = MEMORY_VARIABLE if device.name == "cpu" and os.environ.get(MEMORY_VARIABLE) else "this device"
    return device.total_memory_bytes(), source
