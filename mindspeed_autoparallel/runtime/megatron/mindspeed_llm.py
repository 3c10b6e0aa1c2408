"""What MindSpeed and MindSpeed-LLM read from the command line before a plan can set it: splits of layers, and whether
attention runs under context parallelism."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.spec.layout import Layout

LIST_ARGUMENT, NOOP_ARGUMENT = "num_layer_list", "noop_layers"


def is_mindspeed_llm(arguments: argparse.Namespace) -> bool:
    """Return whether the script runs under MindSpeed-LLM, which alone has both flags."""
    return hasattr(arguments, LIST_ARGUMENT) and hasattr(arguments, NOOP_ARGUMENT)


def split_arguments(counts: Sequence[int], virtual_size: int) -> dict[str, int | str | None]:
    """Return destinations and values for layers by virtual stage (``counts``, in the order of the chain).

    Without virtual stages ``--num-layer-list`` takes any numbers. It does not go with virtual stages: there every chunk
    gets as many layers as the largest, and ``--noop-layers`` names those that do nothing.
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
    """Raise ``PlanError`` with the words to add where the plan in ``path`` needs ``--num-layer-list``.

    MindSpeed-LLM puts its functions for it in place while it is imported, by the command line as it stands there.
    """
    wanted = stages.get(LIST_ARGUMENT)
    given = getattr(arguments, LIST_ARGUMENT, None)
    if wanted is not None and given != wanted:
        raise PlanError(
            f"{path} has {wanted} layers on its stages, and MindSpeed-LLM reads such a split from the command line "
            f"before a plan can set it (given: {given or 'none'}). Add --num-layer-list {wanted} to the script's flags."
        )


def context_is_fixed() -> bool:
    """Return whether MindSpeed was imported: it chooses its attention then, by the context-parallel size given."""
    return "mindspeed.features_manager" in sys.modules


def check_context_was_given(given: int, planned: int, path: Path) -> None:
    """Raise ``PlanError`` where MindSpeed patched attention for another context-parallel size than the plan's.

    It chooses its attention while it is imported, by whether the size ``given`` on the command line is above 1.
    """
    if context_is_fixed() and (given > 1) != (planned > 1):
        raise PlanError(
            f"{path} has context-parallel size {planned}, and MindSpeed chooses its attention from the command line "
            f"before a plan can set the size (given: {given}). Give the script --context-parallel-size {planned}."
        )


def tensor_grid(arguments: argparse.Namespace) -> int:
    """Return the ranks of MindSpeed's ``--tp-2d``, which a plan's tensor-parallel size must equal; 0 without it."""
    if not getattr(arguments, "tp_2d", False):
        return 0
    return int(getattr(arguments, "tp_x", 1)) * int(getattr(arguments, "tp_y", 1))


def check_tensor_size(arguments: argparse.Namespace, layout: Layout, path: Path) -> None:
    """Raise ``PlanError`` where MindSpeed ends: ``--use-ascend-mc2`` needs a split along the sequence, ``--tp-2d`` its
    own size and no such split."""
    if getattr(arguments, "use_ascend_mc2", False) and not (layout.tensor_size > 1 and layout.sequence_parallel):
        raise PlanError(
            f"{path} has tensor-parallel size {layout.tensor_size}"
            f"{'' if layout.sequence_parallel else ' without sequence parallelism'}, and MindSpeed ends there beside "
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
