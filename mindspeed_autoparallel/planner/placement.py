"""Which layers of which module run on which virtual stage, and under which recompute kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.cost.placed import grouped_layer
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles import BlockCost, Measurement, ModuleCost, Profile
from mindspeed_autoparallel.spec import Layout, Model, Plan
from mindspeed_autoparallel.spec.legality import too_many_stages
from mindspeed_autoparallel.spec.recompute import in_order, policy_of

RECOMPUTED_KINDS = ("full", "selective")


@dataclass(frozen=True, kw_only=True)
class ModulePlacement:
    """Layers of all modules by virtual stage, in chain order."""

    layers: dict[str, tuple[int, ...]]
    """Module name to layers per virtual stage."""
    recompute: dict[str, dict[str, tuple[int, ...]]]
    """Module name to kind (``spec.recompute``) to layers per virtual stage."""
    prediction_stage: int | None = None
    """Virtual stage of the layers of multi-token prediction, where that is not the loss's."""

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
            prediction_stage=next((stage.stage for stage in plan.stages if stage.prediction), None),
        )


def placed_blocks(model: Model, measurement: Measurement, placement: ModulePlacement) -> list[list[PlacedBlock]]:
    """Return the blocks of every virtual stage in the order they run; recomputed layers are the first of their module
    there.

    A pre block sits with the module's first layer, a post block with its last; those of the only module on the first
    and the last stage, with layers or without. Layers of multi-token prediction are before the post block. Raises
    ``ConfigError`` for a recompute kind that was not measured.
    """
    num = len(next(iter(placement.layers.values())))
    stages: list[list[PlacedBlock]] = [[] for _ in range(num)]
    for module in model.modules:
        cost = measurement.modules[module.name]
        layers = placement.layers[module.name]
        held, apart = stages_of(model, cost, layers, placement.prediction_stage), placement.prediction_stage
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
            if cost.prediction is not None and v == (held[-1] if apart is None else apart):
                stages[v].append(PlacedBlock(name=f"{module.name} prediction", cost=cost.prediction, side=cost.side))
            if cost.post is not None and v == held[-1]:
                stages[v].append(PlacedBlock(name=f"{module.name} post", cost=cost.post, side=cost.side))
    return stages


def check_placement(model: Model, layout: Layout, placement: ModulePlacement) -> None:
    """Raise ``ConfigError`` where a host would lose features (deepstack), or not run multi-token prediction."""
    check_deepstack(model, placement.layers)
    check_prediction(model, layout, placement)


def check_deepstack(model: Model, layers: Mapping[str, Sequence[int]]) -> None:
    """Raise ``ConfigError`` where features of an encoder's layers would be lost; ``layers`` by virtual stage."""
    for encoder, reader in model.deepstacks():
        stage = max(v for v, count in enumerate(layers[encoder.name]) if count)
        missing = encoder.deepstack_layers - layers[reader.name][stage]
        if missing > 0:
            raise ConfigError(
                f"virtual stage {stage} ends {encoder.name} and holds {layers[reader.name][stage]} layers of "
                f"{reader.name}, but features of {encoder.name} are added to the first {encoder.deepstack_layers} "
                f"(deepstack) and hosts do not send them to later stages. Move {missing} or more to this stage."
            )


def prediction_may_be_apart(model: Model, layout: Layout) -> bool:
    """Return whether layers of multi-token prediction may be on another stage than the loss.

    Megatron takes them on the last chunk of any rank but the first, behind all layers: where no stage is empty that is
    the last virtual stage or the one before it. A tied embedding stays with the loss, where its copy is, and so it does
    where passes are paired, which was not measured separately.
    """
    alone = layout.standalone_ends and len(model.modules) == 1
    return alone and layout.pipeline_size >= 3 and not (model.tied_embeddings or layout.paired)


def too_few_layers(profile: Profile, layout: Layout) -> str:
    """Return why the layers cannot be cut into the virtual stages of ``layout``, or an empty string."""
    model, ends = profile.model, 0
    if layout.standalone_ends and len(model.modules) == 1:
        (cost,) = profile.measurements[0].modules.values()
        apart = cost.prediction is not None and prediction_may_be_apart(model, layout)
        ends = (cost.pre is not None) + (cost.post is not None) + apart
    return too_many_stages(layout.num_virtual_stages, model.num_layers, ends, model.num_layers - model.num_parts)


def check_prediction(model: Model, layout: Layout, placement: ModulePlacement) -> None:
    """Raise ``ConfigError`` where layers of multi-token prediction are on a stage that cannot hold them."""
    v, size, num = placement.prediction_stage, layout.pipeline_size, layout.num_virtual_stages
    if v is None:
        return
    last = max(place for row in placement.layers.values() for place, count in enumerate(row) if count)
    if len(model.modules) > 1 or not max(last, num - size + 1) <= v < num - 1:
        raise ConfigError(
            f"virtual stage {v} cannot hold the layers of multi-token prediction: they run on the last chunk of a rank "
            f"other than the first, behind all layers (stage {last} has the last one of {num} stages on {size} ranks). "
            "Without prediction_stage they run beside the loss."
        )


def stages_of(model: Model, cost: ModuleCost, layers: tuple[int, ...], apart: int | None) -> list[int]:
    """Return virtual stages that hold part of a module: with layers, or an end of the only module alone; or layers of
    multi-token prediction ``apart``."""
    held = {v for v, count in enumerate(layers) if count}
    if apart is not None and cost.prediction is not None:
        held.add(apart)
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
    apart = placement.prediction_stage
    held = {name: stages_of(model, measurement.modules[name], row, apart) for name, row in placement.layers.items()}
    first, last = ({name: stages[end] for name, stages in held.items()} for end in (0, -1))
    sizes = []
    for v in range(num - 1):
        size = 0
        for module in model.modules:
            cost = measurement.modules[module.name]
            readers = [other.name for other in model.modules if module.name in other.predecessors]
            if first[module.name] <= v < last[module.name]:
                ahead = cost.prediction if apart is not None and apart <= v else None
                size += (ahead or cost.layer).output_bytes
            elif last[module.name] <= v and any(first[reader] > v for reader in readers):
                size += (cost.post or cost.layer).output_bytes
        sizes.append(size)
    return sizes
