"""The rules that a layout must keep for any run to start in it, for described runs and for searched layouts alike.

Every function returns the rule that is broken, with the numbers, or an empty string.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec.layout import Layout
from mindspeed_autoparallel.spec.model import Module


class IllegalLayout(ConfigError):
    """A layout that no run can start in."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the ranks of a layout share of one module; 0: nothing of the kind, or unknown."""

    name: str
    num_heads: int = 0
    num_kv_heads: int = 0
    num_experts: int = 0


def uneven_devices(num_devices: int, tensor: int, pipeline: int, context: int, data: int | None = None) -> str:
    """Return why the sizes do not fill ``num_devices``; ``data``: the replicas, where they are given."""
    sizes, shards = f"TP {tensor} x PP {pipeline} x CP {context}", tensor * pipeline * context
    if data is not None and shards * data != num_devices:
        return f"{sizes} x DP {data} needs {shards * data} devices; there are {num_devices}."
    return f"{sizes} = {shards} does not divide {num_devices} devices." if num_devices % shards else ""


def uneven_chunks(virtual: int, pipeline: int) -> str:
    """Return why ranks have no ``virtual`` chunks."""
    return f"VPP {virtual} needs PP above 1." if virtual > 1 and pipeline == 1 else ""


def too_many_stages(num_stages: int, num_layers: int, num_ends: int = 0, num_joined: int = 0) -> str:
    """Return why some stage would be empty; ``num_ends``: embedding, output and the like that may fill one alone;
    ``num_joined``: layers that share the stage of those before them."""
    parts = num_layers - num_joined
    if num_stages <= parts + num_ends:
        return ""
    if num_joined:
        return (
            f"{num_stages} stages are more than the {parts} parts that {num_layers} layers can be cut into: the end of "
            "an encoder and the decoder layers that add its features stay together (deepstack)."
        )
    ends = f" and {num_ends} ends" if num_ends else ""
    return f"{num_stages} stages are more than the {num_layers} layers{ends}."


def without_experts(expert_size: int) -> str:
    """Return the rule that a model without experts breaks above one rank of experts."""
    return f"EP {expert_size} needs a model with experts."


def broken_shares(layout: Layout, modules: Sequence[Shared | Module], has_experts: bool) -> str:
    """Return the first rule of sizes that ``layout`` breaks, whatever the batch."""
    return next(_broken_shares(layout, modules, has_experts), "")


def _broken_shares(layout: Layout, modules: Sequence[Shared | Module], has_experts: bool) -> Iterator[str]:
    tensor, expert = layout.tensor_size, layout.expert_size
    yield from filter(None, [uneven_chunks(layout.virtual_size, layout.pipeline_size)])
    if layout.sequence_parallel and tensor == 1:
        yield "sequence parallelism needs TP above 1."
    if expert > 1 and not has_experts:
        yield without_experts(expert)
    for module in modules:
        heads, groups = module.num_heads, module.num_kv_heads
        if heads % tensor:
            yield f"TP {tensor} does not divide the {heads} heads of {module.name}."
        if groups and max(groups, tensor) % min(groups, tensor):
            yield f"TP {tensor} and the {groups} key-value heads of {module.name}: neither divides the other."
        if module.num_experts % expert:
            yield f"EP {expert} does not divide the {module.num_experts} experts of {module.name}."


def broken_groups(layout: Layout, has_experts: bool) -> str:
    """Return why the ranks of ``layout`` form no groups of experts."""
    expert, sharing = layout.expert_size, layout.ranks_of_expert
    ranks = layout.data_size * layout.context_size * layout.tensor_size
    if not has_experts or not ranks % (expert * sharing):
        return ""
    if sharing == layout.tensor_size:
        return f"EP {expert} does not divide DP x CP = {ranks // sharing}."
    return f"EP {expert} x ETP {sharing} does not divide DP x CP x TP = {ranks}."


def broken_batch(layout: Layout, global_batch_size: int) -> str:
    """Return why ``layout`` cannot run steps of ``global_batch_size`` samples."""
    try:
        count = layout.num_microbatches(global_batch_size)
    except ConfigError as error:
        return str(error)
    size, group = layout.pipeline_size, layout.microbatch_group_size or layout.pipeline_size
    if layout.schedule != "interleaved":
        return ""
    if count < size:
        return f"interleaving needs at least as many microbatches ({count}) as PP {size}."
    if group > count or 0 < count % group < size:
        return (
            f"interleaving runs {count} microbatches in groups of PP {size} to {count} with no remainder below PP, "
            f"not in groups of {group}."
        )
    return ""


def offloaded_beside_stages(layout: Layout, num_layers: int) -> str:
    """Return why activations of ``num_layers`` layers cannot be offloaded to the host."""
    if not num_layers or layout.pipeline_size == 1:
        return ""
    return (
        f"train.cpu_offloading_num_layers {num_layers} with PP {layout.pipeline_size}: Megatron offloads "
        "activations of runs with one pipeline stage."
    )


def uneven_sequence(layout: Layout, num_tokens: int) -> str:
    """Return why a sequence of ``num_tokens`` cannot be cut as ``layout`` cuts it."""
    context, tensor = layout.context_size, layout.tensor_size
    if context > 1 and num_tokens % (2 * context):
        return f"2 x CP {context} does not divide a sequence of {num_tokens} tokens."
    if layout.sequence_parallel and num_tokens // context % tensor:
        return f"TP {tensor} does not divide the {num_tokens // context} tokens of a rank (sequence parallelism)."
    return ""


def uneven_widths(layout: Layout, ffn: int, expert_ffn: int, name: str) -> str:
    """Return why the matrices of a module's MLPs cannot be cut; ``ffn``, ``expert_ffn``: their widths, or 0."""
    if ffn % layout.tensor_size:
        return f"TP {layout.tensor_size} does not divide the MLP width {ffn} of {name}."
    if expert_ffn % layout.ranks_of_expert:
        return f"ETP {layout.ranks_of_expert} does not divide the expert width {expert_ffn} of {name}."
    return ""
