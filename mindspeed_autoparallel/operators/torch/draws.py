"""Random numbers that are the same for a module and its capture, and generators that a comparison leaves unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_autoparallel.operators.torch.decompositions import short_name

SEED = 20261123
_UNWRITTEN = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])


class SameDraws(TorchDispatchMode):
    """Fixes random numbers, so that module and capture need not draw in the same order.

    Masks keep all elements, draws are a constant or start from one seed, and uninitialized memory is zero.
    """

    _CONSTANT = 0.5
    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        keywords: Mapping[str, object] = kwargs or {}
        name = short_name(function)
        if name in ("bernoulli_", "uniform_", "normal_", "random_", "exponential_"):
            return args[0].fill_(1 if name == "bernoulli_" else self._CONSTANT)
        if name in ("uniform", "exponential", "normal_functional", "random"):  # the rewritten forms of those above
            return torch.full_like(args[0], self._CONSTANT)
        if name == "bernoulli":
            return torch.ones_like(args[0])
        if name in ("rand", "randn", "rand_like", "randn_like"):
            made = function(*args, **keywords)
            return made.fill_(self._CONSTANT)
        if name == "native_dropout":
            kept = 1.0 if not (len(args) < 3 or args[2]) else 1.0 / max(1e-9, 1.0 - float(args[1]))
            return args[0] * kept, torch.ones_like(args[0], dtype=torch.bool)
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            _seed_generators()
        made = function(*args, **keywords)
        return made.zero_() if name in _UNWRITTEN else made


def _accelerators() -> list[str]:
    """Return the initialized kinds; torch would seed the others later, when they are initialized."""
    return [kind for kind in ("cuda", "npu") if hasattr(torch, kind) and getattr(torch, kind).is_initialized()]


def kept_generators() -> contextlib.ExitStack:
    """Return a context that restores the generators of the CPU and of initialized accelerators."""
    kept = contextlib.ExitStack()
    kept.enter_context(torch.random.fork_rng(devices=[]))
    for kind in _accelerators():
        devices = range(getattr(torch, kind).device_count())
        kept.enter_context(torch.random.fork_rng(devices, device_type=kind))
    return kept


def _seed_generators() -> None:
    torch.default_generator.manual_seed(SEED)
    for kind in _accelerators():
        getattr(torch, kind).manual_seed_all(SEED)
