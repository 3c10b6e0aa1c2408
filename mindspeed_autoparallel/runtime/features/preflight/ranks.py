"""Groups of ranks with equal memory, the ranks to run, and the task of each.

Ranks of one pipeline stage have equal memory: tensor and context ranks have equal shards, replicas have equal shards of
the optimizer (the last one less if a bucket was padded), and expert ranks have equally many experts and, with balanced
routers, equally many tokens. Stages differ by their layers and by their microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec.layout import Layout, ModuleLayout
from mindspeed_autoparallel.spec.plan import Plan

Place = tuple[int, ...]
"""The coordinates that determine a rank's memory: its pipeline rank, and its stage in every encoder's pipeline."""

TASK_KIND = "preflight"


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Ranks with equal memory."""

    rank: int
    """The one that is run: the first of them, or the one that the user selects."""
    pipeline_rank: int
    members: tuple[int, ...]
    why: str


def places(layout: Layout, pipeline_before_data: bool) -> Callable[[int], Place]:
    """Return the function from a rank to its place; ``pipeline_before_data``: ``--use-tp-pp-dp-mapping``."""
    modules: list[Layout | ModuleLayout] = [layout, *(module for _, module in sorted(layout.modules.items()))]

    def stage(rank: int, module: Layout | ModuleLayout) -> int:
        if pipeline_before_data:
            return rank // (module.tensor_size * module.context_size) % module.pipeline_size
        return rank // (layout.num_devices // module.pipeline_size)

    def place(rank: int) -> Place:
        return tuple(stage(rank, module) for module in modules)

    return place


def kinds_of_ranks(layout: Layout, tp_pp_dp: bool) -> tuple[RankKind, ...]:
    """Return the kinds in the order of their first ranks; ``tp_pp_dp``: ``--use-tp-pp-dp-mapping``."""
    place_of = places(layout, tp_pp_dp)
    found: dict[Place, list[int]] = {}
    for rank in range(layout.num_devices):
        found.setdefault(place_of(rank), []).append(rank)
    return tuple(
        RankKind(rank=members[0], pipeline_rank=place[0], members=tuple(members), why=_why(layout, place))
        for place, members in found.items()
    )


def _why(layout: Layout, place: Place) -> str:
    first, last = place[0], layout.pipeline_size - 1
    if layout.pipeline_size == 1:
        where = "the only stage"
    elif first == 0:
        where = "first stage"
    elif first == last:
        where = "last stage"
    else:
        where = f"inner stage {first}"
    encoders = zip(sorted(layout.modules), place[1:], strict=True)
    stages = [f"stage {stage} of {name}" for name, stage in encoders if layout.modules[name].pipeline_size > 1]
    return ", ".join([where, *stages])


def selected(kinds: Sequence[RankKind], wanted: str, plan: Plan | None, layout: Layout) -> tuple[RankKind, ...]:
    """Return the kinds that ``--auto-parallel-preflight-ranks`` names; ``ConfigError`` if there is no such rank.

    For a number, the first rank of its tensor group is run, because it reads the group's data.
    """
    if wanted == "distinct":
        return tuple(kinds)
    if wanted == "ends":
        peaks = {memory.pipeline_rank: memory.peak_bytes for memory in plan.memory} if plan is not None else {}
        worst = max(kinds, key=lambda kind: peaks.get(kind.pipeline_rank, 0))
        picked = {kinds[0].rank, kinds[-1].rank, worst.rank}
        return tuple(kind for kind in kinds if kind.rank in picked)
    numbers = rank_numbers(wanted, layout.num_devices)
    firsts = dict.fromkeys(number - number % layout.tensor_size for number in numbers)
    return tuple(replace(kind, rank=first) for first in firsts for kind in kinds if first in kind.members)


def rank_numbers(wanted: str, world_size: int) -> list[int]:
    """Return the ranks in a text such as ``0,37``; ``ConfigError`` for an entry that is not a rank of
    ``world_size``."""
    numbers = []
    for word in wanted.split(","):
        if not word.strip().isdigit() or int(word) >= world_size:
            raise ConfigError(
                f"--auto-parallel-preflight-ranks {wanted}: {word.strip() or 'an empty word'} is not a rank of this "
                f"layout, which has ranks 0 to {world_size - 1}. Give numbers, distinct or ends."
            )
        numbers.append(int(word))
    return numbers


@dataclass(frozen=True, kw_only=True)
class PreflightTask:
    """One rank to play."""

    rank: int
    world_size: int
    plan: str
    """Path of the plan; empty: the script's own layout."""
    num_steps: int
    imbalance: float
    """Tokens of this rank's experts, relative to an even share."""
    switches: tuple[str, ...]
    """Destinations of the user's other switches of this package."""
    result: str
    """File that the child writes."""
