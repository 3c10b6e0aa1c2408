"""The script's own configuration, priced like all others, to show the gain of the recommendations."""

from __future__ import annotations

import argparse
from dataclasses import replace

from mindspeed_autoparallel.errors import flag_of
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.tuner.candidates import Configuration, Space
from mindspeed_autoparallel.planner.tuner.placements import SolvedConfiguration
from mindspeed_autoparallel.report.tuning_result import Baseline
from mindspeed_autoparallel.runtime.megatron.hybrid import PATTERN_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.layout_arguments import GROUP_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.mindspeed import NOOP_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.splits import SPLIT_ARGUMENTS
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.recompute import RecomputePolicy, policy_of
from mindspeed_autoparallel.units import US_PER_MS

_MEGATRONS_MODULES = ("core_attn",)
"""Modules that Megatron recomputes in every layer if none are named."""


def user_baseline(
    arguments: argparse.Namespace, space: Space, cluster: Cluster, batch: int
) -> SolvedConfiguration | str:
    """Return the script's own configuration on ``cluster``, even if it does not fit, or why it is unknown."""
    own = vars(arguments)
    for name in (*SPLIT_ARGUMENTS, NOOP_ARGUMENT, PATTERN_ARGUMENT):
        if own.get(name):
            return f"its stages are cut by {flag_of(name)}"
    if own.get(GROUP_ARGUMENT):
        return "its microbatches are grouped by --microbatch-group-size-per-virtual-pipeline-stage"
    tensor = own.get("tensor_model_parallel_size") or 1
    pipeline = own.get("pipeline_model_parallel_size") or 1
    context = own.get("context_parallel_size") or 1
    sizes = f"TP {tensor} x PP {pipeline} x CP {context}"
    if cluster.num_devices % (tensor * pipeline * context):
        return f"its {sizes} does not divide {cluster.num_devices} devices"
    if own.get("num_layers", 0) % (pipeline * _virtual_size(arguments, pipeline)):
        return f"its {own['num_layers']} layers do not divide over its stages"
    wanted = {
        "tensor_size": tensor,
        "pipeline_size": pipeline,
        "context_size": context,
        "expert_size": own.get("expert_model_parallel_size") or 1,
        "micro_batch_size": own.get("micro_batch_size") or 1,
        "virtual_size": _virtual_size(arguments, pipeline),
        "sequence_parallel": bool(own.get("sequence_parallel")) and tensor > 1,
        "distributed_optimizer": bool(own.get("use_distributed_optimizer")),
        "sharding": None,
        "paired": False,
    }
    for configuration in space.configurations:
        # The title of the script's own variant is empty.
        plain = not configuration.variant.name and not configuration.variant.modelled
        if plain and all(getattr(configuration.layout, name) == value for name, value in wanted.items()):
            return _priced(configuration, arguments, cluster, batch)
    return f"its {sizes} with micro batch {wanted['micro_batch_size']} is not among the layouts searched"


def _virtual_size(arguments: argparse.Namespace, pipeline: int) -> int:
    own = vars(arguments)
    if number := own.get("num_virtual_stages_per_pipeline_rank"):
        return int(number)
    layers = own.get("num_layers_per_virtual_pipeline_stage")
    return max(1, own.get("num_layers", 1) // pipeline // layers) if layers else 1


def _priced(
    configuration: Configuration, arguments: argparse.Namespace, cluster: Cluster, batch: int
) -> SolvedConfiguration | str:
    profile, layout = configuration.variant.profile, configuration.layout
    (module,) = profile.model.modules
    own = vars(arguments)
    kind, number = _recompute(arguments)
    known = configuration.candidate.measurement.modules[module.name].layer.recompute
    if policy_of(kind).kind == "selective":
        wanted = set(policy_of(kind).modules)
        kind = next(
            (name for name in known if policy_of(name).modules and set(policy_of(name).modules) == wanted), kind
        )
    if (policy_of(kind).kind if policy_of(kind).layers_per_group else kind) not in known:
        return "its recompute was not traced"
    reduced = bool(own.get("overlap_grad_reduce"))
    layout = replace(
        layout,
        overlap_gradient_reduce=reduced,
        overlap_parameter_gather=reduced and bool(own.get("overlap_param_gather")) and layout.distributed_optimizer,
    )
    held = module.num_layers // layout.num_virtual_stages
    layers = (held,) * layout.num_virtual_stages
    again = tuple(min(number or held, held) for _ in layers)
    placement = ModulePlacement(
        layers={module.name: layers}, recompute={} if kind == "none" else {module.name: {kind: again}}
    )
    return SolvedConfiguration(
        configuration=configuration.under(layout),
        placement=placement,
        recompute=kind,
        num_recomputed=number,
        evaluation=evaluate(profile, cluster, layout, placement, batch, with_timeline=False),
    )


def _recompute(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return a kind of ``spec.recompute``, and the number of layers of a stage that it applies to; 0: all."""
    own = vars(arguments)
    granularity = own.get("recompute_granularity") or ("selective" if own.get("recompute_activations") else None)
    if granularity is None:
        return "none", 0
    if granularity == "selective":
        return str(RecomputePolicy.selective(tuple(own.get("recompute_modules") or _MEGATRONS_MODULES))), 0
    number = int(own.get("recompute_num_layers") or 1)
    return ("full", number) if own.get("recompute_method") == "block" else (str(RecomputePolicy.full(number)), 0)


def described(given: SolvedConfiguration | str) -> Baseline:
    """Return the baseline's entry of the result file."""
    if isinstance(given, str):
        return {"reason": given}
    worst = max(given.evaluation.memory, key=lambda rank: rank.peak_bytes)
    return {
        "label": given.configuration.layout.label()
        + (f", recompute {policy_of(given.recompute).words}" if given.recompute != "none" else ""),
        "step_time_ms": given.step_us / US_PER_MS,
        "peak_bytes": worst.peak_bytes,
        "limit_bytes": worst.limit_bytes,
        "fits": given.evaluation.fits,
    }
