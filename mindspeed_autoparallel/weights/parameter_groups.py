"""The parameter groups of Megatron's Adam: the group of a parameter, and the order of groups on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights.placement import Entry

Group = Mapping[str, Any]


def inner(part: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer inside that of Megatron's."""
    return part["optimizer"] if isinstance(part.get("optimizer"), dict) else part


def decays(name: str, num_dims: int) -> bool:
    """Return whether Megatron decays a parameter: no bias and no vector."""
    return num_dims > 1 and not name.endswith(".bias")


def has_decay(group: Group) -> bool:
    """Return whether the parameters of a group decay."""
    return bool(group.get("wd_mult", group.get("pre_wd_mult", 1.0)))


def groups_of_rank(part: dict[str, Any], parameters: Mapping[Entry, tuple[int, ...]]) -> list[Group]:
    """Return the groups of ``part``, an optimizer's state, in the order of a rank with ``parameters``, in their order.

    Megatron up to 0.15 orders them by first occurrence among a rank's parameters; later releases, whose groups have
    ``default_config``, in one order everywhere.
    """
    groups: list[Group] = inner(part)["param_groups"]
    if any("default_config" in group for group in groups):
        return groups
    met = dict.fromkeys(group_for(decays(entry.name, len(shape)), groups) for entry, shape in parameters.items())
    return [groups[number] for number in [*met, *(number for number in range(len(groups)) if number not in met)]]


def group_for(decayed: bool, groups: list[Group]) -> int:
    """Return the number of the group of a parameter; ``ConfigError`` unless exactly one fits."""
    fitting = [number for number, group in enumerate(groups) if has_decay(group) == decayed]
    if len(fitting) != 1:
        raise ConfigError(
            f"the optimizer has {len(fitting)} groups of parameters "
            f"{'with' if decayed else 'without'} weight decay, so that their order in another layout is unknown. Give "
            "--format torch_dist, or --weights-only."
        )
    return fitting[0]
