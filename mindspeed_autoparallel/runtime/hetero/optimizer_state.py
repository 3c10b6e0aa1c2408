"""Joins the optimizer state of several modules to that of a homogeneous run, and splits it again.

Three kinds of state dict: torch's own (``state`` by parameter number, ``param_groups``), the same with fp32 copies of
half-precision weights group by group, and the distributed optimizer's fully reshardable one (``param_state`` by
parameter number). Tensors carry the keys of their weights, so parameter numbers have no meaning outside one rank;
groups are identified by the same settings as in Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

StateDict = dict[Any, Any]
_COPIES = "fp32_from_fp16_params"
_RESHARDABLE = "param_state"
_STEP = "common_step"
_IDENTIFIERS = (
    *("end_wd", "max_lr", "min_lr", "optimizer", "start_wd", "wd_mult", "lr_mult"),
    *("is_expert_parallel", "is_decoupled_lr"),
)


def can_be_joined(state_dict: Any) -> bool:
    """Return whether a state dict has a form that ``join`` produces."""
    if isinstance(state_dict, dict) and _RESHARDABLE in state_dict:
        return True
    if isinstance(state_dict, dict) and _COPIES in state_dict:
        state_dict = state_dict["optimizer"]
    return isinstance(state_dict, dict) and set(state_dict) == {"state", "param_groups"}


def identity(group: Mapping[str, object]) -> tuple[Any, ...]:
    """Return the settings that identify a parameter group across runs."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFIERS)


def join(parts: Sequence[StateDict]) -> StateDict:
    """Return one state dict: later parts' parameters are numbered after earlier parts', equal groups are merged."""
    if _RESHARDABLE in parts[0]:
        return _join_reshardable(parts)
    if _COPIES not in parts[0]:
        return _join_plain(parts)
    copies: dict[tuple[Any, ...], list[Any]] = {}
    for part in parts:
        for group, own in zip(part["optimizer"]["param_groups"], part[_COPIES], strict=True):
            copies.setdefault(identity(group), []).extend(own)
    # One loss scaler serves all parts.
    return {**parts[0], "optimizer": _join_plain([part["optimizer"] for part in parts]), _COPIES: list(copies.values())}


def num_parameters(part: StateDict) -> int:
    """Return the number of parameters in the ``param_state`` of a part; 0 for the other kinds."""
    return len(part.get(_RESHARDABLE, ()))


def split(
    joined: StateDict, own_groups: Sequence[Sequence[Mapping[str, Any]]], own_sizes: Sequence[int] = ()
) -> list[StateDict]:
    """Return the parts of ``joined`` again; ``own_groups``: the groups of each part's optimizer now, ``own_sizes``:
    ``num_parameters`` of each part, both in the order of ``join``.

    ``ValueError`` names a group that the joined state lacks.
    """
    if _RESHARDABLE in joined:
        return _split_reshardable(joined, own_sizes)
    if _COPIES not in joined:
        return _split_plain(joined, own_groups)
    plain = _split_plain(joined["optimizer"], own_groups)
    names = [identity(group) for group in joined["optimizer"]["param_groups"]]
    copies = {name: iter(own) for name, own in zip(names, joined[_COPIES], strict=True)}
    return [
        {
            **joined,
            "optimizer": part,
            _COPIES: [list(itertools.islice(copies[identity(group)], len(group["params"]))) for group in groups],
        }
        for part, groups in zip(plain, own_groups, strict=True)
    ]


def _join_reshardable(parts: Sequence[StateDict]) -> StateDict:
    groups = {identity(group): group for part in reversed(parts) for group in part["optimizer"]["param_groups"]}
    state = [values for part in parts for _, values in sorted(part[_RESHARDABLE].items())]
    optimizer = {**parts[0]["optimizer"], "param_groups": list(groups.values())}
    return {**parts[0], "optimizer": optimizer, _RESHARDABLE: dict(enumerate(state))}


def _split_reshardable(joined: StateDict, own_sizes: Sequence[int]) -> list[StateDict]:
    """Return the state of every part; each has all groups, from which its optimizer takes its own."""
    values = iter([joined[_RESHARDABLE][number] for number in sorted(joined[_RESHARDABLE])])
    return [{**joined, _RESHARDABLE: dict(enumerate(itertools.islice(values, size)))} for size in own_sizes]


def _join_plain(parts: Sequence[StateDict]) -> StateDict:
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


def _split_plain(joined: StateDict, own_groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[StateDict]:
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
    """Return plain numbers: Megatron wraps rank-local values (``LocalNonpersistentObject``)."""
    return list(numbers.unwrap()) if hasattr(numbers, "unwrap") else list(numbers)


def _wrapped_like(example: Any, numbers: list[int]) -> Any:
    return type(example)(numbers) if hasattr(example, "unwrap") else numbers
