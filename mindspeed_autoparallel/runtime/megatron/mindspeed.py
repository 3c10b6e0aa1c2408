"""Settings that MindSpeed, MindSpeed-LLM and MindSpeed-MM read before a plan can set them, and limits of their
files."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import PlanError, flag_of
from mindspeed_autoparallel.spec.layout import Layout, unmet_expert_size

LAYOUT_ARGUMENT = "pipeline_model_parallel_layout"
"""Flag that expresses any split of a language model, from Megatron 0.13 on."""
LIST_ARGUMENT, NOOP_ARGUMENT = "num_layer_list", "noop_layers"

_NUMBER = "recompute_num_layers"
_KEYS = ("recompute_granularity", "recompute_method", _NUMBER)
_VIRTUAL_STAGES_ALONE = ("recompute_in_advance", "recompute_in_bubble")


def takes_layout_strings(arguments: argparse.Namespace) -> bool:
    """Return whether the host splits layers by a layout string that a plan sets.

    MindSpeed from 26.1 on has the flag for a Megatron without it, and installs its functions on import, by the command
    line at that time: else Megatron deals layers out evenly, or asserts that it can.
    """
    own = hasattr(sys.modules.get("mindspeed.features_manager"), "PipelineModelParallelLayoutFeature")
    return hasattr(arguments, LAYOUT_ARGUMENT) and not (own and getattr(arguments, LAYOUT_ARGUMENT) is None)


def is_mindspeed_llm(arguments: argparse.Namespace) -> bool:
    """Return whether the script runs under MindSpeed-LLM, which alone has both flags."""
    return hasattr(arguments, LIST_ARGUMENT) and hasattr(arguments, NOOP_ARGUMENT)


def split_arguments(counts: Sequence[int], virtual_size: int) -> dict[str, int | str | None]:
    """Return destinations and values for layers by virtual stage (``counts``, in the order of the chain).

    Without virtual stages ``--num-layer-list`` takes any numbers. With virtual stages it is not supported: there every
    chunk gets as many layers as the largest, and ``--noop-layers`` names those that do nothing.
    """
    if len(set(counts)) == 1:
        return {"num_layers_per_virtual_pipeline_stage": counts[0]} if virtual_size > 1 else {}
    if virtual_size == 1:
        return {LIST_ARGUMENT: ",".join(map(str, counts))}
    size = max(counts)
    empty = [size * stage + place for stage, count in enumerate(counts) for place in range(count, size)]
    return {
        "num_layers": size * len(counts),
        "num_layers_per_virtual_pipeline_stage": size,
        NOOP_ARGUMENT: ",".join(map(str, empty)),
    }


def check_list_was_given(stages: Mapping[str, object], arguments: argparse.Namespace, path: Path) -> None:
    """Raise ``PlanError`` with the words to add if the plan in ``path`` needs ``--num-layer-list``.

    MindSpeed-LLM installs its functions for it on import, according to the command line at that time.
    """
    wanted = stages.get(LIST_ARGUMENT)
    given = getattr(arguments, LIST_ARGUMENT, None)
    if wanted is not None and given != wanted:
        raise PlanError(
            f"{path} has {wanted} layers on its stages, and MindSpeed-LLM reads such a split from the command line "
            f"before a plan can set it (given: {given or 'none'}). Add --num-layer-list {wanted} to the script's flags."
        )


def context_is_fixed() -> bool:
    """Return whether MindSpeed was imported: on import it chooses its attention by the context-parallel size given."""
    return "mindspeed.features_manager" in sys.modules


def check_context_was_given(given: int, planned: int, path: Path) -> None:
    """Raise ``PlanError`` if MindSpeed patched attention for another context-parallel size than the plan's.

    It chooses its attention on import, by whether the size ``given`` on the command line is above 1.
    """
    if context_is_fixed() and (given > 1) != (planned > 1):
        raise PlanError(
            f"{path} has context-parallel size {planned}, and MindSpeed chooses its attention from the command line "
            f"before a plan can set the size (given: {given}). Give the script --context-parallel-size {planned}."
        )


def expert_tensor_sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the script's own size, or 0 (all tensor ranks share an expert) and 1 (whole experts) if both can run."""
    given = getattr(arguments, "expert_tensor_parallel_size", None)
    if given is not None:
        return (int(given),)
    # MindSpeed replaces Megatron's dispatchers, and Megatron's alltoall_seq supports no size but TP.
    runs_whole = hasattr(arguments, "expert_tensor_parallel_size") and "mindspeed" not in sys.modules
    runs_whole = runs_whole and getattr(arguments, "moe_token_dispatcher_type", None) != "alltoall_seq"
    return (0, 1) if getattr(arguments, "num_experts", None) and runs_whole else (0,)


def tensor_grid(arguments: argparse.Namespace) -> int:
    """Return the ranks of MindSpeed's ``--tp-2d``, which a plan's tensor-parallel size must equal; 0 without it."""
    if not getattr(arguments, "tp_2d", False):
        return 0
    return int(getattr(arguments, "tp_x", 1)) * int(getattr(arguments, "tp_y", 1))


def sums_encoder_gradients(content: Mapping[str, object]) -> bool:
    """Return whether sequence parallelism changes what a model.json trains: MindSpeed-MM sums gradients of an image
    encoder's gathered features that are alike on all tensor ranks, and the encoder gets TP times its own."""
    return is_mindspeed_mm() and "image_encoder" in content


def overlaps_whole_experts(arguments: argparse.Namespace) -> bool:
    """Return whether MindSpeed ends at tensor parallelism: ``--moe-alltoall-overlap-comm`` with ``alltoall_seq`` needs
    ``--moe-tp-extend-ep`` there."""
    overlaps = getattr(arguments, "moe_alltoall_overlap_comm", False)
    sequential = getattr(arguments, "moe_token_dispatcher_type", None) == "alltoall_seq"
    return bool(overlaps and sequential and not getattr(arguments, "moe_tp_extend_ep", False))


def check_sequence(arguments: argparse.Namespace, content: Mapping[str, object], layout: Layout, path: Path) -> None:
    """Raise ``PlanError`` if the plan turns sequence parallelism on for a script that it would train otherwise."""
    if sums_encoder_gradients(content) and layout.sequence_parallel and not arguments.sequence_parallel:
        raise PlanError(
            f"{path} turns sequence parallelism on, with which MindSpeed-MM sums the image encoder's gradients over "
            f"the {layout.tensor_size} tensor ranks. Search again, or give --sequence-parallel to train so."
        )


def check_tensor_size(arguments: argparse.Namespace, layout: Layout, path: Path) -> None:
    """Raise ``PlanError`` if MindSpeed would fail: ``--use-ascend-mc2`` needs sequence parallelism, ``--tp-2d``
    its own TP size without sequence parallelism, overlapped experts none."""
    if layout.tensor_size > 1 and overlaps_whole_experts(arguments):
        raise PlanError(
            f"{path} has tensor-parallel size {layout.tensor_size}, and MindSpeed runs --moe-alltoall-overlap-comm "
            "with --moe-token-dispatcher-type alltoall_seq without tensor parallelism, or with --moe-tp-extend-ep. "
            "Add that flag to the script, or search again."
        )
    if getattr(arguments, "use_ascend_mc2", False) and not (layout.tensor_size > 1 and layout.sequence_parallel):
        raise PlanError(
            f"{path} has tensor-parallel size {layout.tensor_size}"
            f"{'' if layout.sequence_parallel else ' without sequence parallelism'}, and MindSpeed ends there with "
            "--use-ascend-mc2. Leave that flag out of the script."
        )
    grid = tensor_grid(arguments)
    if grid and (grid != layout.tensor_size or layout.sequence_parallel):
        raise PlanError(
            f"{path} has tensor-parallel size {layout.tensor_size}"
            f"{' with sequence parallelism' if layout.sequence_parallel else ''}, and --tp-2d runs on --tp-x "
            f"{arguments.tp_x} times --tp-y {arguments.tp_y} ranks, without sequence parallelism. Change these two and "
            "search again, or leave --tp-2d out of the script."
        )


def least_expert_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the fewest expert ranks that MindSpeed runs, by the words that require them.

    The groups of MindSpeed-LLM's group-limited routing are the expert ranks; it asserts that they outnumber the groups
    of a token. MindSpeed from 26.1 on does not overlap exchanges of experts that stay on their rank.
    """
    least = {}
    if getattr(arguments, "moe_router_load_balancing_type", None) == "group_limited_greedy":
        groups = int(getattr(arguments, "moe_router_group_topk", None) or 0)
        least[f"group_limited_greedy with --moe-router-group-topk {groups}"] = 1 + groups
    if not _accepts_overlap(arguments, 1) and _accepts_overlap(arguments, 2):
        least["--moe-alltoall-overlap-comm"] = 2
    return least


def _accepts_overlap(arguments: argparse.Namespace, expert_size: int) -> bool:
    """Return whether MindSpeed's own check of ``--moe-alltoall-overlap-comm`` accepts so many expert ranks."""
    module = sys.modules.get("mindspeed.features_manager.moe.moe_alltoall_overlap")
    if module is None or not getattr(arguments, "moe_alltoall_overlap_comm", False):
        return True
    sizes = {"expert_model_parallel_size": expert_size, "tensor_model_parallel_size": 1}
    try:
        with contextlib.redirect_stdout(None):
            module.MoEAlltoAllOverLapFeature().validate_args(argparse.Namespace(**{**vars(arguments), **sizes}))
    except (AssertionError, AttributeError):
        return False
    return True


def check_expert_size(arguments: argparse.Namespace, layout: Layout, path: Path) -> None:
    """Raise ``PlanError`` if the plan has too few expert ranks for MindSpeed."""
    unmet = unmet_expert_size(least_expert_sizes(arguments), layout.expert_size)
    if unmet is not None:
        words, least = unmet
        raise PlanError(
            f"{path} has expert-parallel size {layout.expert_size}, and {words} needs {least} or more. Search for "
            f"devices that hold --expert-model-parallel-size {least}, or leave that flag out."
        )


def check_schedule(arguments: argparse.Namespace, layout: Layout, path: Path) -> None:
    """Raise ``PlanError`` if MindSpeed's schedule needs virtual stages and the plan has none.

    MindSpeed chooses its schedule on import, by the flags of the command line, which a plan can only change later.
    """
    given = [flag_of(name) for name in _VIRTUAL_STAGES_ALONE if getattr(arguments, name, False)]
    if given and layout.virtual_size == 1 and "mindspeed" in sys.modules:
        raise PlanError(
            f"{path} has 1 virtual stage per pipeline stage, and MindSpeed's schedule for {' and '.join(given)} needs "
            "2 or more. Leave that flag out of the script."
        )


def is_mindspeed_mm() -> bool:
    """Return whether the script of this process runs under MindSpeed-MM."""
    return "mindspeed_mm" in sys.modules


def ties_embeddings(content: Mapping[str, object]) -> bool:
    """Return whether a model.json's language model shares one matrix between embedding and output layer."""
    block = content.get("text_decoder")
    return isinstance(block, dict) and not block.get("untie_embeddings_and_output_weights", True)


def check_deepstack(content: Mapping[str, object], encoder: Sequence[int], decoder: Sequence[int], path: Path) -> None:
    """Raise ``PlanError`` if features of vision layers (deepstack) would be lost, given the layers by virtual stage.

    MindSpeed-MM adds them to the first decoder layers of the stage that ends the encoder, and sends none on: with fewer
    layers there it silently trains another model.
    """
    needed = _num_vision_features(content)
    if not needed:
        return
    stage = max(v for v, count in enumerate(encoder) if count)
    if any(decoder[:stage]) or decoder[stage] < needed:
        raise PlanError(
            f"{path}: virtual stage {stage} ends the image encoder and holds {decoder[stage]} decoder layers, and "
            f"features of {needed} vision layers are added to the first {needed} decoder layers there "
            f"(deepstack_visual_indexes). Move {needed - decoder[stage]} or more to it in the plan and simulate it, or "
            "raise the memory limit and search again."
        )


def _num_vision_features(content: Mapping[str, object]) -> int:
    block: object = content
    for key in ("image_encoder", "vision_encoder", "deepstack_visual_indexes"):
        block = block.get(key) if isinstance(block, Mapping) else None
    return len(block) if isinstance(block, list) else 0


def keep_stage(content: dict[str, object], pipeline_rank: int) -> list[int]:
    """Replace counts of recomputed layers per stage by the number of ``pipeline_rank``, in that rank's model.json.

    Returns the pipeline ranks that recompute more than planned: the number holds for every virtual chunk of a rank.
    """
    more: set[int] = set()
    for block in _counted(content):
        chunks = _chunks(block)
        more |= {rank for rank, counts in enumerate(zip(*chunks, strict=True)) if len(set(counts)) > 1}
        _set_number(block, max(counts[pipeline_rank] for counts in chunks))
    return sorted(more)


def keep_largest(content: dict[str, object]) -> None:
    """Replace counts of recomputed layers per stage by the largest, in a model.json that all ranks read."""
    for block in _counted(content):
        _set_number(block, max(max(counts) for counts in _chunks(block)))


def _counted(block: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield the blocks that have counts per stage."""
    if isinstance(block.get(_NUMBER), list):
        yield block
    for child in block.values():
        if isinstance(child, dict):
            yield from _counted(child)


def _chunks(block: dict[str, Any]) -> list[list[int]]:
    """Return a list over pipeline ranks for every virtual chunk."""
    counts = block[_NUMBER]
    return counts if counts and isinstance(counts[0], list) else [counts]


def _set_number(block: dict[str, object], number: int) -> None:
    block[_NUMBER] = number
    if not number:
        for key in _KEYS:
            block.pop(key, None)
