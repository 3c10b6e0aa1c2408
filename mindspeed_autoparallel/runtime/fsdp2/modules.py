"""The modules of a model that a plan covers: the root, those that the user's file names, and the head."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig
from mindspeed_autoparallel.hosts.patterns import EVERY_INDEX, matching_names
from mindspeed_autoparallel.profiles.sharded import ModuleKind, ShardedModule

if TYPE_CHECKING:
    import torch

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_HEADS = ("lm_head", "output_layer")


@dataclass(frozen=True)
class FoundModules:
    """The modules of a model, in the order of ``named_modules``, and their kinds by name."""

    modules: tuple[ShardedModule, ...]
    kinds: dict[str, ModuleKind]

    def ordered(self, order: Sequence[str]) -> tuple[ShardedModule, ...]:
        """Return the modules in forward order; modules that never ran come first below their parents.

        ``order``: module names by first call.
        """
        place = {name: index for index, name in enumerate(order)}
        by_parent: dict[str, list[ShardedModule]] = {}
        for module in self.modules[1:]:
            by_parent.setdefault(module.parent, []).append(module)

        def below(module: ShardedModule) -> list[ShardedModule]:
            children = sorted(by_parent.get(module.name, []), key=lambda one: place.get(one.name, -1))
            return [module, *(inner for child in children for inner in below(child))]

        return tuple(below(self.modules[0]))


def pattern_of(name: str) -> str:
    """Return ``name`` with ``{*}`` for every number: ``model.layers.{*}.mlp``."""
    return _INDEX.sub(EVERY_INDEX, name)


def find_modules(model: Any, config: NativeConfig) -> FoundModules:
    """Return the root, the modules that ``config``'s lists name, and the head; call it before ``fully_shard``.

    A layer is a member of a stack that a recompute or offload list names, or of a stack of two or more members that
    ``apply_modules`` names and the trainer can recompute.
    """
    parts = dict(model.named_modules())
    names = [name for name in parts if name]
    sharding, features = config.sharding, config.features
    listed = (
        *(config.values.texts("features.recompute_plan.apply_modules")),
        *(config.values.texts("features.activation_offload_plan.apply_modules")),
    )
    wrapped = (*sharding.apply_modules, *features.chunk_batch, *listed)
    experts = matching_names(sharding.expert_modules, names)
    heads = [name for name in _HEADS if name in parts]
    chosen = {*matching_names(wrapped, names), *experts, *heads}
    chosen = {name for name in names if name in chosen}
    layers = set(matching_names(listed, names)) | _stacked(parts, matching_names(sharding.apply_modules, names))
    found, kinds = [], dict[str, ModuleKind]()
    for name in ["", *(name for name in names if name in chosen)]:
        signature = _own_parameters(parts[name], name, chosen)
        kind = _kind_name(pattern_of(name), type(parts[name]).__name__, signature, kinds)
        found.append(
            ShardedModule(
                name=name,
                kind=kind,
                pattern=pattern_of(name),
                parent=_parent(name, chosen),
                is_layer=name in layers and name not in experts,
                holds_experts=name in experts,
                is_head=name in heads,
            )
        )
    return FoundModules(tuple(found), kinds)


def _stacked(parts: Mapping[str, torch.nn.Module], names: Iterable[str]) -> set[str]:
    """Return the ``names`` that are members of a list of decoder or encoder layers."""
    found = set()
    for name in names:
        stack, _, index = name.rpartition(".")
        # Norms, mergers and projections come in lists, too; a layer has norms, an attention or other mixer, and an MLP.
        children = [child for child, _ in parts[name].named_children()] if index.isdigit() else []
        is_layer = index.isdigit() and len(list(parts[stack].children())) > 1 and len(children) > 2
        if is_layer and _can_be_recomputed(parts[name]):
            found.add(name)
    return found


def _can_be_recomputed(module: torch.nn.Module) -> bool:
    """Return whether ``module`` accepts the cache that the trainer passes to every module it recomputes."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(one.name == "past_key_values" or one.kind is one.VAR_KEYWORD for one in parameters)


def _parent(name: str, chosen: set[str]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in chosen:
            return name
    return ""


def _own_parameters(module: Any, name: str, chosen: set[str]) -> tuple[tuple[tuple[int, ...], bool], ...]:
    prefix = f"{name}." if name else ""
    found = []
    for own, parameter in module.named_parameters():
        owner = (prefix + own).rpartition(".")[0]
        while owner and owner not in chosen:
            owner = owner.rpartition(".")[0]
        if owner == name:
            found.append((tuple(parameter.shape), bool(parameter.requires_grad)))
    return tuple(found)


def _kind_name(
    pattern: str, class_name: str, signature: tuple[tuple[tuple[int, ...], bool], ...], kinds: dict[str, ModuleKind]
) -> str:
    kind = ModuleKind(
        parameters=tuple(math.prod(shape) for shape, trained in signature if trained),
        frozen_parameters=tuple(math.prod(shape) for shape, trained in signature if not trained),
        shapes=tuple(shape for shape, trained in signature if trained),
        frozen_shapes=tuple(shape for shape, trained in signature if not trained),
    )
    number = 0
    while True:
        name = f"{pattern or 'model'}:{class_name}" + (f"#{number}" if number else "")
        if kinds.setdefault(name, kind) == kind:
            return name
        number += 1
