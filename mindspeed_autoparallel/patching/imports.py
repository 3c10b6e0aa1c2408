"""Callbacks right before a package, or right after a module, is imported for the first time.

wrapt has a hook for the second, but importing wrapt takes half of this package's budget for import time;
it is loaded only when a patch is installed, where Megatron's own import takes seconds.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _BeforeImport:
    """A finder that finds nothing: a lookup of one of ``packages`` triggers ``prepare``."""

    def __init__(self, packages: frozenset[str], prepare: Callable[[], None]) -> None:
        self.packages = packages
        self.prepare = prepare

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in self.packages:
            # prepare() imports modules itself, and runs once. The finder stays: removing it would make a loop
            # over sys.meta_path that is running now skip the next finder.
            self.packages = frozenset()
            self.prepare()


class _AfterImport:
    """Finds watched modules through the other finders, and holds the callbacks to run once they are executed; several
    threads may import and register at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._callbacks: dict[str, list[Callback]] = {}
        self._executing: set[str] = set()
        self._finding: set[tuple[int, str]] = set()

    def add(self, name: str, callback: Callback) -> ModuleType | None:
        """Register ``callback``, or return the module if it has been executed already."""
        with self._lock:
            module = sys.modules.get(name)
            if module is None or name in self._executing:
                self._callbacks.setdefault(name, []).append(callback)
                return None
            return module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        key = (threading.get_ident(), fullname)
        with self._lock:
            if fullname not in self._callbacks or key in self._finding:
                return None
            self._finding.add(key)
        try:
            # find_spec calls all finders again, this one included, and supports legacy finders.
            spec = importlib.util.find_spec(fullname)
        except ValueError:
            # A module put into sys.modules by hand has no spec.
            spec = None
        finally:
            with self._lock:
                self._finding.discard(key)
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, _Notifying):
            spec.loader = _Notifying(spec.loader, fullname)  # type: ignore[assignment]  # duck-typed loader
        return spec

    def begin_execution(self, name: str) -> None:
        """Defer callbacks for ``name`` until it has been executed."""
        with self._lock:
            self._executing.add(name)

    def end_execution(self, name: str) -> list[Callback]:
        """Return the callbacks to run; later ones are run at once."""
        with self._lock:
            self._executing.discard(name)
            return list(self._callbacks.get(name, ()))


class _Notifying:
    """Run callbacks after the real loader has executed the module; delegate everything else to that loader."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: inspect, pickle and importlib.resources read it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _AFTER.begin_execution(self._name)
        try:
            self._loader.exec_module(module)
        except BaseException:
            _AFTER.end_execution(self._name)
            raise
        for callback in _AFTER.end_execution(self._name):
            callback(module)


_AFTER = _AfterImport()


def call_before_import(packages: Iterable[str], prepare: Callable[[], None]) -> None:
    """Call ``prepare`` once, right before the first of ``packages`` is imported."""
    sys.meta_path.insert(0, _BeforeImport(frozenset(packages), prepare))  # type: ignore[arg-type]  # a finder by duck


def call_after_import(module_name: str, callback: Callback) -> None:
    """Call ``callback(module)`` when ``module_name`` has been executed and before other modules can copy
    names out of it.

    If it has been executed already, call it at once.
    """
    module = _AFTER.add(module_name, callback)
    if module is not None:
        callback(module)
    elif _AFTER not in sys.meta_path:
        sys.meta_path.insert(0, _AFTER)  # type: ignore[arg-type]  # a finder by duck
