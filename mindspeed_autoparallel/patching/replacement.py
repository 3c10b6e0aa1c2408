"""The replacement of a patched function. Imports wrapt, so it is loaded with the first patch that is installed.

A replacement pickles and copies like the function it replaces. wrapt's own proxies refuse both, which breaks Ray tasks
and spawned processes that get a patched function as an argument. A process without this package unpickles the original.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import wrapt


class _Method(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]  # wrapt 1.16 has no type parameters
    """A patched method, reached through its class or an instance: pickles as that attribute."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        method = self.__wrapped__
        holder = getattr(method, "__self__", None)
        if holder is None:
            path = method.__qualname__.split(".")[:-1]
            holder = functools.reduce(getattr, path, sys.modules[method.__module__])
        return getattr, (holder, method.__name__)


class Replacement(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A patched function: pickles by name, like functions."""

    __bound_function_wrapper__ = _Method

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__qualname__

    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: object) -> Replacement:
        return self
