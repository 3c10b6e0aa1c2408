"""Whether our wrapper is still called: other plugins may wrap the same function again, or replace it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

_MOST_LOOKED_AT = 500
"""Closures of decorators hold a handful of functions; whole object graphs are not searched."""


def leads_to(function: Any, ours: Any) -> bool:
    """Return whether ``function`` can reach ``ours``, through wrappers, closures, partials and names it refers to."""
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        item = waiting.pop(0)
        if item is ours:
            return True
        if id(item) not in seen:
            seen.add(id(item))
            waiting += _callables_in(item)
            # Of the globals that a function names, follow only our own wrappers: one may wrap another.
            waiting += [named for named in _names_referred_to(item) if type(named) is type(ours)]
    return False


def place_of(function: Any) -> str:
    """Return the qualified name of ``function`` for messages: ``package.module.name``."""
    plain = function
    while not isinstance(plain, types.FunctionType) and hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    # functools.wraps copies the name of the wrapped function; the code object keeps its own.
    code = getattr(plain, "__code__", None)
    written = getattr(plain, "__globals__", {}).get("__name__") or getattr(plain, "__module__", "")
    own = getattr(code, "co_qualname", None) or getattr(code, "co_name", None) or getattr(plain, "__qualname__", "")
    return ".".join(part for part in (written, own) if part) or repr(function)


def _callables_in(item: Any) -> Iterator[Any]:
    wrapped = inspect.getattr_static(item, "__wrapped__", None)
    if wrapped is not None or type(item).__module__.startswith("wrapt"):
        yield getattr(item, "__wrapped__", None)
    if isinstance(item, functools.partial):
        yield item.func
    if isinstance(item, (staticmethod, classmethod, types.MethodType)):
        yield item.__func__
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if callable(content):
                yield content
    elif callable(item) and not isinstance(item, type):
        # An object with __call__ keeps the function it calls in an attribute.
        yield from (value for value in getattr(item, "__dict__", {}).values() if callable(value))


def _names_referred_to(item: Any) -> Iterator[Any]:
    """Yield globals that a function's own code names: a replacement may have imported the function that it calls."""
    if isinstance(item, types.FunctionType):
        yield from (item.__globals__.get(name) for name in item.__code__.co_names)
