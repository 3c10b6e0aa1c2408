"""Operators on tensors of which some have shapes only.

Sizes behind an expert router depend on data, so the routing is balanced and real (``balanced_routing``), on fake and on
real ranks alike, and whatever is computed from real tensors alone is really computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def is_fake(tensor: Any) -> bool:
    """Return whether ``tensor`` has a shape only."""
    return isinstance(tensor, FakeTensor)


def really() -> Any:
    """Return a context in which new tensors have data."""
    return unset_fake_temporarily()


def run_on_shapes(function: Any, name: str, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Run an operator; among tensors with data it really runs, also where others have shapes only.

    ``name``: of the operator; ``tensors``: all among its arguments.
    """
    if tensors and not any(is_fake(tensor) for tensor in tensors):
        with really():
            return function(*args, **kwargs)
    if name == "aten.masked_select.default" and not is_fake(args[1]):
        # The size depends on the mask, which is known.
        with really():
            size = int(args[1].expand(args[0].shape).sum())
        return args[0].new_empty(size)
    return function(*args, **kwargs)
