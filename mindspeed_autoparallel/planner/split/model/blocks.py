"""The blocks of a model as segments of a split problem, and the joints between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.planner.split.model.problem import Joint, LayerKind, Segment
from mindspeed_autoparallel.profiles import BlockCost, ModuleCost
from mindspeed_autoparallel.spec import Model, Module

Costs = tuple[int, int, tuple[LayerKind, ...]]
"""Forward and backward ticks of one block, and its kinds."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Runs of equal blocks of all modules in chain order."""

    model: Model
    segments: list[Segment] = field(default_factory=list[Segment])
    costs: list[BlockCost] = field(default_factory=list[BlockCost])
    """Cost of one block, by segment."""
    parts: list[str] = field(default_factory=list[str])
    """By segment: ``pre``, ``layer``, ``prediction``, ``post``."""
    stacks: dict[str, range] = field(default_factory=dict[str, range])
    """Segments of the layers of every module, by module name."""

    def joints(self, *, prediction_apart: bool) -> tuple[Joint, ...]:
        """Return the layers that must share a virtual stage.

        With deepstack they are an encoder's last layer and the decoder's first layers, which read its features. Unless
        ``prediction_apart``, they also are multi-token prediction and the loss.
        """
        found: list[Joint] = []
        for encoder, reader in self.model.deepstacks():
            left = encoder.deepstack_layers
            for index in self.stacks[reader.name]:
                number = min(left, self.segments[index].num_layers)
                left -= number
                if number:
                    found.append(Joint(before=self.stacks[encoder.name][-1], segment=index, num_layers=number))
        for index, part in enumerate(() if prediction_apart else self.parts):
            if part == "prediction" and self.segments[index].beside is None:
                found.append(Joint(before=index, segment=index + 1, num_layers=1))
        return tuple(found)


def blocks_of(
    model: Model,
    modules: Mapping[str, ModuleCost],
    price: Callable[[Module, str, BlockCost, Sequence[BlockCost]], Costs],
    *,
    standalone_ends: bool,
) -> Blocks:
    """Return the blocks of every module.

    ``price`` gets the module, the part, the block, and the runs of layers from this one on (or the block itself).
    ``standalone_ends``: the end blocks of a single module may be on a stage without a layer.
    """
    found = Blocks(model=model)
    segments, last = found.segments, dict[str, int]()
    alone = standalone_ends and len(model.modules) == 1
    for module in model.modules:
        cost = modules[module.name]
        before = tuple(last[name] for name in module.predecessors)
        first = len(segments) + (cost.pre is not None)
        runs = [layer for layer, _ in cost.runs(0, module.num_layers)]
        for part, block, number in cost.parts(module.num_layers):
            run = len(segments) - first
            forward, backward, kinds = price(module, part, block, runs[run:] if part == "layer" else [block])
            segments.append(
                Segment(
                    name=module.result_key if part == "layer" else f"{module.result_key}_{part}",
                    num_layers=number,
                    forward=forward,
                    backward=backward,
                    kinds=kinds,
                    predecessors=before,
                    # Other blocks share the stage of their module's first or last layer.
                    beside=None if alone else {"pre": first, "layer": None}.get(part, first + len(runs) - 1),
                    continues=part == "layer" and run > 0,
                )
            )
            found.costs.append(block)
            found.parts.append(part)
            before = (len(segments) - 1,)
        last[module.name] = len(segments) - 1
        found.stacks[module.name] = range(first, first + len(runs))
    return found
