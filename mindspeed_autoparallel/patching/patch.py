"""A patch as data: the function it wraps, in which releases, for which flags, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], Mapping[str, object]], Any]
"""``wrapper(wrapped, instance, args, kwargs) -> result``: wrapt's protocol; call ``wrapped`` to go on."""


@dataclass(frozen=True)
class Calls:
    """The wrapper that calls ``function(*first, wrapped, args, kwargs)``; its module is imported by the first call."""

    target: str
    """``module:function``, the module without the name of this package."""
    first: tuple[object, ...] = ()

    def __call__(
        self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]
    ) -> Any:
        """Call the function; wrapt's protocol."""
        return self.function(*self.first, wrapped, args, kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function; its module is imported if it was not yet."""
        module, _, name = self.target.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(f"mindspeed_autoparallel.{module}"), name)
        return found


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One wrapped function or method of a host module."""

    target: str
    """``module.path:function`` or ``module.path:Class.method``."""
    wrapper: Wrapper
    """Called instead of the target; with the feature's flags off it passes arguments and result on unchanged."""
    why: str
    """One sentence for docs/patches.md."""
    versions: str = ">=0.12,<0.21"
    """Releases of the distribution the wrapper is written for, as a PEP 440 specifier."""
    distribution: str = "megatron-core"
    """The distribution that ``versions`` refers to: ``megatron-core``, or another (whose release is not checked)."""
    flags: tuple[str, ...] = ()
    """Active once one of these (command line flags or an environment variable) is true, and passes calls on until then;
    empty: always."""
    watched_by: tuple[str, ...] = ()
    """The subset of ``flags`` for which the wrapper only watches: training is the same without it."""
    instead_of: str = ""
    """The Megatron target that the host never calls, because the host calls this patch's target instead."""
    parameters: tuple[str, ...] = field(default=())
    """Parameter names the wrapper relies on; checked against the target's signature before it is installed."""

    @property
    def module(self) -> str:
        """Return the module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Return the target's dotted path inside the module."""
        return self.target.partition(":")[2]
