"""Which layers of which module run on which virtual stage, and under which recompute kind."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles import Measurement
from mindspeed_autoparallel.spec import Model, Plan

RECOMPUTED_KINDS = ("full", "selective")


@dataclass(frozen=True, kw_only=True)
class ModulePlacement:
    """Layers of all modules by virtual stage, in chain order."""

    layers: dict[str, tuple[int, ...]]
    """Module name to layers per virtual stage."""
    recompute: dict[str, dict[str, tuple[int, ...]]]
    """Module name to kind (``full``, ``selective``) to layers per virtual stage."""

    def recomputed(self, module: str) -> tuple[int, ...]:
        """Recomputed layers of any kind per virtual stage."""
        rows = list(self.recompute.get(module, {}).values())
        return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(self.layers[module])

    @classmethod
    def of_plan(cls, plan: Plan) -> ModulePlacement:
        """The placement that a plan file holds."""
        return cls(
            layers={module.name: plan.layers_of(module.name) for module in plan.model.modules},
            recompute={
                module.name: {kind: plan.recomputed_of(module.name, kind) for kind in RECOMPUTED_KINDS}
                for module in plan.model.modules
            },
        )


def placed_blocks(model: Model, measurement: Measurement, placement: ModulePlacement) -> list[list[PlacedBlock]]:
    """The blocks of every virtual stage in the order they run; recomputed layers are the first of their module there.

    A pre block sits with the module's first layer, a post block with its last. Raises ``ConfigError`` for a recompute
    kind that was not measured.
    """
    num = len(next(iter(placement.layers.values())))
    stages: list[list[PlacedBlock]] = [[] for _ in range(num)]
    for module in model.modules:
        cost = measurement.modules[module.name]
        layers = placement.layers[module.name]
        held = [v for v, count in enumerate(layers) if count]
        index = 0
        for v in held:
            if cost.pre is not None and v == held[0]:
                stages[v].append(PlacedBlock(name=f"{module.name} pre", cost=cost.pre, side=cost.side))
            kinds = []
            for kind in RECOMPUTED_KINDS:
                row = placement.recompute.get(module.name, {}).get(kind)
                count = row[v] if row else 0
                if count and kind not in cost.layer.recompute:
                    raise ConfigError(
                        f"stage {v}: {kind} recompute of {module.name} is not in the profile "
                        f"(it has {', '.join(cost.layer.recompute)})."
                    )
                kinds += [kind] * count
            kinds += ["none"] * (layers[v] - len(kinds))
            for kind in kinds:
                name = f"{module.name} layer {index}"
                stages[v].append(PlacedBlock(name=name, cost=cost.layer, kind=kind, side=cost.side))
                index += 1
            if cost.post is not None and v == held[-1]:
                stages[v].append(PlacedBlock(name=f"{module.name} post", cost=cost.post, side=cost.side))
    return stages


def boundary_bytes(model: Model, measurement: Measurement, placement: ModulePlacement) -> list[int]:
    """Bytes of the message from every virtual stage to the next: what is running, and finished outputs still unused."""
    num = len(next(iter(placement.layers.values())))
    first = {name: min(v for v, count in enumerate(row) if count) for name, row in placement.layers.items()}
    last = {name: max(v for v, count in enumerate(row) if count) for name, row in placement.layers.items()}
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
