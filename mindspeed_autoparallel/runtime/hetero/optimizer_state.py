"""Optimizer state of several modules as that of one: what a homogeneous run writes, and back.

Works for optimizers whose state dict is torch's own (``state`` by parameter number, ``param_groups``). Moments carry
the keys of their weights, so numbers mean nothing outside one rank; groups are told apart as Megatron tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

StateDict = dict[Any, Any]
_STEP = "common_step"
_IDENTIFIERS = (
    "end_wd", "max_lr", "min_lr", "optimizer", "start_wd", "wd_mult", "lr_mult", "is_expert_parallel",
    "is_decoupled_lr",
)  # fmt: skip


def is_plain(state_dict: Any) -> bool:
    """Whether a part's state dict is of the kind that can be joined."""
    return isinstance(state_dict, dict) and set(state_dict) == {"state", "param_groups"}


def identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a parameter group the same in another run."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFIERS)


def join(parts: Sequence[StateDict]) -> StateDict:
    """One state dict; parameters of later parts are numbered after those of earlier ones, equal groups are one."""
    state: StateDict = {}
    groups: dict[tuple[Any, ...], StateDict] = {}
    first = 0
    for part in parts:
        for number, values in part["state"].items():
            state[number if number == _STEP else number + first] = values
        count = 0
        for group in part["param_groups"]:
            local = group["params"]
            numbers = [number + first for number in _unwrapped(local)]
            count += len(numbers)
            known = groups.get(identity(group))
            if known is None:
                groups[identity(group)] = {**group, "params": _wrapped_like(local, numbers)}
            else:
                known["params"] = _wrapped_like(local, _unwrapped(known["params"]) + numbers)
        first += count
    return {"state": state, "param_groups": list(groups.values())}


def split(joined: StateDict, own_groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[StateDict]:
    """The parts of ``joined`` again; ``own_groups``: the groups of each part's optimizer now, in the order of ``join``.

    ``ValueError`` names a group that the joined state has not got.
    """
    found = {identity(group): group for group in joined["param_groups"]}
    parts = []
    first = 0
    for groups in own_groups:
        loaded, count = [], 0
        for group in groups:
            size = len(group["params"])
            if identity(group) not in found:
                raise ValueError(f"the checkpoint has no parameter group {identity(group)}; it has {list(found)}")
            loaded.append({**found[identity(group)], "params": list(range(count, count + size))})
            count += size
        state: StateDict = {
            number: joined["state"][number + first] for number in range(count) if number + first in joined["state"]
        }
        if _STEP in joined["state"]:
            state[_STEP] = joined["state"][_STEP]
        parts.append({"state": state, "param_groups": loaded})
        first += count
    return parts


def _unwrapped(numbers: Any) -> list[int]:
    """Megatron wraps what is a rank's own affair (``LocalNonpersistentObject``)."""
    return list(numbers.unwrap()) if hasattr(numbers, "unwrap") else list(numbers)


def _wrapped_like(example: Any, numbers: list[int]) -> Any:
    return type(example)(numbers) if hasattr(example, "unwrap") else numbers
