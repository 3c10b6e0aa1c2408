"""The planning problem and its ``fully_shard`` units, shared by all choices of sizes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mindspeed_autoparallel.planner.sharded.prefetching import explicit_lists
from mindspeed_autoparallel.planner.sharded.tensors import Tensors, cut
from mindspeed_autoparallel.profiles.sharded import CostPoint, ModuleCosts, ShardedModule, ShardedProfile
from mindspeed_autoparallel.schedule.sharded import StreamModule, Unit
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP, GroupChoice, ShardedDecisions, ShardingHost, ShardSizes


class Unmeasured(Exception):
    """The profile has no costs for these sizes."""


class Pass(NamedTuple):
    """Nanoseconds of one module's computing and exchanges, rounded as the replay rounds them."""

    forward: int
    tail: int
    backward: int
    tail_backward: int


@dataclass(frozen=True, eq=False)
class Problem:
    """The planning problem, fixed during a search."""

    profile: ShardedProfile
    host: ShardingHost
    devices_per_node: int

    known_parts: dict[tuple[CostPoint, int, tuple[str, ...]], dict[str, tuple[ModuleCosts, ModuleCosts]]] = field(
        default_factory=dict, init=False
    )
    """Cache: costs of one part of a micro batch and of all parts, by kind of module that runs in parts."""
    known_passes: dict[tuple[CostPoint, tuple[int, tuple[str, ...]] | None], dict[str, Pass]] = field(
        default_factory=dict, init=False
    )
    """Cache: passes by kind of module, by profile point and by what runs a micro batch in parts."""
    known_units: dict[tuple[int, ...], dict[int, Unit]] = field(default_factory=dict, init=False)
    """Cache: units by structure and sizes, then by number."""
    known_modules: dict[tuple[int, ShardSizes, int, int, tuple[str, ...]], dict[tuple[str, str], StreamModule]] = field(
        default_factory=dict, init=False
    )
    """Cache: modules by structure, sizes, chunks and hooks, then by name and policy."""

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Return each module's number among those of its pattern, by module name."""
        counts: dict[str, int] = {}
        found = {}
        for module in self.profile.modules:
            found[module.name] = counts.get(module.pattern, 0)
            counts[module.pattern] = found[module.name] + 1
        return found

    @functools.cached_property
    def by_name(self) -> dict[str, ShardedModule]:
        return {module.name: module for module in self.profile.modules}

    @functools.cached_property
    def index_of(self) -> dict[str, int]:
        """Return each module's place in the profile, by module name."""
        return {module.name: index for index, module in enumerate(self.profile.modules)}

    @functools.cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Return for every module the name of the layer that it is or is part of, or an empty string."""
        layers = (self.layer_of(module) for module in self.profile.modules)
        return tuple(layer.name if layer is not None else "" for layer in layers)

    def layer_of(self, module: ShardedModule) -> ShardedModule | None:
        """Return the layer that ``module`` is or is part of."""
        at: ShardedModule | None = module
        while at is not None and not at.is_layer:
            at = self.by_name[at.parent] if at.name else None
        return at

    @functools.cached_property
    def module_counts(self) -> Counter[tuple[str, bool]]:
        """Return the number of modules by kind and by whether they run backward."""
        return Counter((one.kind, one.needs_backward) for one in self.profile.modules)

    @functools.cached_property
    def layer_groups(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """Return the number of layers by their kind and the kinds of the modules in them."""
        members: dict[str, list[str]] = {}
        for module, layer in zip(self.profile.modules, self.layer_names, strict=True):
            if layer and module.needs_backward:
                members.setdefault(layer, []).append(module.kind)
        return Counter((self.by_name[layer].kind, tuple(kinds)) for layer, kinds in members.items())

    @functools.cached_property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the places of the modules of the first and of the last layer that run backward, the layer's first."""
        members: dict[str, list[int]] = {}
        for index, (module, layer) in enumerate(zip(self.profile.modules, self.layer_names, strict=True)):
            if layer and module.needs_backward:
                members.setdefault(layer, []).append(index)
        rows = [tuple(row) for row in members.values()]
        return (rows[0], rows[-1]) if rows else None

    @functools.cache  # noqa: B019 - a problem lives as long as its search
    def free_patterns(self, *, split_experts: bool, chunked_loss: bool) -> list[str]:
        """Return the patterns that may be units or not: not the longest stack of layers, the root, parameters without
        gradients, split experts, what no code calls as a whole, and the head of a chunked loss."""
        found = dict.fromkeys(module.pattern for module in self.profile.modules)
        stacks = Counter(module.pattern for module in self.profile.modules if module.is_layer)
        fixed = {pattern for pattern, _ in stacks.most_common(1)}
        for module in self.profile.modules:
            frozen = not module.needs_backward or bool(self.profile.kinds[module.kind].frozen_parameters)
            split = module.holds_experts and split_experts
            if not (module.name and module.may_be_unit) or frozen or split or (module.is_head and chunked_loss):
                fixed.add(module.pattern)
        return [pattern for pattern in found if pattern not in fixed]

    @functools.cache  # noqa: B019 - a problem lives as long as its search
    def costs_at(self, point: CostPoint) -> dict[str, ModuleCosts]:
        """Return costs by kind of module. Raises ``Unmeasured`` if the profile lacks them."""
        return {name: self.costs_of(name, point) for name in self.profile.kinds}

    def costs_of(self, kind: str, point: CostPoint) -> ModuleCosts:
        """Return the costs of one kind of module. Raises ``Unmeasured`` if the profile lacks them."""
        record = self.profile.kinds[kind]
        found = record.at(point)
        if found is None and record.costs:
            raise Unmeasured(f"{kind or 'the root'} has no costs at {point.label()}")
        return found or ModuleCosts(at=point, forward_us=0.0, backward_us=0.0)

    def units(self, decisions: ShardedDecisions) -> Units:
        """Return the units that ``decisions`` wrap."""
        wrapped = frozenset(group.pattern for group in decisions.groups if group.wrapped)
        return self._units(wrapped, decisions.sizes.expert_size > 1)

    @functools.cache  # noqa: B019 - a problem lives as long as its search
    def _units(self, wrapped: frozenset[str], split_experts: bool) -> Units:
        modules = tuple(
            module
            for module in self.profile.modules
            if not module.name or module.pattern in wrapped or (split_experts and module.holds_experts)
        )
        place = {module.name: index for index, module in enumerate(modules)}
        holders, tensors = [], [(Tensors(), Tensors(), Tensors(), Tensors()) for _ in modules]
        for module in self.profile.modules:
            at = module
            while at.name not in place:
                at = self.by_name[at.parent]
            holders.append(place[at.name])
            kind, row = self.profile.kinds[module.kind], tensors[place[at.name]]
            offset = 2 * module.holds_experts
            row[offset].update(cut(kind.parameters, kind.shapes))
            row[offset + 1].update(cut(kind.frozen_parameters, kind.frozen_shapes))
        return Units(modules, place, tuple(holders), tuple(tensors), self)


_Key = tuple[str, bool, tuple[Tensors, Tensors, Tensors, Tensors]]


@dataclass(frozen=True, eq=False)
class Units:
    """The modules that ``fully_shard`` wraps, in order."""

    modules: tuple[ShardedModule, ...]
    place: dict[str, int]
    """Number of the unit by module name."""
    holders: tuple[int, ...]
    """For every module of the profile, the unit that holds its parameters."""
    tensors: tuple[tuple[Tensors, Tensors, Tensors, Tensors], ...]
    """For every unit, its trainable and frozen tensors outside experts, then inside."""
    problem: Problem

    def places(self, members: tuple[int, ...]) -> set[int]:
        """Return the units that hold the parameters of modules of the profile."""
        return {self.holders[index] for index in members}

    @functools.cache  # noqa: B019 - units live as long as their problem
    def before(self, unit: int, *, backward: bool = False) -> tuple[Counter[str], Counter[str]]:
        """Return by kind the modules whose forward, and those whose subsequent work, ends before a unit's forward
        starts.

        With ``backward``, those whose backward, and whose preceding work, starts after the unit's backward ends.
        """
        problem, around = self.problem, set[str]()
        at = self.modules[unit].name
        end = problem.index_of[at]
        while at:
            at = problem.by_name[at].parent
            around.add(at)
        modules = [one for one in problem.profile.modules[:end] if one.needs_backward or not backward]
        heads = Counter(module.kind for module in modules)
        return heads, Counter(module.kind for module in modules if module.name not in around)

    @functools.cache  # noqa: B019 - units live as long as their problem
    def hooked(self, hooks: tuple[str, ...], split_experts: bool) -> dict[str, tuple[int, ...]]:
        """Return the units whose hooks are on each module, by module name, in the order in which their forward hooks
        run.

        A host that hooks layers calls ``fully_shard`` on split experts first, then on the layer's other modules, and on
        the layer last; hooks of later calls run first.
        """
        found: dict[str, list[int]] = {}
        for place, module in enumerate(self.modules):
            layer = self.problem.layer_of(module) if hooks else None
            at_layer = layer is not None and layer.pattern in hooks and layer.name in self.place
            found.setdefault(layer.name if layer is not None and at_layer else module.name, []).append(place)
        return {
            name: (places[0], *sorted(places[:0:-1], key=lambda one: split_experts and self.modules[one].holds_experts))
            for name, places in found.items()
        }

    def listed_together(self, hooked: Mapping[str, tuple[int, ...]], split_experts: bool) -> dict[str, list[str]]:
        """Return the modules with hooks on one layer in the order of prefetch lists: split experts, the layer, the
        others."""
        found = {}
        for layer, places in hooked.items():
            inside = [self.modules[place] for place in places[:0:-1]]
            split = [one.name for one in inside if split_experts and one.holds_experts]
            if inside:
                found[layer] = [*split, layer, *(one.name for one in inside if one.name not in split)]
        return found

    @functools.cache  # noqa: B019 - units live as long as their problem
    def lists(
        self, groups: tuple[GroupChoice, ...], hooks: tuple[str, ...], split_experts: bool
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Return for every unit those that it gathers ahead in forward and in backward, and its communication
        context."""
        hooked = self.hooked(hooks, split_experts)
        # Split experts are listed where a hook gathers them.
        own = [one for one in self.modules if not (one.holds_experts and split_experts)]
        named = explicit_lists(groups, own, self.listed_together(hooked, split_experts))
        contexts = {one: at for places in hooked.values() for at, one in enumerate(reversed(places))}

        def listed(name: str, lists: Mapping[str, tuple[str, ...]]) -> tuple[int, ...]:
            return tuple(self.place[one] for one in lists.get(name, ()))

        return tuple(
            (listed(one.name, named[0]), listed(one.name, named[1]), contexts[place])
            for place, one in enumerate(self.modules)
        )

    @functools.cached_property
    def alike(self) -> tuple[tuple[int, int], ...]:
        """Return the first unit of each set of equal units, and how many there are."""
        return tuple(Counter(self.like).items())

    @functools.cached_property
    def corners(self) -> tuple[tuple[int, Counter[int]], ...]:
        """Return the first and the last of units that are alike, each with the units up to it by ``like``."""
        first, last = (
            {like: place for place, like in rows} for rows in (reversed([*enumerate(self.like)]), enumerate(self.like))
        )
        return tuple((place, Counter(self.like[: place + 1])) for place in sorted({*first.values(), *last.values()}))

    @functools.cached_property
    def like(self) -> tuple[int, ...]:
        """Return for every unit the first one that is equal to it."""
        first: dict[_Key, int] = {}
        rows = enumerate(zip(self.modules, self.tensors, strict=True))
        return tuple(
            first.setdefault((module.pattern, index in self.staying, row), index) for index, (module, row) in rows
        )

    @functools.cached_property
    def staying(self) -> frozenset[int]:
        """Return the units that the host keeps gathered after forward: last layers of stacks, or all that are not
        layers."""
        if self.problem.host.variant == MEGATRON_FSDP:
            return frozenset(index for index, module in enumerate(self.modules) if not module.is_layer)
        last = {module.pattern: index for index, module in enumerate(self.modules) if module.is_layer}
        return frozenset(last.values()) if self.problem.host.last_layer_stays else frozenset()
