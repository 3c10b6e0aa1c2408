"""Parallel sizes that flags of MindSpeed demand: it reads them before a plan can change them, or trains otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    context_is_fixed,
    overlaps_whole_experts,
    sums_encoder_gradients,
    tensor_grid,
)
from mindspeed_autoparallel.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """What the script's flags demand; searches leave other sizes out, and a plan with others is refused."""

    context_size: int = 0
    """The script's own, if MindSpeed chose its attention by whether it is above 1; 0: any."""
    fused_linear: bool = False
    """``--use-ascend-mc2``, which needs tensor and sequence parallelism."""
    overlapped_experts: bool = False
    """``--moe-alltoall-overlap-comm``, where it needs tensor-parallel size 1."""
    whole_sequence: bool = False
    """Whether sequence parallelism stays off, with which a script that lacks it would train otherwise."""
    grid: tuple[int, int] | None = None
    """Sides of ``--tp-2d``: their product is the tensor-parallel size, without sequence parallelism."""

    def runs(self, at: MeasuredAt | Layout) -> bool:
        """Return whether the host runs these sizes."""
        return not self.refusal(at)

    def refusal(self, at: MeasuredAt | Layout) -> str:
        """Return why the host does not run these sizes, as words after the plan's file; empty if it does."""
        size = f"has tensor-parallel size {at.tensor_size}"
        if self.context_size and (self.context_size > 1) != (at.context_size > 1):
            return (
                f"has context-parallel size {at.context_size}, and MindSpeed chooses its attention from the command "
                f"line before a plan can set the size (given: {self.context_size}). Give the script "
                f"--context-parallel-size {at.context_size}."
            )
        if self.overlapped_experts and at.tensor_size > 1:
            return (
                f"{size}, and MindSpeed runs --moe-alltoall-overlap-comm with --moe-token-dispatcher-type alltoall_seq "
                "without tensor parallelism, or with --moe-tp-extend-ep. Add that flag to the script, or search again."
            )
        if self.fused_linear and not (at.tensor_size > 1 and at.sequence_parallel):
            return (
                f"{size}{'' if at.sequence_parallel else ' without sequence parallelism'}, and MindSpeed ends there "
                "with --use-ascend-mc2. Leave that flag out of the script."
            )
        if self.grid and (self.grid[0] * self.grid[1] != at.tensor_size or at.sequence_parallel):
            return (
                f"{size}{' with sequence parallelism' if at.sequence_parallel else ''}, and --tp-2d runs on --tp-x "
                f"{self.grid[0]} times --tp-y {self.grid[1]} ranks, without sequence parallelism. Change these two and "
                "search again, or leave --tp-2d out of the script."
            )
        if self.whole_sequence and at.sequence_parallel:
            return (
                "turns sequence parallelism on, with which MindSpeed-MM sums the image encoder's gradients over the "
                f"{at.tensor_size} tensor ranks. Search again, or give --sequence-parallel to train so."
            )
        return ""

    @property
    def words(self) -> str:
        """Return the flags that demand sizes, as text for a message."""
        flags = (
            (self.context_size > 1, f"--context-parallel-size {self.context_size}"),
            (self.fused_linear, "--use-ascend-mc2 (tensor and sequence parallelism)"),
            (self.overlapped_experts, "--moe-alltoall-overlap-comm (tensor-parallel size 1)"),
            (self.whole_sequence, "--sequence-parallel, which is not given"),
            (
                self.grid,
                f"--tp-2d (tensor-parallel size {self.grid[0] * self.grid[1]}, no sequence parallelism)"
                if self.grid
                else "",
            ),
        )
        return ", ".join(words for demanded, words in flags if demanded)


def fixed_sizes(arguments: argparse.Namespace, content: Mapping[str, object]) -> FixedSizes:
    """Return the sizes that the flags of ``arguments`` demand; ``content``: the model's model.json, or empty."""
    return FixedSizes(
        context_size=int(getattr(arguments, "context_parallel_size", 1) or 1) if context_is_fixed() else 0,
        fused_linear=bool(getattr(arguments, "use_ascend_mc2", False)),
        overlapped_experts=overlaps_whole_experts(arguments),
        whole_sequence=sums_encoder_gradients(content) and not getattr(arguments, "sequence_parallel", False),
        grid=tensor_grid(arguments),
    )
