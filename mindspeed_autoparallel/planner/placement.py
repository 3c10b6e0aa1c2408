"""Which layers of which module run on which virtual stage, and under which recompute kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.groups import grouped_layer
from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles import BlockCost, Measurement, ModuleCost
from mindspeed_autoparallel.spec import Model, Plan
from mindspeed_autoparallel.spec.recompute import in_order, policy_of

RECOMPUTED_KINDS = ("full", "selective")


@dataclass(frozen=True, kw_only=True)
class ModulePlacement:
    """Layers of all modules by virtual stage, in chain order."""

    layers: dict[str, tuple[int, ...]]
    """Module name to layers per virtual stage."""
    recompute: dict[str, dict[str, tuple[int, ...]]]
    """Module name to kind (``spec.recompute``) to layers per virtual stage."""

    def recomputed(self, module: str) -> tuple[int, ...]:
        """Return recomputed layers of any kind per virtual stage."""
        rows = list(self.recompute.get(module, {}).values())
        return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(self.layers[module])

    @classmethod
    def of_plan(cls, plan: Plan) -> ModulePlacement:
        """Return the placement that a plan file holds."""
        return cls(
            layers={module.name: plan.layers_of(module.name) for module in plan.model.modules},
            recompute={
                module.name: {kind: plan.recomputed_of(module.name, kind) for kind in _kinds_of(plan, module.name)}
                for module in plan.model.modules
            },
        )


def placed_blocks(model: Model, measurement: Measurement, placement: ModulePlacement) -> list[list[PlacedBlock]]:
    """Return the blocks of every virtual stage in the order they run; recomputed layers are the first of their module
    there.

    A pre block sits with the module's first layer, a post block with its last; those of the only module on the first
    and the last stage, with layers or without. Raises ``ConfigError`` for a recompute kind that was not measured.
    """
    num = len(next(iter(placement.layers.values())))
    stages: list[list[PlacedBlock]] = [[] for _ in range(num)]
    for module in model.modules:
        cost = measurement.modules[module.name]
        layers = placement.layers[module.name]
        held = stages_of(model, cost, layers)
        index = 0
        for v in held:
            if cost.pre is not None and v == held[0]:
                stages[v].append(PlacedBlock(name=f"{module.name} pre", cost=cost.pre, side=cost.side))
            rows = placement.recompute.get(module.name, {})
            costs = [layer for layer, count in cost.runs(index, layers[v]) for _ in range(count)]
            here: list[tuple[BlockCost, str]] = []
            for kind in in_order(rows):
                here += _recomputed(costs[len(here) : len(here) + rows[kind][v]], kind, module.name, v)
            here += [(layer, "none") for layer in costs[len(here) :]]
            for layer, kind in here:
                name = f"{module.name} layer {index}"
                stages[v].append(PlacedBlock(name=name, cost=layer, kind=kind, side=cost.side))
                index += 1
            if cost.post is not None and v == held[-1]:
                stages[v].append(PlacedBlock(name=f"{module.name} post", cost=cost.post, side=cost.side))
    return stages


def check_deepstack(model: Model, layers: Mapping[str, Sequence[int]]) -> None:
    """Raise ``ConfigError`` where features of an encoder's layers would be lost; ``layers`` by virtual stage."""
    for encoder, reader in model.deepstacks():
        stage = max(v for v, count in enumerate(layers[encoder.name]) if count)
        missing = encoder.deepstack_layers - layers[reader.name][stage]
        if missing > 0:
            raise ConfigError(
                f"virtual stage {stage} ends {encoder.name} and holds {layers[reader.name][stage]} layers of "
                f"{reader.name}, and features of {encoder.name} are added to the first {encoder.deepstack_layers} "
                f"there (deepstack), which hosts send no further. Move {missing} or more to it."
            )


def stages_of(model: Model, cost: ModuleCost, layers: tuple[int, ...]) -> list[int]:
    """Return virtual stages that hold part of a module: with layers, or an end of the only module alone."""
    held = {v for v, count in enumerate(layers) if count}
    if len(model.modules) == 1:
        held |= {0} if cost.pre is not None else set()
        held |= {len(layers) - 1} if cost.post is not None else set()
    return sorted(held)


def _kinds_of(plan: Plan, module: str) -> list[str]:
    kinds = {kind for stage in plan.stages for kind in stage.recompute.get(module, {})}
    return in_order({*RECOMPUTED_KINDS, *kinds})


def _recomputed(layers: list[BlockCost], kind: str, module: str, stage: int) -> list[tuple[BlockCost, str]]:
    """Return costs and kinds of ``layers`` in a row."""
    size = policy_of(kind).layers_per_group
    profiled = "full" if size else kind
    for layer in layers:
        if profiled not in layer.recompute:
            raise ConfigError(
                f"stage {stage}: {kind} recompute of {module} is not in the profile "
                f"(it has {', '.join(layer.recompute)})."
            )
    if size < 2:
        return [(layer, kind) for layer in layers]
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    return [(grouped_layer(layer, place, len(group)), "full") for group in groups for place, layer in enumerate(group)]


def boundary_bytes(model: Model, measurement: Measurement, placement: ModulePlacement) -> list[int]:
    """Return bytes of the message from every virtual stage to the next: what is running, and finished outputs still
    unused."""
    num = len(next(iter(placement.layers.values())))
    held = {name: stages_of(model, measurement.modules[name], row) for name, row in placement.layers.items()}
    first, last = ({name: stages[end] for name, stages in held.items()} for end in (0, -1))
    sizes = []
    for v in range(num - 1):
        size = 0
        for module in model.modules:
            cost = measurement.modules[module.name]
            readers = [other.name for other in model.modules if module.name in other.predecessors]
            if first[module.name] <= v < last[module.name]:
                size += cost.layer.output_bytes
            elif last[module.name] <= v and any(first[reader] > v for reader in readers):
                size += (cost.post or cost.layer).output_bytes
        sizes.append(size)
    return sizes
