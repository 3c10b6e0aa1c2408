"""The forward of a module distributed by a plan: checks that a call fits one of the captures, and runs it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import REPLICATE
from mindspeed_autoparallel.operators.torch.graph_builder import Captured
from mindspeed_autoparallel.operators.torch.planned import PlannedModule


@dataclass(frozen=True)
class Variant:
    """One capture of the module, and its executor."""

    captured: Captured
    planned: PlannedModule


class DistributedForward:
    """Runs the capture that fits the tensors of a call, and returns results as ``distribute_plan`` documents.

    ``parameters``: by first name; ``arrival``: the placement of a batch that a loader cuts, empty for whole inputs.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        parameters: Mapping[str, torch.nn.Parameter],
        model: torch.nn.Module,
        arrival: tuple[int, ...],
    ) -> None:
        self.variants, self.parameters, self.model, self.arrival = variants, parameters, model, arrival
        self.checked: set[int] = set()
        """Indices of the variants whose inputs were compared between ranks."""
        mesh = variants[0].planned.mesh
        self.parts = math.prod(n for n, at in zip(mesh.shape, arrival, strict=False) if at != REPLICATE)
        for variant in variants:
            samples = variant.captured.graph.samples
            if samples % self.parts:
                raise ConfigError(
                    f"{self.parts} ranks along loader_dims do not divide the captured batch of {samples} samples: "
                    "capture the batch of all of them together."
                )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        example, named = self.variants[0].captured.example
        if len(arguments) != len(example) or set(keywords) - {"return_dict"} != set(named) - {"return_dict"}:
            raise ConfigError(
                f"the module was captured with {len(example)} inputs by position and {', '.join(named) or 'none'} by "
                f"name, and is called with {len(arguments)} and {', '.join(keywords) or 'none'}."
            )
        ordered = (arguments, {key: keywords[key] for key in named if key in keywords})
        tensors = [value for value in pytree.tree_leaves(ordered) if isinstance(value, torch.Tensor)]
        number = self._fitting(tensors)
        variant = self.variants[number]
        self._check(number, variant.captured, tensors)
        pieces = {name: _local(value) for name, value in self.parameters.items()}
        buffers = {name: _local(value) for name, value in self.model.named_buffers()}
        return variant.planned.run(tensors, pieces, buffers, self.arrival)

    def _fitting(self, tensors: list[torch.Tensor]) -> int:
        """Return the index of the variant for the module's mode and the shapes of ``tensors``."""
        shapes = [tuple(value.shape) for value in tensors]
        now = _training(self.model)
        in_mode = [number for number, variant in enumerate(self.variants) if _has_mode(variant.captured, now)]
        for number in in_mode:
            if shapes == self._wanted(self.variants[number].captured):
                return number
        if not in_mode:
            mode = "training" if any(now) else "evaluation"
            raise ConfigError(
                f"{type(self.model).__name__} is in {mode} mode, and was captured in another, whose dropout and "
                f"running statistics its capture keeps: capture it in {mode} mode as well, before distribute_plan, and "
                "give that capture as also=[..]."
            )
        known = " or ".join(str(self._wanted(self.variants[number].captured)) for number in in_mode)
        raise ConfigError(
            f"the inputs have the shapes {shapes}, and the capture and its plan are for {known}: pad the batch, drop a "
            "smaller last one, or capture these shapes as well, before distribute_plan, and give that as also=[..]."
        )

    def _wanted(self, captured: Captured) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs of one rank."""
        shapes = [captured.graph.nodes[name].output_shape for name in captured.inputs]
        samples = captured.graph.samples
        return [
            (samples // self.parts, *shape[1:]) if self.parts > 1 and shape[:1] == (samples,) else tuple(shape)
            for shape in shapes
        ]

    def _check(self, number: int, captured: Captured, tensors: list[torch.Tensor]) -> None:
        """Raise ``ConfigError`` for inputs with a gradient and, in a variant's first call, differing whole inputs."""
        for name, value in zip(captured.inputs, tensors, strict=True):
            if value.requires_grad and torch.is_grad_enabled():
                raise ConfigError(
                    f"input {name} requires a gradient, but a plan computes only those of parameters: detach it, "
                    "or capture the module together with the code that computes it."
                )
        if number in self.checked:
            return
        self.checked.add(number)
        mesh = self.variants[number].planned.mesh
        place = [c for c, at in zip(mesh.coordinates, self.arrival, strict=False) if at != REPLICATE]
        sums = [zlib.crc32(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()) for value in tensors]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (place, sums))
        for rank, (other, found) in enumerate(everyone):
            for name, one, two in zip(captured.inputs, everyone[0][1], found, strict=True):
                whole = captured.graph.nodes[name].output_shape[:1] != (captured.graph.samples,)
                if one != two and (other == everyone[0][0] or (whole and self.parts > 1)):
                    raise ConfigError(
                        f"input {name} of rank {rank} differs from that of rank 0, but the plan computes one batch "
                        "on all of them: give every rank the same, or name the mesh dims along which a loader gives "
                        "different samples (distribute_plan(.., loader_dims=[..])) and capture their whole batch."
                    )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedForward:
        raise ConfigError(
            "a module distributed by a plan cannot be copied: it holds process groups. Copy the module before "
            "distribute_plan, and distribute the copy by the same plan."
        )


def _has_mode(captured: Captured, now: tuple[bool, ...]) -> bool:
    """Return whether ``captured`` computes the same as the module; ``now``: training mode of every submodule."""
    # A capture in evaluation mode lacks the random draws of training.
    begins = any(after > before for before, after in zip(captured.training, now, strict=True))
    return now == captured.training or not (begins or captured.depends_on_mode)


def _training(model: torch.nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece; a buffer is whole on every rank, and returned as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
