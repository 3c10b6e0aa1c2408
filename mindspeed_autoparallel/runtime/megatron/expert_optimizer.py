"""Loads the state of one optimizer into two, and of two into one.

Megatron gives experts a separate optimizer if EP is above 1, and uses the common one if EP is 1. A
``torch_dist`` checkpoint names the tensors of the state by their parameters, so every optimizer finds its own.
The rest differs: settings of the parameter groups, the step and the loss scale are stored once, or under 0 and 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

State = dict[Any, Any]
_EXPERTS = "is_expert_parallel"


def load_state(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Convert the state to the form that a chain of as many optimizers would have saved, and load it.

    ``wrapped``: ``load_state_dict`` of the chained optimizer, whose one argument is the state.

    Raises ``RuntimeError`` if a parameter group has no counterpart in the checkpoint.
    """
    inner = wrapped.__self__.chained_optimizers  # type: ignore[attr-defined]  # a bound method
    state_dict: Any = args[0] if args else kwargs["state_dict"]
    if not isinstance(state_dict, dict):
        return wrapped(state_dict)
    single = {name: value for name, value in state_dict.items() if not isinstance(name, int)}
    numbered = [state_dict[number] for number in (0, 1) if number in state_dict]
    if len(numbered) != 2 or not single:
        return wrapped(state_dict)
    # Keys of both kinds: one kind is from the file, the other has the tensors loaded for these optimizers.
    if len(inner) == 1:
        return wrapped(_completed(single, numbered, inner[0]))
    if len(inner) == 2:
        return wrapped({n: _completed(numbered[n], [single], one) for n, one in enumerate(inner)})
    return wrapped(state_dict)


def _completed(loaded: State, stored: list[State], optimizer: Any) -> State:
    """Return ``loaded``, the tensors of ``optimizer``, with the other entries of the file's optimizers."""
    from megatron.core.dist_checkpointing.dict_utils import merge

    result = copy.deepcopy({name: value for name, value in stored[0].items() if not isinstance(loaded.get(name), list)})
    groups = [group for one in stored for group in _holder(one)["param_groups"]]
    _holder(result)["param_groups"] = [_settings(group, groups) for group in optimizer.param_groups]
    return dict(merge(result, loaded))


def _holder(state: State) -> State:
    """Return the part of ``state`` that has the parameter groups: optimizers with masters keep it one level below."""
    return dict.get(state, "optimizer", state)


def _settings(group: Mapping[str, object], stored: list[Mapping[str, object]]) -> dict[str, object]:
    """Return the stored settings of ``group``, matched by Megatron's identifying keys but ``is_expert_parallel``."""
    wanted = _identity(group)
    for candidate in stored:
        if _identity(candidate) == wanted:
            return {**candidate, _EXPERTS: group[_EXPERTS]}
    raise RuntimeError(
        f"the checkpoint has optimizer state of {len(stored)} parameter groups, none of them with {wanted}: give the "
        "learning rate and weight decay that it was saved with."
    )


def _identity(group: Mapping[str, object]) -> dict[str, object]:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    names = [name for name in param_group_identifier_keys if name != _EXPERTS]
    return {name: group.get(name, group.get(f"pre_{name}")) for name in names}
