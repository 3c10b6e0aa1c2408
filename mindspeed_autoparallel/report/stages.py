"""Contents, times and memory of every stage of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import StagePlan
from mindspeed_autoparallel.spec.recompute import policy_of


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """The layers of a module on a stage."""

    name: str
    first: int
    last: int
    num_layers: int
    recompute: dict[str, int]
    """Number of layers by recompute kind."""

    @property
    def range(self) -> str:
        """Return ``0-31``, or ``7`` for a single layer."""
        return str(self.first) if self.num_layers == 1 else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """A virtual stage; times of one microbatch."""

    stage: int
    rank: int
    chunk: int
    modules: tuple[ModuleRow, ...]
    """Modules in model order."""
    end_alone: str
    """Contents of a stage without layers; see the function ``end_alone``."""
    forward_us: float
    backward_us: float
    peak_bytes: int | None
    """Peak of the stage's rank; ``None``, as for the limit, if the plan has no memory figures for it."""
    limit_bytes: int | None


def stages(plan: Plan) -> tuple[StageRow, ...]:
    """Return one row per virtual stage in chain order."""
    peaks = {rank.pipeline_rank: rank for rank in plan.memory}
    rows = []
    for stage in plan.stages:
        rank = peaks.get(stage.pipeline_rank)
        rows.append(
            StageRow(
                stage=stage.stage,
                rank=stage.pipeline_rank,
                chunk=stage.chunk,
                modules=_modules(plan, stage),
                end_alone=end_alone(stage),
                forward_us=stage.forward_us,
                backward_us=stage.backward_us,
                peak_bytes=rank.peak_bytes if rank else None,
                limit_bytes=rank.limit_bytes if rank else None,
            )
        )
    return tuple(rows)


def end_alone(stage: StagePlan) -> str:
    """Return ``embedding``, ``output layer`` or ``prediction layers`` if a stage holds no layer, otherwise an empty
    string."""
    if any(stage.layers.values()):
        return ""
    return "prediction layers" if stage.prediction else "output layer" if stage.stage else "embedding"


def rank_label(plan: Plan, rank: int) -> str:
    """Return a rank's layers: ``image_encoder 0-15, text_decoder 0-3``."""
    held: list[str] = []
    for stage in plan.stages:
        if stage.pipeline_rank == rank:
            held += filter(None, [end_alone(stage)])
            held += (f"{part.name} {part.range}" for part in _modules(plan, stage))
    return ", ".join(held)


def _modules(plan: Plan, stage: StagePlan) -> tuple[ModuleRow, ...]:
    return tuple(_module(stage, module.name) for module in plan.model.modules if stage.layers.get(module.name))


def _module(stage: StagePlan, name: str) -> ModuleRow:
    first, count = stage.first_layer.get(name, 0), stage.layers[name]
    kinds = {policy_of(kind).words: number for kind, number in stage.recompute.get(name, {}).items() if number}
    return ModuleRow(name=name, first=first, last=first + count - 1, num_layers=count, recompute=kinds)
