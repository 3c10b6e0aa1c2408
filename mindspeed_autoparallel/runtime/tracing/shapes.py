"""Operators on tensors that have shapes only, and a routing of tokens to experts that has data all the same.

Sizes behind a router depend on data. So the routing is replaced by a balanced one that is real, on pretended and on
real ranks alike, and whatever is computed from real tensors alone is really computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from mindspeed_autoparallel.patching import call_after_import


def run_on_shapes(function: Any, name: str, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Runs an operator; among tensors with data it really runs, also where others have shapes only.

    ``name``: of the operator; ``tensors``: all among its arguments.
    """
    if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        with unset_fake_temporarily():
            return function(*args, **kwargs)
    if name == "aten.masked_select.default" and not isinstance(args[1], FakeTensor):
        # The size depends on the mask, which is known.
        with unset_fake_temporarily():
            size = int(args[1].expand(args[0].shape).sum())
        return args[0].new_empty(size)
    return function(*args, **kwargs)


def balance_experts() -> None:
    """From now on Megatron's routers send the same number of tokens to every expert."""
    call_after_import("megatron.core.transformer.moe.router", _balance)
    call_after_import("megatron.core.transformer.moe.token_dispatcher", _keep_real)


def _balance(module: Any) -> None:
    routing = module.TopKRouter.routing

    @functools.wraps(routing)
    def balanced(self: Any, *args: Any, **kwargs: Any) -> Any:
        probabilities, routed = routing(self, *args, **kwargs)
        num_tokens, num_experts = routed.shape
        with unset_fake_temporarily():
            chosen = (torch.arange(num_tokens * self.topk) % num_experts).reshape(num_tokens, self.topk)
            balanced_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)
        return probabilities, balanced_map

    module.TopKRouter.routing = balanced


def _keep_real(module: Any) -> None:
    # What a dispatcher makes itself, such as the order of its experts, decides sizes as well.
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for name in {"__init__", "preprocess"} & set(vars(value)):
                setattr(value, name, _really(vars(value)[name]))


def _really(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run
