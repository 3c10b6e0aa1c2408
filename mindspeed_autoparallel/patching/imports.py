"""Be called right before a package, or right after a module, is imported for the first time.

wrapt has a hook for the second, but importing wrapt alone takes half of what importing this package may take;
it is loaded when a patch is really installed, beside Megatron's own seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _BeforeImport:
    """Finds nothing; being asked for one of ``packages`` is the signal."""

    def __init__(self, packages: frozenset[str], prepare: Callable[[], None]) -> None:
        self.packages = packages
        self.prepare = prepare

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in self.packages:
            # Removed first: prepare() imports modules itself, and runs once.
            sys.meta_path.remove(self)
            self.prepare()


class _AfterImport:
    """Finds the watched modules through the other finders, and has its callbacks run when they are executed."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.callbacks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Notifying(spec.loader, self.callbacks[fullname])  # type: ignore[assignment]  # duck-typed loader
                return spec
        return None


class _Notifying:
    """A loader that runs callbacks after the real one has executed the module, and is the real one otherwise."""

    def __init__(self, loader: Any, callbacks: list[Callable[[ModuleType], None]]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: inspect, pickle and importlib.resources ask for it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)


_AFTER = _AfterImport()


def call_before_import(packages: Iterable[str], prepare: Callable[[], None]) -> None:
    """Call ``prepare`` once, right before the first of ``packages`` is imported."""
    sys.meta_path.insert(0, _BeforeImport(frozenset(packages), prepare))  # type: ignore[arg-type]  # a finder by duck


def call_after_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` when ``module_name`` has been executed and before anyone can copy names out of it;
    at once when it is imported already."""
    if module_name in sys.modules:
        callback(sys.modules[module_name])
        return
    if _AFTER not in sys.meta_path:
        sys.meta_path.insert(0, _AFTER)  # type: ignore[arg-type]  # a finder by duck
    _AFTER.callbacks.setdefault(module_name, []).append(callback)
